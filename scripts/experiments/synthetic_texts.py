"""What synthetic texts are worth to a classifier, and what a language model repeats of its training texts.

    python -m scripts.experiments.synthetic_texts --data-dir DATA/glue [--encoder MODEL] [--seeds 1 2 3] [--picture FILE]

DATA/glue has sst2, mnli, qqp and qnli as parquet. An encoder learns to write from sentences of the last three, which stand
for public text. `scripts/synthesize.py` adapts it to phrases of SST-2 at ε = 8, and without privacy, and samples from both.
Logistic regressions on the encoder's embeddings are trained on real and on synthetic texts, and tested on SST-2's validation
set. Canaries, which are sentences with a random code, are among the private texts 1, 10 or 100 times. Started again, the
study continues. It looks at private texts as often as it likes: SST-2 is public, and ε is what the same run would cost.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed

from doppler_hf.training_args import DopplerTrainingArguments
from scripts import synthesize
from scripts.experiments.bert_writer import public_model, public_sentences
from scripts.experiments.synthetic_tables import MAJORITY, draw, tables
from scripts.experiments.text_canaries import canaries_of, ranks
from scripts.experiments.text_distances import Encoder, frechet_distance, frontier_area, share_nearer
from scripts.studies.networks import Classifier
from scripts.studies.runs import StudyTrainer, accuracy_of
from scripts.studies.texts import check_encoder
from scripts.training.data_sources import load_glue
from scripts.training.labelled_texts import prompt_text

LABELS: Final = ("negative", "positive")
EPSILON: Final = 8.0
PRIVATE: Final = f"ε = {EPSILON:g}"
NO_PRIVACY: Final = "no privacy"
BATCH: Final = 256  # records, of the private language model and of the classifiers
BATCH_WITHOUT_PRIVACY: Final = 32
RATE_WITHOUT_PRIVACY: Final = 2e-3
MAX_WORDS: Final = 20
MAX_TOKENS: Final = 40
LONGEST: Final = 30  # in the histogram of lengths, to which longer texts are added
EXAMPLES: Final = 6


class Sizes(NamedTuple):
    """How much is trained and sampled.

    Attributes:
        vocabulary: Tokens of the language model.
        public_epochs: How often the language model sees the public sentences.
        rows: Private texts, without canaries.
        epochs: How often the private language model sees them.
        plain_epochs: How often the language model without privacy sees them.
        samples: Synthetic texts.
        steps: Of a classifier.
    """

    vocabulary: int = 6000
    public_epochs: int = 1
    rows: int = 8000
    epochs: int = 2
    plain_epochs: int = 3
    samples: int = 2000
    steps: int = 150


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.synthetic_texts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--data-dir", type=Path, required=True, metavar="DIR", help="sst2/, mnli/, qqp/ and qnli/ as parquet"
    )
    parser.add_argument(
        "--encoder", metavar="MODEL", default="sentence-transformers/all-MiniLM-L6-v2", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=Path("out/synthetic-texts"), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the results into this file")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="default: %(default)s")
    return parser.parse_args(argv)


def write_private_texts(folder: Path, data_dir: Path, *, rows: int, seed: int) -> tuple[Any, list[str]]:
    """Write some of SST-2's texts with canaries, and return SST-2's splits of these rows, and as many other texts."""
    from datasets import Dataset

    splits = load_glue("sst2", str(data_dir / "sst2"))
    short = splits["train"].filter(lambda row: len(row["sentence"].split()) <= MAX_WORDS)
    chosen = short.shuffle(seed=seed)
    train, others = chosen.select(range(rows)), chosen.select(range(rows, 2 * rows))["sentence"]
    texts, labels = list(train["sentence"]), list(train["label"])
    for canary in canaries_of(seed):
        texts += canary.insertions * [canary.text]
        labels += canary.insertions * [1]
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict({"text": texts, "label": labels}).to_parquet(folder / "train.parquet")
    held_out = splits["validation"].rename_column("sentence", "text").select_columns(["text", "label"])
    held_out.to_parquet(folder / "validation.parquet")
    return {"train": train, "validation": splits["validation"]}, list(others)


def logistic_regression(
    vectors: np.ndarray, labels: np.ndarray, *, epsilon: float | None, steps: int, seed: int
) -> nn.Module:
    """Train a linear classifier of embeddings, privately if there is an ε."""
    from datasets import Dataset

    inputs = scaled(vectors)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {
            "inputs": inputs[[row["text"] for row in rows]],
            "labels": torch.tensor([row["label"] for row in rows]),
        }

    set_seed(seed)
    own = {"disable_dp": True, "learning_rate": 3e-3} if epsilon is None else {"target_epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder, quiet():
        args = DopplerTrainingArguments(
            output_dir=folder,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            seed=seed,
            remove_unused_columns=False,
            **own,
        )
        trainer = StudyTrainer(
            model=Classifier(nn.Linear(vectors.shape[1], len(LABELS))),
            args=args,
            train_dataset=Dataset.from_dict({"text": range(len(labels)), "label": labels.tolist()}),
            data_collator=collate,
            compute_metrics=accuracy_of,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model.network.eval()


def scaled(vectors: np.ndarray) -> torch.Tensor:
    """Return vectors of length 1 with coordinates of about 1."""
    return torch.from_numpy(vectors) * vectors.shape[1] ** 0.5


def predicted(network: nn.Module, vectors: np.ndarray) -> np.ndarray:
    """Return the label that a classifier gives to each text."""
    with torch.inference_mode():
        return network(scaled(vectors)).argmax(1).numpy()


def loss_per_token(model_folder: Path, texts: Sequence[str], labels: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of the tokens of some texts, each behind the prompt of its label."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)
    total, tokens = 0.0, 0
    for text, label in zip(texts, labels, strict=True):
        before = tokenizer(prompt_text(LABELS[label]))["input_ids"]
        own = tokenizer(f" {text}{tokenizer.eos_token}")["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([before + own])).logits[0, len(before) - 1 : -1]
        total += float(nn.functional.cross_entropy(logits, torch.tensor(own), reduction="sum"))
        tokens += len(own)
    return total / tokens


def sampled(base: Path, texts: Path, folder: Path, name: str, sizes: Sizes, *, seed: int) -> Any:
    """Adapt the language model to private texts, unless that is done, and return texts that it wrote."""
    from datasets import Dataset

    if name == PRIVATE:
        own = [
            f"--target_epsilon={EPSILON}", f"--num_train_epochs={sizes.epochs}",
            "--per_device_train_batch_size=32", f"--gradient_accumulation_steps={BATCH // 32}",
        ]  # fmt: skip
    else:
        own = [
            "--disable_dp=true", f"--learning_rate={RATE_WITHOUT_PRIVACY}", f"--num_train_epochs={sizes.plain_epochs}",
            f"--per_device_train_batch_size={BATCH_WITHOUT_PRIVACY}", "--train_sampling_strategy=group_by_length",
        ]  # fmt: skip
    with quiet():
        synthesize.main([
            f"--model_name_or_path={base}", f"--dataset_dir={texts}", f"--labels={','.join(LABELS)}",
            f"--max_seq_length={MAX_TOKENS}", "--lora_r=8", "--lora_target_modules=all-linear",
            f"--num_samples={sizes.samples}", "--sampling_batch_size=250", f"--seed={seed}", f"--sampling_seed={seed}",
            f"--output_dir={folder}", "--do_eval=false", "--use_cpu", "--report_to=none", "--save_strategy=no", *own,
        ])  # fmt: skip
    return Dataset.from_parquet(str(folder / "synthetic" / "train.parquet"))


def study(seed: int, base: Path, encode: Encoder, out: Path, data_dir: Path, sizes: Sizes) -> dict[str, Any]:
    """Return what comes out of one seed."""
    private = out / f"texts-{seed}"
    splits, others = write_private_texts(private, data_dir, rows=sizes.rows, seed=seed)
    train, test = splits["train"], splits["validation"]
    real, held_out, tested = (encode(texts) for texts in (train["sentence"], others, test["sentence"]))
    real_labels, test_labels = np.array(train["label"]), np.array(test["label"])
    sentences = public_sentences(data_dir)
    public = [sentences[row] for row in np.random.default_rng(seed).permutation(len(sentences))[: sizes.samples]]

    def trained(vectors: np.ndarray, labels: np.ndarray, epsilon: float | None = None) -> nn.Module:
        return logistic_regression(vectors, labels, epsilon=epsilon, steps=sizes.steps, seed=seed)

    def accuracy(network: nn.Module) -> float:
        return float((predicted(network, tested) == test_labels).mean())

    def distances(vectors: np.ndarray) -> dict[str, float]:
        """Compare texts with as many real ones: both distances depend on how many there are."""
        some, as_many = vectors[: sizes.samples], real[: sizes.samples]
        clusters = max(2, len(as_many) // 10)
        return {
            "frechet": frechet_distance(some, as_many),
            "frontier": frontier_area(some, as_many, clusters=clusters, seed=seed),
        }

    judge = trained(real, real_labels)
    found: dict[str, Any] = {
        "seed": seed,
        "sizes": sizes._asdict(),
        "accuracy": {
            MAJORITY: float(max(test_labels.mean(), 1 - test_labels.mean())),
            f"real, {NO_PRIVACY}": accuracy(judge),
            f"real, {PRIVATE}": accuracy(trained(real, real_labels, EPSILON)),
        },
        "public": {**distances(encode(public)), "loss": loss_per_token(base, test["sentence"], test_labels)},
        "real": {**distances(held_out), "words": lengths_of(train["sentence"]), "positive": float(real_labels.mean())},
    }
    for name in (PRIVATE, NO_PRIVACY):
        folder = out / f"model-{seed}-{name.replace(' ', '-')}"
        rows = sampled(base, private, folder, name, sizes, seed=seed)
        texts, labels = list(rows["text"]), np.array(rows["label"])
        vectors = encode(texts)
        found["accuracy"][f"synthetic, {name}"] = accuracy(trained(vectors, labels))
        found[name] = {
            **distances(vectors),
            **leaks(folder, texts, train["sentence"], others, seed=seed),
            "nearer to training texts": share_nearer(vectors, real, held_out),
            "loss": loss_per_token(folder, test["sentence"], test_labels),
            "words": lengths_of(texts),
            "positive": float(labels.mean()),
            "label fits": float((predicted(judge, vectors) == labels).mean()),
            "examples": {label: examples(texts, labels == value) for value, label in enumerate(LABELS)},
        }
    return found


def leaks(folder: Path, texts: Sequence[str], train: Sequence[str], others: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return what a model and its texts repeat: ranks of canaries, canaries in texts, and copies of real texts."""
    tokenizer, canaries = AutoTokenizer.from_pretrained(folder), canaries_of(seed)
    # The model writes with white space of its own, so that all texts are brought to its form.
    written, of_train, of_others = (
        [tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() for text in each]
        for each in (texts, train, others)
    )
    codes = tokenizer.batch_decode(tokenizer([canary.text for canary in canaries])["input_ids"])
    starts = [canary.start for canary in canaries]
    return {
        "ranks": dict(zip(starts, ranks(folder, canaries, label=LABELS[1], seed=seed), strict=True)),
        "verbatim": {start: sum(code in text for text in written) for start, code in zip(starts, codes, strict=True)},
        "copies of training texts": sum(map({*of_train}.__contains__, written)),
        "copies of held-out texts": sum(map({*of_others}.__contains__, written)),
    }


def examples(texts: Sequence[str], chosen: np.ndarray) -> list[str]:
    """Return the first of the texts that are chosen."""
    return [texts[row] for row in np.flatnonzero(chosen)[:EXAMPLES]]


def lengths_of(texts: Sequence[str]) -> list[int]:
    """Return how many texts have 0, 1, … and at least `LONGEST` words."""
    return np.bincount([min(len(text.split()), LONGEST) for text in texts], minlength=LONGEST + 1).tolist()


@contextlib.contextmanager
def quiet() -> Any:
    """Keep the start and end of each run off the tables."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def main(argv: Sequence[str] | None = None) -> None:
    """Run every seed that is missing, and print the tables."""
    args = parsed(argv)
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes._fields})
    missing = [seed for seed in args.seeds if not (args.out / f"seed-{seed}.json").is_file()]
    if missing:
        check_encoder(args.encoder)
        with quiet():
            base = public_model(
                args.out / "public", args.data_dir, args.encoder, vocabulary=sizes.vocabulary, epochs=sizes.public_epochs
            )
        encode = Encoder(args.encoder)
    for seed in missing:
        print(f"seed {seed}", file=sys.stderr, flush=True)
        found = study(seed, base, encode, args.out, args.data_dir, sizes)
        (args.out / f"seed-{seed}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))
    results = [json.loads((args.out / f"seed-{seed}.json").read_text()) for seed in args.seeds]
    print(tables(results))
    if args.picture is not None:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
