"""What synthetic texts are worth to a classifier, and what a language model repeats of its training texts.

    python -m scripts.experiments.synthetic_texts --data-dir DATA/glue --out out/synthetic-texts [--seeds 1 2 3]

DATA/glue has sst2, mnli, qqp and qnli as parquet. A small GPT-2 is trained on sentences of the last three, which stand for
public text. `scripts/synthesize.py` adapts it to phrases of SST-2 at ε = 8, and without privacy, and samples from both.
Classifiers of words are trained on real and on synthetic texts, and tested on SST-2's validation set. Canaries, which are
sentences with a random code, are among the private texts 1, 10 or 100 times. Started again, it goes on.
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
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from doppler_hf.training_args import DopplerTrainingArguments
from scripts import synthesize
from scripts.experiments.accuracy import error_of
from scripts.studies.networks import HASHED_WORDS, Classifier, hashed_words
from scripts.studies.runs import StudyTrainer, accuracy_of
from scripts.training.data_sources import load_glue
from scripts.training.labelled_texts import prompt_text

LABELS: Final = ("negative", "positive")
EPSILON: Final = 8.0
NO_PRIVACY: Final = "no privacy"
END: Final = "<|endoftext|>"
PUBLIC: Final = (("mnli", "premise"), ("mnli", "hypothesis"), ("qqp", "question1"), ("qnli", "question"))
INSERTIONS: Final = (1, 10, 100)
CANARIES: Final = 4  # of each number of insertions
ALTERNATIVES: Final = 999
DIGITS: Final = 6
BATCH: Final = 256  # records, of the language model and of the classifiers


class Sizes(NamedTuple):
    """How much is trained and sampled.

    Attributes:
        vocabulary: Tokens of the language model.
        rows: Private texts, without canaries.
        epochs: How often the language model sees them.
        samples: Synthetic texts.
        steps: Of a classifier.
    """

    vocabulary: int = 2000
    rows: int = 10_000
    epochs: int = 3
    samples: int = 4000
    steps: int = 150


class Canary(NamedTuple):
    """A sentence with a code, and how often it is in the private texts."""

    start: str
    code: str
    insertions: int

    @property
    def text(self) -> str:
        """The whole sentence."""
        return f"{self.start} {self.code}"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.synthetic_texts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--data-dir", type=Path, required=True, metavar="DIR", help="sst2/, mnli/, qqp/ and qnli/ as parquet"
    )
    parser.add_argument("--out", type=Path, default=Path("out/synthetic-texts"), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    return parser.parse_args(argv)


def public_model(folder: Path, data_dir: Path, *, vocabulary: int) -> Path:
    """Train a small GPT-2 on public sentences for an epoch, unless it is in `folder`; return the folder."""
    if (folder / "model.safetensors").is_file():
        return folder
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [
        text for task, column in PUBLIC for text in Dataset.from_parquet(str(data_dir / task / "train.parquet"))[column]
    ]
    # SST-2 is in lower case.
    texts = [text.lower() for text in dict.fromkeys(texts)]
    of_bytes = Tokenizer(models.BPE())
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    of_bytes.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token=END, bos_token=END, pad_token=END, model_max_length=64
    )
    set_seed(0)
    end = tokenizer.eos_token_id
    sizes = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **sizes))
    ids = [tokenizer(f" {text}{END}", truncation=True, max_length=48)["input_ids"] for text in texts]
    with quiet():
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                **silent(folder / "trainer"),
                per_device_train_batch_size=32,
                learning_rate=3e-3,
                num_train_epochs=1,
                train_sampling_strategy="group_by_length",
            ),
            train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids, "length": [len(each) for each in ids]}),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
        trainer.train()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def canaries_of(seed: int) -> list[Canary]:
    """Return canaries with codes that follow the seed."""
    generator = np.random.default_rng(seed)
    names = iter(("anna", "bert", "carla", "david", "emma", "frank", "grace", "henry", "irene", "jack", "karen", "louis"))
    return [
        Canary(f"the secret code of {next(names)} is", code_of(generator), insertions)
        for insertions in INSERTIONS
        for _ in range(CANARIES)
    ]


def code_of(generator: np.random.Generator) -> str:
    """Return random digits."""
    return " ".join(map(str, generator.integers(0, 10, DIGITS)))


def write_private_texts(folder: Path, data_dir: Path, *, rows: int, seed: int) -> tuple[Any, list[str]]:
    """Write some of SST-2's texts with canaries, and return SST-2's splits of these rows, and as many other texts."""
    from datasets import Dataset

    splits = load_glue("sst2", str(data_dir / "sst2"))
    chosen = splits["train"].shuffle(seed=seed)
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


def accuracy(
    texts: Sequence[str], labels: Sequence[int], test: Any, *, epsilon: float | None, steps: int, seed: int
) -> float:
    """Train a classifier of hashed words, privately if there is an ε, and return its accuracy on the rows `test`."""
    from datasets import Dataset
    from sklearn.feature_extraction.text import HashingVectorizer

    count = HashingVectorizer(n_features=HASHED_WORDS).transform

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        inputs = torch.from_numpy(count([row["text"] for row in rows]).toarray()).float()
        return {"inputs": inputs, "labels": torch.tensor([row["label"] for row in rows])}

    set_seed(seed)
    own = {"disable_dp": True, "learning_rate": 3e-3} if epsilon is None else {"target_epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder, quiet():
        args = DopplerTrainingArguments(
            **silent(folder),
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            seed=seed,
            remove_unused_columns=False,
            **own,
        )
        trainer = StudyTrainer(
            model=Classifier(hashed_words()),
            args=args,
            train_dataset=Dataset.from_dict({"text": [*texts], "label": [*labels]}),
            data_collator=collate,
            compute_metrics=accuracy_of,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        rows = Dataset.from_dict({"text": test["sentence"], "label": test["label"]})
        return float(trainer.evaluate(rows)["eval_accuracy"])


def ranks(model_folder: Path, canaries: Sequence[Canary], *, seed: int) -> list[int]:
    """Return the place of each canary among alternatives with other codes, the likeliest first; 1 is the first place."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)
    generator = np.random.default_rng([seed, 1])
    return [1 + sum(value < losses[0] for value in losses[1:]) for losses in (
        losses_of(model, tokenizer, canary.start, [canary.code, *(code_of(generator) for _ in range(ALTERNATIVES))])
        for canary in canaries
    )]  # fmt: skip


def losses_of(model: Any, tokenizer: Any, start: str, codes: Sequence[str]) -> list[float]:
    """Return the negative log-likelihood of each code behind the prompt and the start of its sentence."""
    before = tokenizer(f"{prompt_text(LABELS[1])} {start}")["input_ids"]
    tokens = [tokenizer(f" {code}", add_special_tokens=False)["input_ids"] for code in codes]
    losses = [0.0] * len(codes)
    # Codes with equally many tokens go through the model together, without padding.
    for length in {len(each) for each in tokens}:
        rows = [row for row, each in enumerate(tokens) if len(each) == length]
        ids = torch.tensor([before + tokens[row] for row in rows])
        with torch.inference_mode():
            found = model(ids).logits[:, len(before) - 1 : -1].log_softmax(-1)
        of_code = -found.gather(-1, ids[:, len(before) :, None]).sum((1, 2))
        for row, loss in zip(rows, of_code.tolist(), strict=True):
            losses[row] = loss
    return losses


def study(seed: int, base: Path, out: Path, data_dir: Path, sizes: Sizes) -> dict[str, Any]:
    """Return what comes out of one seed."""
    private = out / f"texts-{seed}"
    splits, others = write_private_texts(private, data_dir, rows=sizes.rows, seed=seed)
    train, test, canaries = splits["train"], splits["validation"], canaries_of(seed)

    def classified(texts: Sequence[str], labels: Sequence[int], epsilon: float | None = None) -> float:
        return accuracy(texts, labels, test, epsilon=epsilon, steps=sizes.steps, seed=seed)

    found: dict[str, Any] = {
        "seed": seed,
        "accuracy": {
            "real, no privacy": classified(train["sentence"], train["label"]),
            f"real, ε = {EPSILON:g}": classified(train["sentence"], train["label"], EPSILON),
        },
        "words": {"real": words_of(train["sentence"])},
    }
    own = {str(EPSILON): [f"--target_epsilon={EPSILON}"], NO_PRIVACY: ["--disable_dp=true", "--learning_rate=1e-2"]}
    for name, flags in own.items():
        folder = out / f"model-{seed}-{name.replace(' ', '-')}"
        with quiet():
            synthesize.main([
                f"--model_name_or_path={base}", f"--dataset_dir={private}", f"--labels={','.join(LABELS)}",
                "--max_seq_length=48", "--lora_r=8", "--lora_target_modules=c_attn,c_proj,c_fc",
                "--per_device_train_batch_size=64", f"--gradient_accumulation_steps={BATCH // 64}",
                f"--num_train_epochs={sizes.epochs}", f"--num_samples={sizes.samples}", "--sampling_batch_size=250",
                f"--seed={seed}", f"--sampling_seed={seed}", f"--output_dir={folder}", "--use_cpu", "--report_to=none",
                "--save_strategy=no", *flags,
            ])  # fmt: skip
        from datasets import Dataset

        samples = Dataset.from_parquet(str(folder / "synthetic" / "train.parquet"))
        title = f"ε = {EPSILON:g}" if name != NO_PRIVACY else name
        found["accuracy"][f"synthetic, {title}"] = classified(samples["text"], samples["label"])
        found["words"][f"synthetic, {title}"] = words_of(samples["text"])
        said, own_texts = [text.strip() for text in samples["text"]], {text.strip() for text in train["sentence"]}
        found[title] = {
            "loss": json.loads((folder / "all_results.json").read_text())["eval_loss"],
            "ranks": dict(zip((canary.start for canary in canaries), ranks(folder, canaries, seed=seed), strict=True)),
            "verbatim": {canary.start: sum(canary.text in text for text in said) for canary in canaries},
            "copies of training texts": sum(text in own_texts for text in said),
            "copies of other texts": sum(text in {other.strip() for other in others} for text in said),
        }
    return found


def words_of(texts: Sequence[str]) -> list[float]:
    """Return the mean number of words, and its standard deviation over texts."""
    lengths = [len(text.split()) for text in texts]
    return [float(np.mean(lengths)), float(np.std(lengths))]


def tables(found: Sequence[dict[str, Any]]) -> str:
    """Return the tables of all seeds."""
    lines = ["| classifier trained on | accuracy, % | words in a text |", "|---|---|---|"]
    for name in found[0]["accuracy"]:
        values = 100 * np.array([each["accuracy"][name] for each in found])
        error = f" ± {error_of(values):.1f}" if len(values) > 1 else ""
        mean, spread = np.mean([each["words"].get(name, each["words"]["real"]) for each in found], axis=0)
        lines.append(f"| {name} | {values.mean():.1f}{error} | {mean:.1f} ± {spread:.1f} |")
    lines += ["", "| model | canary was inserted | ranks among 1,000 | times in the samples |", "|---|---|---|---|"]
    for title in (f"ε = {EPSILON:g}", NO_PRIVACY):
        for insertions in INSERTIONS:
            own = [
                (each, canary) for each in found for canary in canaries_of(each["seed"]) if canary.insertions == insertions
            ]
            places = sorted(each[title]["ranks"][canary.start] for each, canary in own)
            times = sum(each[title]["verbatim"][canary.start] for each, canary in own)
            lines.append(f"| {title} | {insertions} × | {', '.join(map(str, places))} | {times} |")
    lines += ["", "| model | loss on other texts | samples that are a training text | that are another text of the source |"]
    lines += ["|---|---|---|---|"]
    for title in (f"ε = {EPSILON:g}", NO_PRIVACY):
        loss = np.mean([each[title]["loss"] for each in found])
        copies = [np.mean([each[title][f"copies of {kind} texts"] for each in found]) for kind in ("training", "other")]
        lines.append(f"| {title} | {loss:.2f} | {copies[0]:.0f} | {copies[1]:.0f} |")
    return "\n".join(lines)


def silent(folder: str | Path) -> dict[str, Any]:
    """Return arguments of a training run that leaves nothing behind."""
    return {
        "output_dir": str(folder),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


@contextlib.contextmanager
def quiet() -> Any:
    """Keep the start and end of each run off the tables."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def main(argv: Sequence[str] | None = None) -> None:
    """Run every seed that is missing, and print the tables."""
    args = parsed(argv)
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes._fields})
    base = public_model(args.out / "public", args.data_dir, vocabulary=sizes.vocabulary)
    found = []
    for seed in args.seeds:
        path = args.out / f"seed-{seed}.json"
        if not path.is_file():
            print(f"seed {seed}", file=sys.stderr)
            path.write_text(json.dumps(study(seed, base, args.out, args.data_dir, sizes), indent=1))
        found.append(json.loads(path.read_text()))
    print(tables(found))


if __name__ == "__main__":
    main()
