"""Fine-tune a causal language model on texts, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/causal_lm.py recipes/causal_lm/yelp-gpt2-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `CausalLMArguments`, `LoraArguments` and
`DopplerTrainingArguments` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or
from a folder of parquet files with `--dataset_dir`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import DataCollatorForSeq2Seq, set_seed
from transformers.hf_argparser import HfArg

# Python puts the folder of a script on the path, and not the one above it, in which the package and `scripts` are.
sys.path.insert(0, str(Path(__file__).parents[1]))

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from scripts.training.arguments import one_line_errors, parse_args
from scripts.training.data_sources import selected
from scripts.training.language_model import LanguageModelArguments, load_model, load_rows
from scripts.training.lora import LoraArguments, add_lora


@dataclass
class CausalLMArguments(LanguageModelArguments):
    """The language model and the texts to train it on."""

    dataset_name: str = HfArg(default="Yelp/yelp_review_full", help="Name of the data set on the hub.")
    text_column: str = HfArg(default="text", help="The column that holds the text.")
    max_seq_length: int = HfArg(default=256, help="Longer examples are cut to this many tokens.")


def perplexity(loss: float) -> float:
    """Return e to the loss; infinity after a training that diverged."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save and evaluate."""
    with one_line_errors():
        # Arguments
        args, lora_args, training_args = parse_args(CausalLMArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        set_seed(training_args.seed)  # for new weights, such as a head's; noise and draws do not follow it

        # Data and model
        splits = selected(load_rows(args), (args.text_column,), training_args.privacy_unit_column)
        model, tokenizer = load_model(args)
        model = add_lora(model, lora_args, task_type="CAUSAL_LM")

        # Tokens, each of which is a label. Rows are not packed into blocks of equal length, as is usual: two rows in one
        # block would be one example.
        max_length = min(args.max_seq_length, tokenizer.model_max_length)

        def tokenize(rows: dict[str, list[Any]]) -> dict[str, Any]:
            texts = [text + tokenizer.eos_token for text in rows[args.text_column]]  # so that the model learns to stop
            tokens = tokenizer(texts, truncation=True, max_length=max_length)
            return {**tokens, "labels": tokens["input_ids"]}

        with training_args.main_process_first(desc="tokenize"):
            tokenized = splits.map(tokenize, batched=True, remove_columns=[args.text_column])

    # Trainer
    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        # Pads labels with -100. DataCollatorForLanguageModeling finds padding by its token: where that is the end-of-text
        # token, it would mask the label of the true end as well.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )

    # Training, and what it leaves in `output_dir`
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        # Of the model's own loss: the mean over the tokens of a batch, then over the batches, weighted by their rows.
        metrics["eval_perplexity"] = perplexity(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
