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
from doppler_hf.workloads.lora import LoraArguments


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(ImageArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        workload = build(args, lora_args, training_args)

    trainer = DopplerTrainer(
        model=workload.model,
        args=training_args,
        train_dataset=workload.train_dataset,
        eval_dataset=workload.eval_dataset,
        processing_class=workload.processing_class,
        compute_metrics=workload.compute_metrics,
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
