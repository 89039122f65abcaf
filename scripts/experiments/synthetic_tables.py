"""Tables and the picture of the study of synthetic texts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.experiments.accuracy import error_of
from scripts.experiments.text_canaries import ALTERNATIVES, INSERTIONS, canaries_of

# The sets of texts: their names in the results of a seed, and in the tables.
MODELS: Final = ("ε = 8", "no privacy")
MAJORITY: Final = "the majority class"
TITLES: Final = {
    "public": "public sentences",
    "ε = 8": "synthetic, ε = 8",
    "no privacy": "synthetic, no privacy",
    "real": "real, held out",
}
COLORS: Final = {"real": "C7", "ε = 8": "C0", "no privacy": "C2"}


def with_error(values: Sequence[float], digits: int) -> str:
    """Return the mean over seeds, with its standard error if there are several."""
    found = np.array(values)
    error = f" ± {error_of(found):.{digits}f}" if len(found) > 1 else ""
    return f"{found.mean():.{digits}f}{error}"


def tables(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of all seeds."""

    def cell(name: str, key: str, digits: int, scale: float = 1.0) -> str:
        values = [scale * each[name][key] for each in found if key in each[name]]
        return with_error(values, digits) if values else ""

    lines = ["| classifier trained on | accuracy, % |", "|---|---|"]
    for name in found[0]["accuracy"]:
        values = [100 * each["accuracy"][name] for each in found]
        lines.append(f"| {name} | {f'{values[0]:.1f}' if name == MAJORITY else with_error(values, 1)} |")

    lines += ["", "| texts | Fréchet distance | area under the frontier | loss per token on the validation set |"]
    lines += ["|---|---|---|---|"]
    for name, title in TITLES.items():
        lines.append(f"| {title} | {cell(name, 'frechet', 3)} | {cell(name, 'frontier', 2)} | {cell(name, 'loss', 2)} |")

    lines += ["", "| texts | words | positive, % | label fits, % |", "|---|---|---|---|"]
    for name, title in {**{name: TITLES[name] for name in MODELS}, "real": "real, training"}.items():
        lines.append(
            f"| {title} | {words(found, name)} | {cell(name, 'positive', 1, 100)} | {cell(name, 'label fits', 1, 100)} |"
        )

    lines += ["", "| model | canary was inserted | ranks among 1,000 | in the samples, times |", "|---|---|---|---|"]
    for name in MODELS:
        for insertions in INSERTIONS:
            times = sum(values_of_canaries(found, name, "verbatim", insertions))
            places = ", ".join(map(str, sorted(values_of_canaries(found, name, "ranks", insertions))))
            lines.append(f"| {name} | {insertions} × | {places} | {times} |")

    lines += [
        "",
        "| model | nearer to a training text, % | equal a training text | equal a held-out text |",
        "|---|---|---|---|",
    ]
    for name in MODELS:
        copies = " | ".join(cell(name, f"copies of {kind} texts", 0) for kind in ("training", "held-out"))
        lines.append(f"| {name} | {cell(name, 'nearer to training texts', 1, 100)} | {copies} |")
    return "\n".join(lines)


def words(found: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the mean number of words, and its standard deviation over texts, of all seeds together."""
    counts = np.sum([each[name]["words"] for each in found], axis=0)
    lengths = np.repeat(np.arange(len(counts)), counts)
    return f"{lengths.mean():.1f} ± {lengths.std():.1f}"


def values_of_canaries(found: Sequence[Mapping[str, Any]], name: str, key: str, insertions: int) -> list[int]:
    """Return a number of each canary with so many insertions, over all seeds."""
    return [
        each[name][key][canary.start]
        for each in found
        for canary in canaries_of(each["seed"])
        if canary.insertions == insertions
    ]


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw accuracies, lengths, labels and canaries, one panel below another so that a phone shows legible letters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 9.6), layout="constrained")
    panels = figure.subplots(4, 1, height_ratios=(3, 3, 2, 3))
    for panel, axes in zip((draw_accuracies, draw_lengths, draw_labels, draw_canaries), panels, strict=True):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        panel(found, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_accuracies(found: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Draw the accuracy of each classifier, with its error over seeds, and a line for the majority class."""
    names = [name for name in found[0]["accuracy"] if name != MAJORITY]
    values = 100 * np.array([[each["accuracy"][name] for name in names] for each in found])
    errors = [error_of(column) for column in values.T] if len(found) > 1 else None
    colors = [COLORS["ε = 8" if name.endswith("ε = 8") else "no privacy"] for name in names]
    axes.barh(names[::-1], values.mean(0)[::-1], xerr=errors and errors[::-1], color=colors[::-1], capsize=3)
    majority = 100 * found[0]["accuracy"][MAJORITY]
    axes.axvline(majority, color="black", linestyle=":", label=f"majority class, {majority:.1f} %")
    axes.set(xlim=(40, 100), ylim=(-1.5, len(names) - 0.5), xlabel="accuracy, %")  # with room for the legend
    axes.set_title("A classifier trained on real or synthetic texts", fontsize="medium")
    axes.legend(fontsize="small", loc="lower right")


def draw_lengths(found: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Draw the histogram of the numbers of words."""
    for name, color in COLORS.items():
        counts = np.sum([each[name]["words"] for each in found], axis=0)
        label = "real" if name == "real" else TITLES[name]
        axes.stairs(100 * counts / counts.sum(), np.arange(len(counts) + 1) - 0.5, color=color, label=label, linewidth=1.5)
    axes.set(xlabel="words in a text", ylabel="texts, %")
    axes.set_title("Lengths", fontsize="medium")
    axes.legend(fontsize="small")


def draw_labels(found: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Draw the share of both labels in each set of texts."""
    for place, (name, color) in enumerate(reversed(COLORS.items())):
        positive = 100 * np.mean([each[name]["positive"] for each in found])
        axes.barh(place, positive, color=color)
        axes.barh(place, 100 - positive, left=positive, color=color, alpha=0.4)
        axes.text(2, place, f"positive {positive:.0f} %", va="center", color="white", fontsize="small")
    names = ["real" if name == "real" else TITLES[name] for name in reversed(COLORS)]
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 100), xlabel="texts, %")
    axes.set_title("Labels: as many of both were asked for", fontsize="medium")


def draw_canaries(found: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Draw the rank of each canary."""
    shifts: dict[str, Callable[[np.ndarray], np.ndarray]] = {"ε = 8": lambda x: x - 0.12, "no privacy": lambda x: x + 0.12}
    markers = {"ε = 8": "o", "no privacy": "s"}
    for name, shift in shifts.items():
        places = [values_of_canaries(found, name, "ranks", insertions) for insertions in INSERTIONS]
        across = shift(np.repeat(np.arange(len(INSERTIONS)), list(map(len, places))))
        axes.plot(across, np.concatenate(places), markers[name], color=COLORS[name], markersize=5, alpha=0.7, label=name)
    axes.axhline((ALTERNATIVES + 2) / 2, color="black", linestyle=":", label="chance, on average")
    axes.set_yscale("log")
    axes.set_xticks(range(len(INSERTIONS)), [f"{insertions} ×" for insertions in INSERTIONS])
    axes.set(xlabel="how often the canary is in the private texts", ylabel="rank, 1 is memorized", ylim=(0.8, 1400))
    axes.set_title(f"Ranks of canaries among {ALTERNATIVES + 1:,} codes", fontsize="medium")
    axes.legend(fontsize="small", loc="upper right")
