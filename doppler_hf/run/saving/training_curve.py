"""A picture of a training in its output folder: its evaluations and its private training loss over the steps.

It has only what may be published (`published_results`), since the folder is shared. It is drawn where matplotlib is
installed, and a fault of the drawing is told and fails nothing.
"""

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from doppler_hf.extras import EXTRAS
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.run.reporting.published_results import (
    MAJORITY,
    MEAN_LABEL,
    Evaluation,
    PublishedResults,
    published_results,
    training_losses_of,
)

PICTURE_NAME: Final = "training_curve.png"
_MOST_LINES: Final = 5


def draw_training_curve(ledger: PrivacyLedger, trainer: Any, *, guarantee: str) -> bool:
    """Draw a training into its output folder, and return whether there is a picture now.

    Args:
        ledger: The ledger of the training.
        trainer: The trainer, with the logs.
        guarantee: ε, δ and what they protect, in words.
    """
    path = Path(trainer.args.output_dir) / PICTURE_NAME
    if not trainer.args.plot_training_curve or any(find_spec(module) is None for module in EXTRAS["plot"]):
        return False
    try:
        published = published_results(trainer)
        noisy = training_losses_of(ledger, trainer.state.log_history)
        if max(len(published.curve), len(noisy)) < 2:  # A single point is no curve.
            return False
        draw(published, noisy, path, guarantee=guarantee)
    except Exception as error:
        print(f"{path} was not drawn ({type(error).__name__}: {error}). The run itself is complete.")
        return False
    return True


def draw(published: PublishedResults, noisy: Mapping[int, float], path: Path, *, guarantee: str) -> None:
    """Draw metrics above and losses below, each if there are any, with the guarantee as the title."""
    from matplotlib.figure import Figure

    evaluations = published.curve
    metrics, of_loss = published.main_metrics()[:_MOST_LINES], published.losses()[:_MOST_LINES]
    panels = [names for names in (metrics, [*of_loss, *(["noisy"] if noisy else [])]) if names]
    # A phone shows this width without making the letters small.
    figure = Figure(figsize=(5.0, 0.8 + 2.6 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, names in zip(all_axes, panels, strict=True):
        if "noisy" in names:
            label = "training, private: with noise, covered by ε"
            axes.plot(list(noisy), list(noisy.values()), color="0.7", linewidth=1.0, label=label)
        for name in names:
            if name != "noisy":
                axes.plot(*points(evaluations, name), marker="o", markersize=3, label=f"evaluation: {in_words(name)}")
        baseline, always = (MAJORITY, "the most frequent class") if names is metrics else (MEAN_LABEL, "the mean label")
        for name in dict.fromkeys(name for each in evaluations for name in each.results if name.endswith(baseline)):
            axes.plot(*points(evaluations, name), "--", color="black", linewidth=0.8, label=f"always {always}")
        if published.is_chosen and published.of_weights is not None:
            axes.axvline(published.of_weights.step, linestyle=":", color="black", linewidth=0.8, label="the saved weights")
        axes.set_ylabel(
            in_words(names[0]) if names is metrics and len(names) == 1 else "loss" if names is not metrics else ""
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    all_axes[-1].set_xlabel("step")
    # The title is wrapped, because the reason why a run is not private may be long.
    title = "\n".join(line for part in title_of(published, guarantee) for line in textwrap.wrap(part, 58))
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def points(evaluations: Sequence[Evaluation], name: str) -> tuple[list[int], list[float]]:
    """Return the steps of a result, and its values."""
    having = [each for each in evaluations if name in each.results]
    return [each.step for each in having], [each.results[name] for each in having]


def title_of(published: PublishedResults, guarantee: str) -> tuple[str, str]:
    """Return what is seen: the result of the saved weights, and the guarantee."""
    results = {} if published.of_weights is None else published.of_weights.results
    names = [name for name in (*published.main_metrics(), *published.losses()) if name in results]
    if not names:
        return "Training loss, private: with noise, covered by ε", guarantee
    what = in_words(names[0])
    return f"{what[0].upper()}{what[1:]} on the evaluation data: {results[names[0]]:.3g}", guarantee


def in_words(name: str) -> str:
    """Return the name of a result as one reads it."""
    return name.replace("_", " ")
