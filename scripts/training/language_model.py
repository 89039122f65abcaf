"""What the scripts for language models have in common: their arguments, the rows, and the model.

One row of the data is one example, and by default the unit of privacy.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM
from transformers.hf_argparser import HfArg

from scripts.training.arguments import refuse_unused_fields
from scripts.training.data_sources import load_splits
from scripts.training.hub import hub_or_folder
from scripts.training.models import load_tokenizer

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
            refuse_unused_fields(self, "dataset_name", "dataset_config", "validation_split", beside="dataset_dir")


def load_rows(args: LanguageModelArguments) -> "DatasetDict":
    """Load `train` and `validation`, with all of their columns."""
    names = {"train": "train", "validation": args.validation_split}
    return load_splits(args.dataset_name, args.dataset_config, splits=names, dataset_dir=args.dataset_dir)


def load_model(args: LanguageModelArguments) -> tuple[Any, Any]:
    """Load the model and its tokenizer."""
    with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
        tokenizer = load_tokenizer(args.model_name_or_path)
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype), tokenizer
