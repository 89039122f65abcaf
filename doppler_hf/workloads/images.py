"""Classification of labelled images: a pretrained model, or from scratch a small Vision Transformer, or scattering."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification, set_seed
from transformers.hf_argparser import HfArg
from transformers.models.vit import ViTImageProcessorPil

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.workloads.arguments import refuse_without_effect
from doppler_hf.workloads.data_sources import load_images
from doppler_hf.workloads.hub import hub_or_folder
from doppler_hf.workloads.lora import LoraArguments, add_lora
from doppler_hf.workloads.scattering import PATHS, STRIDE, Scattering, ScatteringConfig, ScatteringForImageClassification
from doppler_hf.workloads.workload import Workload, name_classes

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass
class ImageArguments:
    """The model and the images to train it on."""

    dataset_name: str = HfArg(default="cifar10", help="One of cifar10, cifar100, mnist, digits.")
    dataset_dir: str | None = HfArg(
        default=None, help="Local folder with train.parquet and test.parquet; by default the hub."
    )
    model_name_or_path: str | None = HfArg(
        default=None, help="Hub name or local folder of a pretrained model; by default a small network from scratch."
    )
    scattering: bool = HfArg(default=False, help="Train a small network on wavelet scattering coefficients, not a ViT.")
    num_filters: int = HfArg(default=48, help="Filters of each convolution on scattering coefficients; 0 for none.")
    flip_invariant: bool = HfArg(
        default=False, help="With scattering: classify images and their flips from left to right alike. Not for digits."
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
        of_vit = ("patch_size", "hidden_size", "num_layers", "num_heads")
        if self.model_name_or_path is not None:
            refuse_without_effect(self, "scattering", "image_size", *of_vit, beside="model_name_or_path")
        if self.scattering:
            refuse_without_effect(self, *of_vit, beside="scattering")
        else:
            refuse_without_effect(self, "num_filters", "flip_invariant", beside="scattering")


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
    mode = "L" if model.config.num_channels == 1 else "RGB"
    model = add_lora(model, lora_args, task_type=None)

    def to_pixel_values(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert(mode) for image in rows["image"]]
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    # The trainer must not drop the column that they come from.
    training_args.remove_unused_columns = False
    if args.scattering:
        with training_args.main_process_first(desc="scatter"):
            splits = scattered(splits, to_pixel_values, model.config, kept=training_args.privacy_unit_column)
    else:
        splits = splits.with_transform(to_pixel_values)
    return Workload(
        model=model,
        train_dataset=splits["train"],
        eval_datasets={"eval": splits["test"]},
        processing_class=processor,
        compute_metrics=accuracy_from_logits,
    )


def from_scratch(args: ImageArguments, *, num_channels: int, num_labels: int) -> tuple[Any, Any]:
    """Build an untrained network and the processor of its images."""
    sizes = {"image_size": args.image_size, "num_channels": num_channels, "num_labels": num_labels}
    if args.scattering:
        model: Any = ScatteringForImageClassification(
            ScatteringConfig(num_filters=args.num_filters, flip_invariant=args.flip_invariant, **sizes)
        )
    else:
        sizes |= {"patch_size": args.patch_size, "hidden_size": args.hidden_size, "intermediate_size": 4 * args.hidden_size}
        config = ViTConfig(num_hidden_layers=args.num_layers, num_attention_heads=args.num_heads, **sizes)
        model = ViTForImageClassification(config)
    # Constants, not the training set's own mean and deviation: those would be released without noise.
    half = [0.5] * num_channels
    side = {"height": args.image_size, "width": args.image_size}
    return model, ViTImageProcessorPil(size=side, image_mean=half, image_std=half)


def scattered(
    splits: "DatasetDict", to_pixel_values: Callable[..., dict[str, Any]], config: ScatteringConfig, *, kept: str | None
) -> "DatasetDict":
    """Return the splits as scattering coefficients in half precision, cached by `datasets`, with labels and `kept`."""
    from datasets import Array3D, DatasetDict, Features, Value

    # Not the model's, by whose weights the cache would take each seed for another computation.
    scattering = Scattering(config.image_size)
    side = config.image_size // STRIDE
    features = {"coefficients": Array3D((PATHS * config.num_channels, side, side), "float16"), "labels": Value("int64")}

    def to_coefficients(rows: dict[str, list[Any]]) -> dict[str, Any]:
        inputs = to_pixel_values(rows)
        with torch.no_grad():
            return {"coefficients": scattering(inputs["pixel_values"]).half().numpy(), "labels": inputs["labels"]}

    coefficients = {}
    for name, split in splits.items():
        others = {column: kind for column, kind in split.features.items() if column == kept}
        options = {"batched": True, "batch_size": 64, "features": Features({**features, **others})}
        unused = [column for column in split.column_names if column not in others]
        coefficients[name] = split.map(to_coefficients, remove_columns=unused, desc="Scattering images", **options)
    return DatasetDict(coefficients).with_format("torch")
