"""Fine-tune a sequence classifier on a GLUE task, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/glue.py recipes/glue/sst2-lp-adambc-eps3.yaml [--any_field value]

Every field of `GlueArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the recipe or follow it as a
flag; the flag wins. The data comes from the hub, or from a folder of parquet files with `--dataset_dir`.
"""

from collections.abc import Sequence

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.glue import GlueArguments, build
from doppler_hf.workloads.lora import LoraArguments


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(GlueArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        workload = build(args, lora_args, training_args)

    trainer = DopplerTrainer(
        model=workload.model,
        args=training_args,
        train_dataset=workload.train_dataset,
        eval_dataset=workload.eval_dataset,
        data_collator=workload.data_collator,
        processing_class=workload.processing_class,
        compute_metrics=workload.compute_metrics,
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)

    for prefix, dataset in workload.eval_datasets.items():
        metrics = trainer.evaluate(dataset, metric_key_prefix=prefix)
        trainer.log_metrics(prefix, metrics)
        trainer.save_metrics(prefix, metrics)


if __name__ == "__main__":
    main()
