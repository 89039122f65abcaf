"""The folder of synthetic texts: a table that `load_dataset` reads, a card, and the ledger of the model."""

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.file import write_whole
from doppler_hf.privacy.ledger.terms import claim_in_words, total_of, unit_in_words, why_not_private
from scripts.training.labelled_texts import prompt_text
from scripts.training.samples import Samples, Sampling


def write_dataset(
    folder: Path,
    samples: Samples,
    names: Sequence[str],
    *,
    model: Path,
    base: str,
    sampling: Sampling,
    histogram_epsilon: float | None,
) -> None:
    """Write `train.parquet`, the ledger of the model, and the card, which comes last.

    Args:
        folder: Where to write.
        samples: The texts.
        names: All labels.
        model: The folder of the trained model.
        base: The name of the model that was trained further.
        sampling: How the texts were sampled.
        histogram_epsilon: ε of the histogram that was drawn for this model; None if there is none.
    """
    from datasets import ClassLabel, Dataset, Features, Value

    rows = list(samples.texts)
    random.Random(sampling.seed).shuffle(rows)  # They were sampled label by label.
    columns = {"text": [text for _, text in rows], "label": [label for label, _ in rows]}
    table = Dataset.from_dict(columns, Features({"text": Value("string"), "label": ClassLabel(names=list(names))}))
    temporary = folder / "train.parquet.tmp"
    table.to_parquet(temporary)
    os.replace(temporary, folder / "train.parquet")
    ledger = model / LEDGER_NAME
    if ledger.is_file():
        write_whole(folder / LEDGER_NAME, ledger.read_text("utf-8"))
    text = card(samples, names, ledger=ledger, base=base, sampling=sampling, histogram_epsilon=histogram_epsilon)
    write_whole(folder / "README.md", text)


def card(
    samples: Samples,
    names: Sequence[str],
    *,
    ledger: Path,
    base: str,
    sampling: Sampling,
    histogram_epsilon: float | None,
) -> str:
    """Return the text of the card; for the arguments see `write_dataset`."""
    counts = Counter(label for label, _ in samples.texts)
    left_out = ", ".join(f"{number:,} {reason}" for reason, number in sorted(samples.left_out.items())) or "none"
    lines = [
        "---",
        "tags: [synthetic, differential-privacy]",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path: train.parquet",
        "---",
        "",
        "# Synthetic texts",
        "",
        f"{len(samples.texts):,} texts, which a language model wrote. The model `{base}` was fine-tuned on private texts "
        "with labels, and sampled with the prompt of each label.",
        "",
        "## Privacy",
        "",
        *_privacy(PrivacyLedger.load(ledger) if ledger.is_file() else None, histogram_epsilon=histogram_epsilon),
        "",
        "## How the texts were made",
        "",
        "| label | texts |",
        "|---|---|",
        *(f"| {name} | {counts[name]:,} |" for name in names),
        "",
        "Whoever made this folder chose these numbers. They are not counted in the private data."
        if histogram_epsilon is None
        else "The labels in the private data were counted with noise. These numbers follow the noisy counts, or were chosen "
        "by somebody who may know them.",
        "",
        f"- Prompt: `{prompt_text('LABEL')!r}`",
        f"- Sampling: temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, at most {sampling.max_length:,} "
        f"tokens with the prompt, seed {sampling.seed}",
        f"- Texts left out: {left_out}. Texts are too short with fewer than {sampling.min_words} words. They were compared "
        "with one another, and not with private texts.",
        "",
    ]
    return "\n".join(lines)


def _privacy(ledger: PrivacyLedger | None, *, histogram_epsilon: float | None) -> list[str]:
    if ledger is None or why_not_private(ledger) is not None:
        reason = "it was trained with disable_dp=True" if ledger is None else why_not_private(ledger)
        return [f"**NOT PRIVATE:** the model has no ε, because {reason}. The texts may repeat private texts word for word."]
    covered, own = unit_in_words(ledger), total_of(ledger, epsilon=ledger.epsilon())
    if histogram_epsilon is None:
        texts = (
            "The same ε covers these texts, however many they are, since they were sampled without looking at the private "
            "data."
        )
    else:
        # Privacy: basic composition. The histogram has δ = 0.
        texts = (
            f"**The texts: ε = {own.epsilon + histogram_epsilon:.4g}, δ = {own.delta:.3g} for {covered}.** This is "
            "the sum of the ε of the model and of that of a noisy histogram of the labels "
            f"(ε = {histogram_epsilon:g}, δ = 0), on which the numbers of texts of each label may depend. It does not grow "
            "with the number of texts."
        )
    return [
        f"The model: {claim_in_words(ledger)}",
        "",
        f"{texts} `doppler-hf verify` on this folder computes the ε of the model again from `{LEDGER_NAME}`.",
        "",
        f"ε covers {covered}. It does not cover",
        "",
        "- what many records share, such as a name that occurs in a hundred of them; their ε add up;",
        "- the names of the labels, which were given as public;",
        "- the base model: what it knows from its pretraining can appear in the texts;",
        "- whether the texts are true or harmless.",
    ]
