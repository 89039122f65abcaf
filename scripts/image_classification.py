"""Train a Vision Transformer on labelled images, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/image_classification.py recipes/image/digits-eps8.yaml [--any_field value]

With `--model_name_or_path` a pretrained model is fine-tuned; without it a small ViT of the given sizes is trained from
scratch. The data comes from the hub (`cifar10`, `mnist`), from scikit-learn (`digits`), or from a folder of parquet files
with `--dataset_dir`. Every field of `ImageArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the
recipe or follow it as a flag; the flag wins.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification, set_seed
from transformers.hf_argparser import HfArg
from transformers.models.vit import ViTImageProcessorPil

# Python puts the folder of a script on the path, and not the one above it, in which the package and `scripts` are.
sys.path.insert(0, str(Path(__file__).parents[1]))

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from scripts.training.arguments import one_line_errors, parse_args, refuse_unused_fields
from scripts.training.data_sources import load_images
from scripts.training.hub import hub_or_folder
from scripts.training.lora import LoraArguments, add_lora
from scripts.training.metrics import accuracy_from_logits
from scripts.training.models import name_classes


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
            refuse_unused_fields(self, "dataset_name", beside="dataset_dir")
        if self.model_name_or_path is not None:
            of_vit = ("image_size", "patch_size", "hidden_size", "num_layers", "num_heads")
            refuse_unused_fields(self, *of_vit, beside="model_name_or_path")


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


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save and evaluate."""
    with one_line_errors():
        # Arguments
        args, lora_args, training_args = parse_args(ImageArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        set_seed(training_args.seed)  # for new weights, such as a head's; noise and draws do not follow it

        # Data
        splits = load_images(args.dataset_name, args.dataset_dir, unit_column=training_args.privacy_unit_column)
        label_names = splits["train"].features["label"].names

        # Model
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

        # Images are converted when a batch asks for them, and so the trainer must keep the column that they come from.
        splits = splits.with_transform(model_inputs(processor, model.config.num_channels))
        training_args.remove_unused_columns = False
        model = add_lora(model, lora_args, task_type=None)

    # Trainer
    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=processor,
        compute_metrics=accuracy_from_logits,
    )

    # Training, and what it leaves in `output_dir`
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
