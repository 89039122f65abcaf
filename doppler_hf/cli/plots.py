"""Pictures of filters and of plans, as files.

The ending of a file's name, one of `PICTURE_ENDINGS`, sets the format, and missing folders are created. Matplotlib is
imported when a picture is drawn. Pyplot is never imported, because its state belongs to the user's notebook.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from doppler_hf.cli.planned_runs import PlannedRun
from doppler_hf.errors import Refusal
from doppler_hf.extras import require
from doppler_hf.filters import (
    LowPassFilter,
    filter_figures,
    frequency_response,
    group_delay,
    impulse_response,
    step_response,
)
from doppler_hf.filters.noise_shape import DROWNED, in_units_of_c

PICTURE_ENDINGS: Final = (".png", ".svg", ".pdf")
FREQUENCY: Final = "frequency (fraction of Nyquist)"


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything else is done."""
    if path.suffix not in PICTURE_ENDINGS:
        raise Refusal("unknown-value", f"--plot must name a file that ends in {' or '.join(PICTURE_ENDINGS)}; got {path}.")
    require("plot")


def plot_filters(filters: Mapping[str, LowPassFilter], path: str | Path) -> None:
    """Draw filters in time and frequency: impulse and step response, gain and group delay.

    The panels are one below another, so that a phone shows legible letters.
    """
    figures = [filter_figures(low_pass_filter) for low_pass_filter in filters.values()]
    steps = max(10, *(each.settling_steps for each in figures)) + 1
    # The axis reaches down to a tenth of the lowest cutoff, where every filter passes everything.
    slowest = min(each.cutoff for each in figures)
    frequencies = np.geomspace(min(1e-2, slowest / 10), 1, 1000)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 10.4), layout="constrained")
    impulse, step, gain, delay = figure.subplots(4, 1)
    marker = "." if steps <= 80 else None
    for index, (label, low_pass_filter) in enumerate(filters.items()):
        # The colours repeat after ten filters, so the line style changes then.
        style = ("-", "--", ":", "-.")[index // 10 % 4]
        impulse.plot(impulse_response(low_pass_filter, steps), style, marker=marker, markersize=3, label=label)
        step.plot(step_response(low_pass_filter, steps), style, marker=marker, markersize=3)
        # A zero of the filter would be at minus infinity decibels, which no axis shows.
        decibels = 20 * np.log10(np.maximum(np.abs(frequency_response(low_pass_filter, frequencies)), 1e-9))
        gain.semilogx(frequencies, decibels, style)
        delay.semilogx(frequencies, group_delay(low_pass_filter, frequencies), style)
    step.axhline(1, color="black", linewidth=0.6)
    gain.axhline(-3, color="black", linewidth=0.6, linestyle=":")
    gain.set_ylim(-60, max(5, gain.get_ylim()[1]))
    impulse.set(xlabel="age τ, in steps", ylabel="κ_τ")
    step.set(xlabel="step t", ylabel="c_t", ylim=(0, None))
    gain.set(xlabel=FREQUENCY, ylabel="|H| (dB)")
    delay.set(xlabel=FREQUENCY, ylabel="steps")
    impulse.set_title("Weight of a gradient by its age (impulse response)", fontsize="medium")
    step.set_title("Share of a sudden change that has passed\n(step response, divides the first steps)", fontsize="medium")
    gain.set_title("Slow changes pass, fast ones are damped\n(gain; dotted: half the power)", fontsize="medium")
    delay.set_title("How late a change arrives (group delay)", fontsize="medium")
    widest = max(map(len, filters))
    # Names that need more than the picture's width are made smaller.
    figure.legend(loc="outside lower center", ncols=2 if widest < 30 else 1, fontsize="small" if widest < 60 else "xx-small")
    write(figure, path)


def plot_plan(
    table: Mapping[float, Sequence[PlannedRun]], planned: PlannedRun, path: str | Path, *, epsilon: float, delta: float
) -> None:
    """Draw the noise of runs of equal ε against their batch sizes, with a line for each number of epochs and a mark.

    Args:
        table: Epochs → runs with that length, as of `alternatives`.
        planned: The run that was asked for, one of those in the table.
        path: The picture.
        epsilon: ε of all of these runs.
        delta: δ of all of these runs.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = figure.subplots()
    for epochs, runs in table.items():
        sizes = [each.expected_batch_size for each in runs]
        noises = [each.average_noise_std() / each.max_grad_norm for each in runs]
        axes.loglog(sizes, noises, marker="o", markersize=4, label=f"{epochs:.4g} epochs")
    length = next(epochs for epochs, runs in table.items() if any(each is planned for each in runs))
    size, noise = planned.expected_batch_size, planned.average_noise_std() / planned.max_grad_norm
    axes.plot([size], [noise], marker="*", markersize=16, color="black", linestyle="none", label="your plan")
    # A mark far above all lines would press them together, so it is left out.
    if axes.get_ylim()[1] > DROWNED / 4:
        axes.axhline(DROWNED, color="black", linewidth=0.8, linestyle=":", label="above: image classifiers learnt little")
    every = sorted({each.expected_batch_size for runs in table.values() for each in runs})
    axes.set_xticks(every, labels=[f"{each:,}" for each in every])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(
        xlabel="expected batch size B", ylabel="independent noise per coordinate\nof the average gradient, in units of C"
    )
    axes.set_title(
        f"Your plan, B = {size:,} and {length:.4g} epochs, has noise {in_units_of_c(noise)}.\n"
        f"All runs have ε = {epsilon:.4g}, δ = {delta:.2g} and N = {planned.num_examples:,}.",
        fontsize="medium",
    )
    axes.legend(fontsize="small")
    write(figure, path)


def write(figure: Any, path: str | Path) -> None:
    """Write a figure into a file."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise Refusal(
            "picture-not-written", f"The picture {path} cannot be written ({error.strerror}). Choose another folder."
        ) from error
