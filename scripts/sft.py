"""Fine-tune a language model on conversations, prompts or texts with TRL, privately unless `disable_dp: true`.

    accelerate launch scripts/sft.py recipes/sft/capybara-qwen2.5-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `SFTArguments`, `LoraArguments` and
`DopplerSFTConfig` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or from a
folder of parquet files with `--dataset_dir`, in one of TRL's formats: with the column `messages`, the columns `prompt` and
`completion`, or `text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.language_model import LanguageModelArguments, for_trl
from doppler_hf.workloads.launch import train_and_evaluate
from doppler_hf.workloads.lora import LoraArguments


@dataclass
class SFTArguments(LanguageModelArguments):
    """The language model and the rows to train it on."""

    dataset_name: str = HfArg(default="trl-lib/Capybara", help="Name of the data set on the hub.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        from doppler_hf import DopplerSFTConfig, DopplerSFTTrainer

        args, lora_args, training_args = parse_args(SFTArguments, LoraArguments, DopplerSFTConfig, argv=argv)
        parts = for_trl(args, lora_args, seed=training_args.seed)
    trainer = DopplerSFTTrainer(args=training_args, **parts)
    train_and_evaluate(trainer, {"eval": None})


if __name__ == "__main__":
    main()
