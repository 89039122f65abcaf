"""Pictures of filters, as files.

The ending of a file's name, one of `PICTURE_ENDINGS`, sets the format, and missing folders are created. Matplotlib is
imported when a picture is drawn. Pyplot is never imported, because its state belongs to the user's notebook.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

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

PICTURE_ENDINGS: Final = (".png", ".svg", ".pdf")
FREQUENCY: Final = "frequency (fraction of Nyquist)"


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything else is done."""
    if path.suffix not in PICTURE_ENDINGS:
        raise Refusal("unknown-value", f"The file of --plot must end in {' or '.join(PICTURE_ENDINGS)}; got {path}.")
    require("plot")


def plot_filters(filters: Mapping[str, LowPassFilter], path: str | Path) -> None:
    """Draw filters in time and frequency: impulse and step response, gain and group delay."""
    figures = [filter_figures(low_pass_filter) for low_pass_filter in filters.values()]
    steps = max(10, *(each.settling_steps for each in figures)) + 1
    # The axis reaches down to a tenth of the lowest cutoff, where every filter passes everything.
    slowest = min(each.cutoff for each in figures)
    frequencies = np.geomspace(min(1e-2, slowest / 10), 1, 1000)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.6), layout="constrained")
    (impulse, step), (gain, delay) = figure.subplots(2, 2)
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
    impulse.set(xlabel="steps ago τ", ylabel="κ_τ", title="impulse response: weight of an old gradient")
    step.set(xlabel="step t", ylabel="c_t", title="step response: divisor of the bias correction", ylim=(0, None))
    gain.set(xlabel=FREQUENCY, ylabel="|H| (dB)", title="gain (dotted: half the power)")
    delay.set(xlabel=FREQUENCY, ylabel="steps", title="group delay")
    widest = max(map(len, filters))
    figure.legend(loc="outside lower center", ncols=4 if widest < 20 else 2, fontsize="small" if widest < 60 else "xx-small")
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
