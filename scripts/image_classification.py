"""Train a Vision Transformer on labelled images, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/image_classification.py recipes/image/digits-eps8.yaml [--any_field value]

With `--model_name_or_path` a pretrained model is fine-tuned; without it a small ViT of the given sizes is trained from
scratch. The data comes from the hub (`cifar10`, `mnist`), from scikit-learn (`digits`), or from a folder of parquet files
with `--dataset_dir`. Every field of the three dataclasses may stand in the recipe or follow it as a flag.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers.models.vit import ViTImageProcessorPil

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli_args import one_line_errors, parse_args
from doppler_hf.hub import hub_or_folder
from doppler_hf.lora import LoraArguments, add_lora
from doppler_hf.metrics import accuracy_from_logits
from doppler_hf.tasks import load_images


@dataclass
class ScriptArguments:
    """What to train on what."""

    dataset_name: str = field(default="cifar10", metadata={"help": "One of cifar10, mnist, digits."})
    dataset_dir: str | None = field(
        default=None, metadata={"help": "Local folder with train.parquet and test.parquet; by default the hub."}
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Hub name or local folder of a pretrained model; by default a small ViT from scratch."},
    )
    image_size: int = field(default=32, metadata={"help": "Side of the images in pixels, from scratch only."})
    patch_size: int = field(default=4, metadata={"help": "Side of a patch in pixels, from scratch only."})
    hidden_size: int = field(default=192, metadata={"help": "Width of the model, from scratch only."})
    num_layers: int = field(default=6, metadata={"help": "Number of transformer layers, from scratch only."})
    num_heads: int = field(default=3, metadata={"help": "Number of attention heads, from scratch only."})


def vit_from_scratch(args: ScriptArguments, *, num_channels: int, num_labels: int) -> tuple[Any, Any]:
    """Build an untrained ViT and the processor of its images."""
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
    half = [0.5] * num_channels
    size = {"height": args.image_size, "width": args.image_size}
    return ViTForImageClassification(config), ViTImageProcessorPil(size=size, image_mean=half, image_std=half)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(ScriptArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        splits = load_images(args.dataset_name, args.dataset_dir)
        label_names = splits["train"].features["label"].names
        if args.model_name_or_path is None:
            num_channels = len(splits["test"][0]["image"].getbands())
            model, processor = vit_from_scratch(args, num_channels=num_channels, num_labels=len(label_names))
        else:
            with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
                processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
                # Most pretrained heads know other classes, and give way to a fresh one.
                model = AutoModelForImageClassification.from_pretrained(
                    args.model_name_or_path, num_labels=len(label_names), ignore_mismatched_sizes=True
                )
        model.config.id2label = dict(enumerate(label_names))
        model.config.label2id = {name: label for label, name in enumerate(label_names)}
        mode = "L" if model.config.num_channels == 1 else "RGB"
        model = add_lora(model, lora_args, task_type=None)

    def to_pixel_values(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert(mode) for image in rows["image"]]
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    # Images are converted when a batch asks for them; the trainer must not drop the column that they come from.
    training_args.remove_unused_columns = False
    splits = splits.with_transform(to_pixel_values)

    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=processor,
        compute_metrics=accuracy_from_logits,
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
