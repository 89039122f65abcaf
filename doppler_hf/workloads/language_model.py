"""A causal language model on texts, and what its script and those of TRL have in common.

One row of the data is one example, and by default the unit of privacy.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, set_seed
from transformers.hf_argparser import HfArg

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.workloads.arguments import refuse_without_effect
from doppler_hf.workloads.data_sources import load_splits, selected
from doppler_hf.workloads.hub import hub_or_folder
from doppler_hf.workloads.lora import LoraArguments, add_lora, lora_config
from doppler_hf.workloads.workload import Workload, load_tokenizer

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
    names = {"train": "train", "validation": args.validation_split}
    return load_splits(args.dataset_name, args.dataset_config, splits=names, dataset_dir=args.dataset_dir)


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


@dataclass
class CausalLMArguments(LanguageModelArguments):
    """The language model and the texts to train it on."""

    dataset_name: str = HfArg(default="Yelp/yelp_review_full", help="Name of the data set on the hub.")
    text_column: str = HfArg(default="text", help="The column that holds the text.")
    max_seq_length: int = HfArg(default=256, help="Longer examples are cut to this many tokens.")


def build(args: CausalLMArguments, lora_args: LoraArguments, training_args: DopplerTrainingArguments) -> Workload:
    """Load the data and the model, and tokenize, as `glue.build` does; every token is a label."""
    set_seed(training_args.seed)  # for new weights, such as a head's; noise and draws do not follow it
    splits = selected(rows_of(args), (args.text_column,), training_args.privacy_unit_column)
    model, tokenizer = load_model(args)
    model = add_lora(model, lora_args, task_type="CAUSAL_LM")

    max_length = min(args.max_seq_length, tokenizer.model_max_length)

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [text + tokenizer.eos_token for text in rows[args.text_column]]  # so that the model learns to stop
        tokens = tokenizer(texts, truncation=True, max_length=max_length)
        return {**tokens, "labels": tokens["input_ids"]}

    # Rows are not packed into blocks of equal length, as is usual: two rows in one block would be one example.
    with training_args.main_process_first(desc="tokenize"):
        tokenized = splits.map(tokenize, batched=True, remove_columns=[args.text_column])
    return Workload(
        model=model,
        train_dataset=tokenized["train"],
        eval_datasets={"eval": tokenized["validation"]},
        processing_class=tokenizer,
        # Pads labels with -100. DataCollatorForLanguageModeling finds padding by its token: where that is the end-of-text
        # token, it would mask the label of the true end as well.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
