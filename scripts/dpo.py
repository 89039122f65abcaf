"""Fine-tune a language model on pairs of answers, one of them preferred, with TRL, privately unless `disable_dp: true`.

    accelerate launch scripts/dpo.py recipes/dpo/ultrafeedback-qwen2.5-lora-eps8.yaml [--any_field value]

One row of the data, with both answers, is one example, and so the unit of privacy. Every field of `DPOArguments`,
`LoraArguments` and `DopplerDPOConfig` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the
hub, or from a folder of parquet files with `--dataset_dir`, with the columns `chosen`, `rejected` and, if these do not begin
with it, `prompt`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.language_model import LanguageModelArguments, for_trl
from doppler_hf.workloads.launch import train_and_evaluate
from doppler_hf.workloads.lora import LoraArguments


@dataclass
class DPOArguments(LanguageModelArguments):
    """The language model and the pairs to train it on."""

    dataset_name: str = HfArg(default="trl-lib/ultrafeedback_binarized", help="Name of the data set on the hub.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer

        args, lora_args, training_args = parse_args(DPOArguments, LoraArguments, DopplerDPOConfig, argv=argv)
        parts = for_trl(args, lora_args, seed=training_args.seed)
    trainer = DopplerDPOTrainer(args=training_args, **parts)
    train_and_evaluate(trainer, {"eval": None})


if __name__ == "__main__":
    main()
