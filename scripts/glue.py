"""Fine-tune a sequence classifier on a GLUE task, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/glue.py recipes/glue/sst2-lp-adambc-eps3.yaml [--any_field value]

Every field of `GlueArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the recipe or follow it as a
flag; the flag wins. The data comes from the hub, or from a folder of parquet files with `--dataset_dir`.
"""

from collections.abc import Sequence

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.glue import GlueArguments, build
from doppler_hf.workloads.launch import train_and_evaluate
from doppler_hf.workloads.lora import LoraArguments


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(GlueArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        workload = build(args, lora_args, training_args)
    trainer = DopplerTrainer(args=training_args, **workload.for_trainer())
    train_and_evaluate(trainer, workload.eval_datasets)


if __name__ == "__main__":
    main()
