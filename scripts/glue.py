"""Fine-tune a sequence classifier on a GLUE task, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/glue.py recipes/glue/sst2-lp-adambc-eps3.yaml [--any_field value]

Every field of `GlueArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the recipe or follow it as a
flag; the flag wins. The data comes from the hub, or from a folder of parquet files with `--dataset_dir`.
"""

from collections.abc import Sequence

from doppler_hf import DopplerTrainer
from doppler_hf.workloads.launch import launch
from doppler_hf.workloads.recipe import KINDS


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    launch(DopplerTrainer, KINDS["glue"], argv=argv)


if __name__ == "__main__":
    main()
