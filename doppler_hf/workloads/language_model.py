"""A pretrained language model and rows of data: what the script for texts and those of TRL have in common."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, set_seed
from transformers.hf_argparser import HfArg

from doppler_hf.workloads.arguments import refuse_without_effect
from doppler_hf.workloads.data_sources import load_rows
from doppler_hf.workloads.hub import hub_or_folder
from doppler_hf.workloads.lora import LoraArguments, lora_config
from doppler_hf.workloads.workload import load_tokenizer

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass
class LanguageModelArguments:
    """The language model and the rows to train it on, whose subclasses give `dataset_name` a default."""

    model_name_or_path: str = HfArg(help="Hub name or local folder of the pretrained model.")
    dataset_name: str = HfArg(default="", help="Name of the data set on the hub.")
    dataset_config: str | None = HfArg(default=None, help="The hub's configuration of the data set.")
    validation_split: str = HfArg(default="test", help="The hub's split to evaluate on, or a part of it, as test[:1000].")
    dataset_dir: str | None = HfArg(
        default=None, help="Local folder with train.parquet and validation.parquet; by default the hub."
    )
    dtype: str = HfArg(
        default="float32",
        help="Type of the loaded weights. bfloat16 halves the memory of the weights that LoRA freezes; adapters stay "
        "float32.",
        metadata={"choices": ["float32", "bfloat16"]},
    )

    def __post_init__(self) -> None:
        """Refuse what a local folder overrules."""
        if self.dataset_dir is not None:
            refuse_without_effect(self, "dataset_name", "dataset_config", "validation_split", beside="dataset_dir")


def rows_of(args: LanguageModelArguments) -> "DatasetDict":
    """Load `train` and `validation`, with all of their columns."""
    return load_rows(
        args.dataset_name, args.dataset_dir, dataset_config=args.dataset_config, validation_split=args.validation_split
    )


def load_model(args: LanguageModelArguments) -> tuple[Any, Any]:
    """Load the model and its tokenizer."""
    with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
        tokenizer = load_tokenizer(args.model_name_or_path)
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype), tokenizer


def for_trl(args: LanguageModelArguments, lora_args: LoraArguments, *, seed: int) -> dict[str, Any]:
    """Load all that one of TRL's trainers takes except its arguments, by keyword; it makes the adapters itself."""
    set_seed(seed)  # for new weights; noise and draws do not follow it
    rows = rows_of(args)
    model, tokenizer = load_model(args)
    return {
        "model": model,
        "train_dataset": rows["train"],
        "eval_dataset": rows["validation"],
        "processing_class": tokenizer,
        "peft_config": lora_config(lora_args, task_type="CAUSAL_LM"),
    }
