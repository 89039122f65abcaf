"""Classification of labelled images: a pretrained model, or from scratch a small Vision Transformer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification, set_seed
from transformers.hf_argparser import HfArg
from transformers.models.vit import ViTImageProcessorPil

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.workloads.arguments import refuse_without_effect
from doppler_hf.workloads.data_sources import load_images
from doppler_hf.workloads.hub import hub_or_folder
from doppler_hf.workloads.lora import LoraArguments, add_lora
from doppler_hf.workloads.workload import Workload, name_classes


@dataclass
class ImageArguments:
    """The model and the images to train it on."""

    dataset_name: str = HfArg(default="cifar10", help="One of cifar10, cifar100, mnist, digits.")
    dataset_dir: str | None = HfArg(
        default=None, help="Local folder with train.parquet and test.parquet; by default the hub."
    )
    model_name_or_path: str | None = HfArg(
        default=None, help="Hub name or local folder of a pretrained model; by default a small ViT from scratch."
    )
    image_size: int = HfArg(default=32, help="Side of the images in pixels, from scratch only.")
    patch_size: int = HfArg(default=4, help="Side of a patch in pixels, from scratch only.")
    hidden_size: int = HfArg(default=192, help="Width of the model, from scratch only.")
    num_layers: int = HfArg(default=6, help="Number of transformer layers, from scratch only.")
    num_heads: int = HfArg(default=3, help="Number of attention heads, from scratch only.")

    def __post_init__(self) -> None:
        """Refuse what a local folder or a pretrained model overrules."""
        if self.dataset_dir is not None:
            refuse_without_effect(self, "dataset_name", beside="dataset_dir")
        if self.model_name_or_path is not None:
            of_vit = ("image_size", "patch_size", "hidden_size", "num_layers", "num_heads")
            refuse_without_effect(self, *of_vit, beside="model_name_or_path")


def build(args: ImageArguments, lora_args: LoraArguments, training_args: DopplerTrainingArguments) -> Workload:
    """Load the data, and load or build the model, as `glue.build` does.

    Images are converted when a batch asks for them, for which `remove_unused_columns` is turned off in `training_args`
    (modified in place).
    """
    from doppler_hf.workloads.metrics import accuracy_from_logits

    set_seed(training_args.seed)  # for new weights, such as a head's; noise and draws do not follow it
    splits = load_images(args.dataset_name, args.dataset_dir, unit_column=training_args.privacy_unit_column)
    label_names = splits["train"].features["label"].names
    if args.model_name_or_path is None:
        num_channels = len(splits["test"][0]["image"].getbands())
        model, processor = from_scratch(args, num_channels=num_channels, num_labels=len(label_names))
    else:
        with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
            processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
            # Most pretrained heads are for other classes.
            model = AutoModelForImageClassification.from_pretrained(
                args.model_name_or_path, num_labels=len(label_names), ignore_mismatched_sizes=True
            )
    name_classes(model, label_names)
    splits = splits.with_transform(model_inputs(processor, model.config.num_channels))
    # The trainer must not drop the column that they come from.
    training_args.remove_unused_columns = False
    return Workload(
        model=add_lora(model, lora_args, task_type=None),
        train_dataset=splits["train"],
        eval_datasets={"eval": splits["test"]},
        processing_class=processor,
        compute_metrics=accuracy_from_logits,
    )


def from_scratch(args: ImageArguments, *, num_channels: int, num_labels: int) -> tuple[Any, Any]:
    """Build an untrained network and the processor of its images."""
    config = ViTConfig(
        image_size=args.image_size,
        patch_size=args.patch_size,
        num_channels=num_channels,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_labels=num_labels,
    )
    # Constants, not the training set's own mean and deviation: those would be released without noise.
    half, size = [0.5] * num_channels, {"height": args.image_size, "width": args.image_size}
    return ViTForImageClassification(config), ViTImageProcessorPil(size=size, image_mean=half, image_std=half)


def model_inputs(processor: Any, num_channels: int) -> Callable[[dict[str, list[Any]]], dict[str, Any]]:
    """Return what makes a model's inputs of rows of images and labels."""
    mode = "L" if num_channels == 1 else "RGB"

    def to_pixel_values(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert(mode) for image in rows["image"]]
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    return to_pixel_values
