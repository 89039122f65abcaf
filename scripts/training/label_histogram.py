"""A histogram of the labels of private records, with noise whose ε is stated.

Each record counts once, and each user once if ε covers users. So one record, or user, changes one count by 1. Noise k has a
probability proportional to e^(−ε|k|), which makes the histogram ε-differentially private on its own, with δ = 0 (Ghosh,
Roughgarden and Sundararajan 2009, https://arxiv.org/abs/0811.2841).

Training uses the same records. By basic composition, the ε of both add up (Dwork and Roth 2014, Theorem B.1), in whichever
order they are made and even if results of one decide about the other.
"""

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from doppler_hf.errors import Failure, Refusal
from doppler_hf.privacy.ledger.file import write_whole
from scripts.training.finished_model import note_histogram, noted_histogram

# All synthetic folders of a model share one histogram, so it is in the model's folder. Privacy: the model's card and ledger
# do not count its ε, so the name begins with "_": Trainer.push_to_hub leaves such files out.
HISTOGRAM: Final = "_label_histogram.json"
SMALLEST_EPSILON: Final = 1e-4


def check_epsilon(epsilon: float) -> None:
    """Refuse an ε that adds no noise, or noise that hides any data set."""
    if not SMALLEST_EPSILON <= epsilon < math.inf:
        raise Refusal(
            "bad-histogram-epsilon",
            f"Expected a number of at least {SMALLEST_EPSILON:g} for --histogram_epsilon; got {epsilon}. With 0.1, "
            "the noise of each count is about 14 records.",
        )


def noisy_histogram(
    folder: Path, names: Sequence[str], *, epsilon: float, read: Callable[[], tuple[Iterable[str], Iterable[Any] | None]]
) -> dict[str, int]:
    """Return noisy counts of the labels, from the file in `folder` or drawn now and written there.

    Args:
        folder: The folder of the model.
        names: All labels.
        epsilon: ε of the histogram.
        read: Returns the labels of the private records, and the user of each, or None if ε covers records.
    """
    path = folder / HISTOGRAM
    if not path.is_file():
        # Privacy: noise is drawn once. A mean over several histograms would have less noise, and each of them costs ε. The
        # file may stay behind when the model moves, so the model's record says that there is one.
        if (noted := noted_histogram(folder)) is not None:
            raise Refusal(
                "histogram-missing",
                f"A histogram with ε = {noted:g} was drawn for the model in {folder}, and its file {HISTOGRAM} is no longer "
                "there. Another one would cost further ε. Copy the file back, or leave --histogram_epsilon out and choose "
                "the numbers with --proportions.",
            )
        labels, users = read()
        exact = exact_counts(labels, users, names)
        # Sensitivity: a record (or a user) that joins or leaves changes one count by 1, and no other.
        noisy = {name: exact[name] + two_sided_geometric(epsilon) for name in names}
        note_histogram(folder, epsilon)
        write_whole(path, json.dumps({"epsilon": epsilon, "counts": noisy}, indent=1))
    kept = json.loads(path.read_text("utf-8"))
    if kept["epsilon"] != epsilon:
        raise Refusal(
            "other-histogram",
            f"The folder {folder} has a histogram with ε = {kept['epsilon']:g}, and another one would cost further ε. Give "
            f"--histogram_epsilon {kept['epsilon']:g}.",
        )
    counts = {name: max(0, kept["counts"][name]) for name in names}
    if not any(counts.values()):
        raise Failure(
            "histogram-of-noise",
            f"All noisy counts in {path} are 0 or below, because the data are few for ε = {epsilon:g}. Leave "
            "--histogram_epsilon out, and choose the numbers with --proportions.",
        )
    return counts


def exact_counts(labels: Iterable[str], users: Iterable[Any] | None, names: Sequence[str]) -> Counter[str]:
    """Return how many records have each label, or users: a user counts for the label of most of their records."""
    if users is None:
        return Counter(labels)
    of_user: dict[Any, Counter[str]] = {}
    for label, user in zip(labels, users, strict=True):
        of_user.setdefault(user, Counter())[label] += 1
    # If several labels are equally frequent, the first in the public order counts.
    return Counter(max(names, key=own.__getitem__) for own in of_user.values())


def two_sided_geometric(epsilon: float) -> int:
    """Return a random number k, whose probability is proportional to e^(−ε|k|), from the operating system's entropy.

    It is the difference of two numbers of coins that show heads before the first that shows tails. Whole numbers have no
    rounding that could give data away, as the low bits of a float with noise do (Mironov 2012).
    """
    # Rounded upwards, as the comparison below is: heads are never rarer than e^(−ε), so that there is never less noise.
    heads, coin = math.nextafter(math.exp(-epsilon), 1.0), secrets.SystemRandom()

    def run_of_heads() -> int:
        length = 0
        while coin.random() < heads:
            length += 1
        return length

    return run_of_heads() - run_of_heads()
