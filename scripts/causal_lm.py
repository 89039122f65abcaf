"""Fine-tune a causal language model on texts, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/causal_lm.py recipes/causal_lm/yelp-gpt2-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `ScriptArguments`, `LoraArguments` and
`DopplerTrainingArguments` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or
from a folder of parquet files with `--dataset_dir`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli_args import one_line_errors, parse_args
from doppler_hf.hub import hub_or_folder
from doppler_hf.lora import LoraArguments, add_lora
from doppler_hf.tasks import load_texts


@dataclass
class ScriptArguments:
    """What to train on what."""

    model_name_or_path: str = field(metadata={"help": "Hub name or local folder of the pretrained model."})
    dataset_name: str = field(default="Yelp/yelp_review_full", metadata={"help": "Name of the data set on the hub."})
    dataset_config: str | None = field(default=None, metadata={"help": "The hub's configuration of the data set."})
    validation_split: str = field(
        default="test", metadata={"help": "The hub's split to evaluate on, or a part of it, as test[:1000]."}
    )
    dataset_dir: str | None = field(
        default=None, metadata={"help": "Local folder with train.parquet and validation.parquet; by default the hub."}
    )
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    max_seq_length: int = field(default=256, metadata={"help": "Longer examples are cut to this many tokens."})
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Type of the loaded weights: bfloat16 halves the memory of those that LoRA freezes; the adapters "
            "stay float32.",
            "choices": ["float32", "bfloat16"],
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(ScriptArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        splits = load_texts(
            args.dataset_name,
            args.dataset_dir,
            dataset_config=args.dataset_config,
            validation_split=args.validation_split,
            text_column=args.text_column,
        )
        with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
        if tokenizer.pad_token is None:  # GPT-2 and its kind are pretrained on unpadded text
            tokenizer.pad_token = tokenizer.eos_token
        # On the left, padding would shift absolute positions by an amount that depends on the other examples.
        tokenizer.padding_side = "right"
        model = add_lora(model, lora_args, task_type="CAUSAL_LM")

    max_length = min(args.max_seq_length, tokenizer.model_max_length)

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [text + tokenizer.eos_token for text in rows[args.text_column]]  # so that the model learns to stop
        tokens = tokenizer(texts, truncation=True, max_length=max_length)
        return {**tokens, "labels": tokens["input_ids"]}

    # Rows are not joined and cut into blocks of equal length, as is usual: two rows in one block would be one example.
    with training_args.main_process_first(desc="tokenize"):
        tokenized = splits.map(tokenize, batched=True, remove_columns=[args.text_column])

    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        # Pads labels with -100. DataCollatorForLanguageModeling would find padding by its token, and where that is the
        # end-of-text token take the label from the true end as well.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)

    metrics = trainer.evaluate()
    # The model's own loss: the mean over the tokens of a batch, then over the batches, weighted by their rows.
    metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
