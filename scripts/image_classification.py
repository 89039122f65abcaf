"""Train a Vision Transformer on labelled images, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/image_classification.py recipes/image/digits-eps8.yaml [--any_field value]

With `--model_name_or_path` a pretrained model is fine-tuned; without it a small ViT of the given sizes is trained from
scratch. The data comes from the hub (`cifar10`, `mnist`), from scikit-learn (`digits`), or from a folder of parquet files
with `--dataset_dir`. Every field of `ImageArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the
recipe or follow it as a flag; the flag wins.
"""

from collections.abc import Sequence

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.images import ImageArguments, build
from doppler_hf.workloads.launch import train_and_evaluate
from doppler_hf.workloads.lora import LoraArguments


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(ImageArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        workload = build(args, lora_args, training_args)
    trainer = DopplerTrainer(args=training_args, **workload.for_trainer())
    train_and_evaluate(trainer, workload.eval_datasets)


if __name__ == "__main__":
    main()
