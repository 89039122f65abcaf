"""Fine-tune a language model on conversations, prompts or texts with TRL, privately unless `disable_dp: true`.

    accelerate launch scripts/sft.py recipes/sft/capybara-qwen2.5-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `SFTArguments`, `LoraArguments` and
`DopplerSFTConfig` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or from a
folder of parquet files with `--dataset_dir`, in one of TRL's formats: with the column `messages`, the columns `prompt` and
`completion`, or `text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, set_seed
from transformers.hf_argparser import HfArg

from doppler_hf.extras import require
from doppler_hf.workloads.arguments import one_line_errors, parse_args, refuse_without_effect
from doppler_hf.workloads.data_sources import load_rows
from doppler_hf.workloads.hub import hub_or_folder
from doppler_hf.workloads.launch import train_and_evaluate
from doppler_hf.workloads.lora import LoraArguments, add_lora
from doppler_hf.workloads.workload import load_tokenizer


@dataclass
class SFTArguments:
    """The language model and the rows to train it on."""

    model_name_or_path: str = HfArg(help="Hub name or local folder of the pretrained model.")
    dataset_name: str = HfArg(default="trl-lib/Capybara", help="Name of the data set on the hub.")
    dataset_config: str | None = HfArg(default=None, help="The hub's configuration of the data set.")
    validation_split: str = HfArg(default="test", help="The hub's split to evaluate on, or a part of it, as test[:1000].")
    dataset_dir: str | None = HfArg(
        default=None, help="Local folder with train.parquet and validation.parquet; by default the hub."
    )
    dtype: str = HfArg(
        default="float32",
        help="Type of the loaded weights: bfloat16 halves the memory of those that LoRA freezes; the adapters stay float32.",
        metadata={"choices": ["float32", "bfloat16"]},
    )

    def __post_init__(self) -> None:
        """Refuse what a local folder overrules."""
        if self.dataset_dir is not None:
            refuse_without_effect(self, "dataset_name", "dataset_config", "validation_split", beside="dataset_dir")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        require("trl")
        from doppler_hf import DopplerSFTConfig, DopplerSFTTrainer

        args, lora_args, training_args = parse_args(SFTArguments, LoraArguments, DopplerSFTConfig, argv=argv)
        set_seed(training_args.seed)  # for new adapters; noise and draws do not follow it
        rows = load_rows(
            args.dataset_name, args.dataset_dir, dataset_config=args.dataset_config, validation_split=args.validation_split
        )
        with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
            tokenizer = load_tokenizer(args.model_name_or_path)
            model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
        model = add_lora(model, lora_args, task_type="CAUSAL_LM")
    trainer = DopplerSFTTrainer(
        model, training_args, train_dataset=rows["train"], eval_dataset=rows["validation"], processing_class=tokenizer
    )
    train_and_evaluate(trainer, {"eval": trainer.eval_dataset})


if __name__ == "__main__":
    main()
