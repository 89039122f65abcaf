"""Fine-tune a sequence classifier on a GLUE task, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/glue.py recipes/glue/sst2-lp-adambc-eps3.yaml [--any_field value]

Every field of `GlueArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the recipe or follow it as a
flag; the flag wins. The data comes from the hub, or from a folder of parquet files with `--dataset_dir`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedModel, set_seed
from transformers.hf_argparser import HfArg

from doppler_hf.errors import Refusal

# Python puts the folder of a script on the path, and not the one above it, in which the package and `scripts` are.
sys.path.insert(0, str(Path(__file__).parents[1]))

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.mean_pooling import MeanPoolingForSequenceClassification, refuse_new_layers
from scripts.training.arguments import one_line_errors, parse_args
from scripts.training.data_sources import glue_task, load_glue
from scripts.training.frozen_layers import freeze_lowest
from scripts.training.hub import hub_or_folder
from scripts.training.lora import LoraArguments, add_lora
from scripts.training.metrics import glue_compute_metrics
from scripts.training.models import load_tokenizer, name_classes


@dataclass
class GlueArguments:
    """The model and the GLUE task to train it on."""

    task_name: str = HfArg(help="One of cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli.")
    model_name_or_path: str = HfArg(help="Hub name or local folder of the pretrained model.")
    dataset_dir: str | None = HfArg(
        default=None, help="Local folder with train.parquet and validation.parquet; by default GLUE from the hub."
    )
    pooling: str = HfArg(
        default="model",
        help="model: the architecture's own classification head. mean: a linear head on the mean of the token vectors, for "
        "sentence encoders.",
        metadata={"choices": ["model", "mean"]},
    )
    dropout: float | None = HfArg(
        default=None, help="Probability of every dropout in the model's config. Default: the config's values."
    )
    max_seq_length: int = HfArg(default=256, help="Longer examples are cut to this many tokens.")
    num_hidden_layers: int | None = HfArg(
        default=None, help="Use only so many of the model's layers, the lowest. Default: all of them."
    )
    frozen_layers: int = HfArg(
        default=0,
        help="How many of a BERT-like model's layers, the lowest, get no adapters. Their outputs are computed once and kept "
        "in the cache of datasets (HF_DATASETS_CACHE). Needs lora_r.",
    )


def config_entries(args: GlueArguments) -> dict[str, Any]:
    """Return the entries of the model's config that task and dropout set."""
    task = glue_task(args.task_name)
    problem_type = "regression" if task.is_regression else "single_label_classification"
    of_task = {"num_labels": task.num_labels, "problem_type": problem_type}
    if args.num_hidden_layers is not None:
        of_task["num_hidden_layers"] = args.num_hidden_layers
    if args.dropout is None:
        return of_task
    entries = AutoConfig.from_pretrained(args.model_name_or_path).to_dict().items()
    found = {name: args.dropout for name, value in entries if "dropout" in name and isinstance(value, float)}
    if not found:
        wanted = "--dropout must be for a model whose config names some"
        raise Refusal("no-effect", f"{wanted}, got {args.dropout} for {args.model_name_or_path}. Leave it out.")
    return of_task | found


def load_model(args: GlueArguments) -> PreTrainedModel:
    """Load the pretrained model, with a new head."""
    # A checkpoint of another task has another head, which is replaced by a new one.
    entries = {**config_entries(args), "ignore_mismatched_sizes": True}
    if args.pooling == "mean":
        return MeanPoolingForSequenceClassification.from_encoder(args.model_name_or_path, **entries)
    model, found = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path, output_loading_info=True, **entries
    )
    refuse_new_layers(found["missing_keys"], args.model_name_or_path, prefix=f"{model.base_model_prefix}.")
    assert isinstance(model, PreTrainedModel)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save and evaluate."""
    with one_line_errors():
        # Arguments
        args, lora_args, training_args = parse_args(GlueArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        if args.frozen_layers and not lora_args.lora_r:
            raise Refusal(
                "adapters-only",
                f"frozen_layers={args.frozen_layers} needs lora_r: only adapters are saved apart. Set lora_r.",
            )
        set_seed(training_args.seed)  # for new weights, such as a head's; noise and draws do not follow it

        # Data and model
        task = glue_task(args.task_name)
        splits = load_glue(args.task_name, args.dataset_dir)
        from datasets import ClassLabel, config

        with hub_or_folder(args.model_name_or_path, "--model_name_or_path"):
            tokenizer = load_tokenizer(args.model_name_or_path)
            model = load_model(args)
        model.config.pad_token_id = tokenizer.pad_token_id
        label = splits["train"].features["label"]
        if isinstance(label, ClassLabel):
            name_classes(model, label.names)

        # Tokens. The first process makes them, and the others read its cache. There is no padding yet: the trainer sorts the
        # examples of a step by length, and the collator pads each micro-batch.
        kept = ("label", training_args.privacy_unit_column)
        max_length = min(args.max_seq_length, tokenizer.model_max_length)
        with training_args.main_process_first(desc="tokenize"):
            tokenized = splits.map(
                lambda rows: tokenizer(*(rows[name] for name in task.text_columns), truncation=True, max_length=max_length),
                batched=True,
                remove_columns=[name for name in splits["train"].column_names if name not in kept],
            )
            if args.frozen_layers:
                folder = Path(config.HF_DATASETS_CACHE) / "frozen_layers"
                tokenized = freeze_lowest(
                    model, args.frozen_layers, tokenized, tokenizer, bf16=training_args.bf16, folder=folder
                )
        # MNLI has two, the matched and the mismatched one.
        eval_datasets = {
            name.replace("validation", "eval"): tokenized[name] for name in task.validation_splits if name in tokenized
        }
        model = add_lora(model, lora_args, task_type="SEQ_CLS")

    # Trainer
    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=next(iter(eval_datasets.values())),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=glue_compute_metrics(args.task_name),
    )

    # Training, and what it leaves in `output_dir`
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
    for name, rows in eval_datasets.items() if training_args.do_eval else ():
        metrics = trainer.evaluate(rows, metric_key_prefix=name)
        trainer.log_metrics(name, metrics)
        trainer.save_metrics(name, metrics)


if __name__ == "__main__":
    main()
