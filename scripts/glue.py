"""Fine-tune a sequence classifier on a GLUE task, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/glue.py recipes/glue/sst2-lp-adambc-eps3.yaml [--any_field value]

Every field of `ScriptArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the recipe or follow it as a
flag; the flag wins. The data comes from the hub, or from a folder of parquet files with `--dataset_dir`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli_args import one_line_errors, parse_args
from doppler_hf.hub import hub_or_folder
from doppler_hf.lora import LoraArguments, add_lora
from doppler_hf.metrics import glue_compute_metrics
from doppler_hf.pooling import MeanPoolingForSequenceClassification
from doppler_hf.tasks import glue_task, load_glue


@dataclass
class ScriptArguments:
    """What to train on what."""

    task_name: str = field(metadata={"help": "One of cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli."})
    model_name_or_path: str = field(metadata={"help": "Hub name or local folder of the pretrained model."})
    dataset_dir: str | None = field(
        default=None,
        metadata={"help": "Local folder with train.parquet and validation.parquet; by default GLUE from the hub."},
    )
    pooling: str = field(
        default="model",
        metadata={
            "help": "model: the architecture's own classification head; mean: a linear head on the mean of the token "
            "vectors, which suits sentence encoders.",
            "choices": ["model", "mean"],
        },
    )
    max_seq_length: int = field(default=256, metadata={"help": "Longer examples are cut to this many tokens."})


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(ScriptArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        task = glue_task(args.task_name)
        splits = load_glue(args.task_name, args.dataset_dir)
        with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            load_model = (
                AutoModelForSequenceClassification.from_pretrained
                if args.pooling == "model"
                else MeanPoolingForSequenceClassification.from_encoder
            )
            model = load_model(
                args.model_name_or_path,
                num_labels=task.num_labels,
                problem_type="regression" if task.is_regression else "single_label_classification",
                # A checkpoint of another task has another head, which gives way to a fresh one.
                ignore_mismatched_sizes=True,
            )
        if tokenizer.pad_token is None:  # GPT-2 and its kind are pretrained on unpadded text
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        label_names = getattr(splits["train"].features["label"], "names", None)
        if label_names is not None:
            model.config.id2label = dict(enumerate(label_names))
            model.config.label2id = {name: label for label, name in enumerate(label_names)}
        model = add_lora(model, lora_args, task_type="SEQ_CLS")

    # No padding here: the trainer sorts the examples of a step by length, and the collator pads each micro-batch.
    max_length = min(args.max_seq_length, tokenizer.model_max_length)
    with training_args.main_process_first(desc="tokenize"):
        tokenized = splits.map(
            lambda rows: tokenizer(*(rows[column] for column in task.text_columns), truncation=True, max_length=max_length),
            batched=True,
            remove_columns=[name for name in splits["train"].column_names if name != "label"],
        )

    validation_splits = [name for name in task.validation_splits if name in tokenized]
    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized[validation_splits[0]],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=glue_compute_metrics(args.task_name),
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)

    for name in validation_splits:
        prefix = name.replace("validation", "eval")
        metrics = trainer.evaluate(tokenized[name], metric_key_prefix=prefix)
        trainer.log_metrics(prefix, metrics)
        trainer.save_metrics(prefix, metrics)


if __name__ == "__main__":
    main()
