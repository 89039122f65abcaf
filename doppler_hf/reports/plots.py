"""Pictures of runs and filters, as files, whose ending, one of `PICTURE_ENDINGS`, sets the format. Folders are made.

Matplotlib is imported when one is drawn; pyplot, whose state is the notebook's, never.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from doppler_hf.extras import require
from doppler_hf.filters import (
    PAPER_FILTERS,
    ClosedLoop,
    LowPassFilter,
    NoiseShape,
    filter_figures,
    frequency_response,
    group_delay,
    impulse_response,
    step_response,
)
from doppler_hf.reports.planned_runs import PlannedRun

PICTURE_ENDINGS: Final = (".png", ".svg", ".pdf")
FREQUENCY: Final = "frequency (fraction of Nyquist)"


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything else is done.

    Raises:
        ValueError: If the ending of `path` is not one of `PICTURE_ENDINGS`.
        MissingExtraError: If matplotlib is not installed.
    """
    if path.suffix not in PICTURE_ENDINGS:
        raise ValueError(f"--plot must end in one of {', '.join(PICTURE_ENDINGS)}, got {path}.")
    require("plot")


def plot_planned_runs(
    table: Mapping[float, Sequence[PlannedRun]], planned: PlannedRun, path: str | Path, *, title: str
) -> None:
    """Draw σ, noise_std and noise_std/√T of runs of equal ε against the batch size, a curve for each length in epochs."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def quantities(run: PlannedRun) -> tuple[float, float, float]:
        return run.noise_multiplier, run.noise_std, run.average_noise_std

    labels = ("noise multiplier σ", "noise_std = σC/B, one step", "noise_std/√T, average over the run")
    batch_sizes = sorted({run.expected_batch_size for runs in table.values() for run in runs})
    figure = new_figure(11.0, 3.8)
    panels = figure.subplots(1, len(labels))
    for index, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        for epochs, runs in table.items():
            sizes, values = [run.expected_batch_size for run in runs], [quantities(run)[index] for run in runs]
            axes.loglog(sizes, values, marker="o", markersize=3, label=f"{epochs:.4g}")
        mark = {"marker": "o", "markersize": 11, "color": "black", "fillstyle": "none"}
        axes.plot(planned.expected_batch_size, quantities(planned)[index], **mark)
        axes.set(xlabel="expected batch size B", title=label)
        axes.set_xticks(batch_sizes, [f"{batch_size:,}" for batch_size in batch_sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    panels[0].legend(title="epochs")
    figure.suptitle(title)
    write(figure, path)


def plot_filters(filters: Mapping[str, LowPassFilter], path: str | Path) -> None:
    """Draw filters in time and frequency: impulse and step response, gain and group delay."""
    figures = [filter_figures(low_pass_filter) for low_pass_filter in filters.values()]
    steps = max(10, *(each.settling_steps for each in figures)) + 1
    slowest = min(each.cutoff for each in figures)
    frequencies = np.geomspace(min(1e-2, slowest / 10), 1, 1000)
    figure = new_figure(9.0, 6.6)
    (impulse, step), (gain, delay) = figure.subplots(2, 2)
    marker = "." if steps <= 80 else None
    for index, (label, low_pass_filter) in enumerate(filters.items()):
        # The colours repeat after ten.
        style = ("-", "--", ":", "-.")[index // 10 % 4]
        impulse.plot(impulse_response(low_pass_filter, steps), style, marker=marker, markersize=3, label=label)
        step.plot(step_response(low_pass_filter, steps), style, marker=marker, markersize=3)
        decibels = 20 * np.log10(np.maximum(np.abs(frequency_response(low_pass_filter, frequencies)), 1e-9))
        gain.semilogx(frequencies, decibels, style)
        delay.semilogx(frequencies, group_delay(low_pass_filter, frequencies), style)
    _leave_out_single_weights(impulse, filters)
    step.axhline(1, color="black", linewidth=0.6)
    gain.axhline(-3, color="black", linewidth=0.6, linestyle=":")
    gain.set_ylim(-60, max(5, gain.get_ylim()[1]))
    impulse.set(xlabel="steps ago τ", ylabel="κ_τ", title="impulse response: weight of an old gradient")
    step.set(xlabel="step t", ylabel="c_t", title="step response: divisor of the bias correction", ylim=(0, None))
    gain.set(xlabel=FREQUENCY, ylabel="|H| (dB)", title="gain (dotted: half the power)")
    delay.set(xlabel=FREQUENCY, ylabel="steps", title="group delay")
    widest = max(map(len, filters))
    figure.legend(loc="outside lower center", ncols=4 if widest < 20 else 2, fontsize="small" if widest < 60 else "xx-small")
    write(figure, path)


def plot_noise(filters: Mapping[str, LowPassFilter], shape: NoiseShape, path: str | Path) -> None:
    """Draw where the noise lies over frequency, white and shaped, and what it costs in loss behind each filter.

    Both kinds are of the same σ. What noise costs depends on the curvature of a direction (`filters.closed_loop`). Curves
    end where the loop of filter and weights becomes unstable.
    """
    frequencies = np.geomspace(1e-3, 1, 1000)
    figure = new_figure(9.0, 3.6)
    before, after = figure.subplots(1, 2)
    curvatures = np.geomspace(1e-3, 2, 200)
    kinds = (("white", NoiseShape(), "--"), (str(shape), shape, "-"))
    for label, noise, style in kinds:
        before.loglog(frequencies, noise.spectrum(frequencies), style, color="black", label=label)
    for index, (label, low_pass_filter) in enumerate(filters.items()):
        power = np.abs(frequency_response(low_pass_filter, frequencies)) ** 2
        before.loglog(frequencies, power, ":", color=f"C{index}", label=f"|H|² of {label}")
        for name, noise, style in kinds:
            losses = [ClosedLoop(np.array([x])).loss(low_pass_filter, noise) for x in curvatures]
            after.loglog(curvatures, losses, style, color=f"C{index}", label=f"{name}, {label}")
    before.set(xlabel=FREQUENCY, ylabel="power density", title="noise of equal σ, and gain of the filter", ylim=(1e-3, 10))
    after.set(xlabel="x = learning rate × curvature", ylabel="L(x)", title="loss through noise", ylim=(0.05, 5))
    for axes in (before, after):
        axes.legend(fontsize="small")
    write(figure, path)


def plot_paper_filters(path: str | Path) -> None:
    """Draw the paper's figure of its filters: weights over time and gain over frequency, for each of its two tables."""
    names = list(PAPER_FILTERS)
    first_ablation = names.index("f1")
    tables = {"filters of the experiments": names[:first_ablation], "filters of the ablation": names[first_ablation:]}
    frequencies = np.linspace(0, 1, 500)
    figure = new_figure(9.0, 6.6)
    panels = figure.subplots(2, 2)
    for (time, frequency), (title, listed) in zip(panels, tables.items(), strict=True):
        for index, name in enumerate(listed):
            # f1 and f2 have the same gain: through dashes the curve below stays visible.
            style = "--" if index % 2 else "-"
            time.plot(impulse_response(PAPER_FILTERS[name], 41), style, marker=".", markersize=3, label=name)
            frequency.plot(frequencies, np.abs(frequency_response(PAPER_FILTERS[name], frequencies)), style, label=name)
        _leave_out_single_weights(time, {name: PAPER_FILTERS[name] for name in listed})
        time.set(xlabel="steps τ", ylabel="weight κ_τ", title=f"{title}: time")
        frequency.set(xlabel=FREQUENCY, ylabel="gain |H|", title=f"{title}: frequency", ylim=(0, None))
        for axes in (time, frequency):
            axes.legend(fontsize="small")
    write(figure, path)


def plot_neighbours(distances: np.ndarray, couplings: np.ndarray, path: str | Path) -> None:
    """Draw by how much of C one unit more moves the sum, and what the others contribute: shape (pairs,), in units of C."""
    figure = new_figure(9.0, 3.6)
    figure.suptitle("NOT PRIVATE: computed from examples, without noise", fontsize="small")
    whole, others = figure.subplots(1, 2)
    pairs = np.arange(1, len(distances) + 1)
    whole.plot(pairs, np.sort(distances), "o", markersize=4)
    whole.axhline(1.0, color="black", linewidth=1.0, linestyle="--", label="what the ledger claims")
    whole.set(xlabel="pairs, in ascending order", ylabel="distance of the sums (C)", title="one unit more moves the sum")
    whole.set_ylim(0.0, 1.1 * max(1.0, *distances))
    whole.legend(fontsize="small")
    others.semilogy(pairs, np.sort(np.maximum(couplings, 1e-17)), "o", markersize=4)  # a logarithm of 0 would be lost
    others.set_ylim(min(1e-9, 0.5 * max(1e-17, np.min(couplings))), max(10.0, 2.0 * np.max(couplings)))
    others.axhline(2.0**-24, color="grey", linewidth=1.0, linestyle=":", label="rounding of one float32")
    others.set(xlabel="pairs, in ascending order", ylabel="change of the others (C)", title="and what the others contribute")
    others.legend(fontsize="small")
    write(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches, that no window and no notebook knows of."""
    require("plot")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write(figure: Any, path: str | Path) -> None:
    """Write a figure into a file.

    Raises:
        ValueError: If the folder cannot be made or written.
    """
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"The picture {path} cannot be written ({error.strerror}). Give another folder.") from error


def _leave_out_single_weights(axes: Any, filters: Mapping[str, LowPassFilter]) -> None:
    """Scale the axis to filters of order 1 and more, which would look flat beside the single weight of 1 of order 0."""
    weights = [impulse_response(each, 200) for each in filters.values() if each.order]
    if weights:
        highest, lowest = max(each.max() for each in weights), min(each.min() for each in weights)
        axes.set_ylim(min(0.0, 1.1 * lowest) - 0.03 * highest, 1.1 * highest)
        if len(weights) < len(filters):
            axes.annotate("↑ 1", (1, 1.1 * highest), xytext=(2, -4), textcoords="offset points", va="top")
