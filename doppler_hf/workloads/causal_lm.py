"""A causal language model on texts. One row of the data is one example, and by default the unit of privacy."""

from dataclasses import dataclass
from typing import Any

from transformers import DataCollatorForSeq2Seq, set_seed
from transformers.hf_argparser import HfArg

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.workloads.data_sources import selected
from doppler_hf.workloads.language_model import LanguageModelArguments, load_model, rows_of
from doppler_hf.workloads.lora import LoraArguments, add_lora
from doppler_hf.workloads.workload import Workload


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
