"""Pictures of runs. matplotlib is imported when one is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def plot_learning_curves(
    curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], path: str | Path, *, ylabel: str, title: str
) -> None:
    """Draw one curve for each entry: the mean over its runs, and the range from the lowest to the highest.

    Args:
        curves: Label → runs, each a sequence of (epoch, value); the runs of one entry have the same epochs.
        path: Where to write the picture; its ending says which format. Folders are made.
        ylabel: What is on the vertical axis, with its unit.
        title: Title of the picture.

    Raises:
        ValueError: Runs of one entry with different epochs, or no run at all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for label, runs in curves.items():
        epochs = [[epoch for epoch, _ in run] for run in runs]
        if not runs or any(other != epochs[0] for other in epochs):
            raise ValueError(f"the runs of {label!r} must share their epochs, got {epochs}")
        values = np.array([[value for _, value in run] for run in runs])
        (line,) = axes.plot(epochs[0], values.mean(axis=0), label=label)
        axes.fill_between(epochs[0], values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="epoch", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
