"""Show low-pass filters: their figures and coefficients as tables, their responses as a picture.

A filter is named as in low_pass_filter: a preset, a design, or its coefficients. Without names, the paper's eleven filters
are shown.

  doppler-hf filter momentum second-order "b=0.1,0.1;a=1,-0.8" --plot filters.png
  doppler-hf filter butterworth:order=2,cutoff=0.1
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Column, Table

from doppler_hf.cli.plots import PICTURE_ENDINGS, check_picture, plot_filters
from doppler_hf.errors import page
from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, filter_figures

READING: Final = (
    "Σκ²: share of the noise that passes. -3 dB: cutoff, as a fraction of Nyquist. delay, settled (to 2 % of a step), "
    "started (to 10 % of the final noise): in steps. pole: the largest modulus. order: buffers per parameter. See "
    f"{page('method/filters')}."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf filter`."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="filters; the paper's by default")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as " + ", ".join(PICTURE_ENDINGS))


def run(args: argparse.Namespace) -> int:
    """Read the filters, print them, and draw them."""
    if args.plot is not None:
        check_picture(args.plot)  # before the tables, which would hide the message
    console = Console()
    # By their own names: two spellings of one filter are one row.
    filters = {str(each): each for each in map(LowPassFilter.parse, args.names)} or PAPER_FILTERS
    console.print(figures_table(filters))
    console.print(coefficients_table(filters))
    console.print(READING)
    if args.plot is not None:
        plot_filters(filters, args.plot)
    return 0


def figures_table(filters: Mapping[str, LowPassFilter]) -> Table:
    """Lay out the figures, a filter in a row."""
    numbers = ["order", "Σκ²", "-3 dB", "delay", "settled", "started", "pole"]
    columns = [Column("filter", overflow="fold"), *(Column(name, justify="right", no_wrap=True) for name in numbers)]
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, low_pass_filter in filters.items():
        figures = filter_figures(low_pass_filter)
        gains = figures.noise_gain, figures.cutoff, figures.delay
        steps = figures.settling_steps, figures.startup_steps
        cells = *(f"{each:.4g}" for each in gains), *(f"{each:,}" for each in steps), f"{figures.largest_pole:.4g}"
        table.add_row(name, str(figures.order), *cells)
    return table


def coefficients_table(filters: Mapping[str, LowPassFilter]) -> Table:
    """Lay out the coefficients to six digits, a filter in a row."""
    columns = [Column(name, overflow="fold") for name in ("filter", "b", "a")]
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, low_pass_filter in filters.items():
        b, a = (", ".join(f"{value:.6g}" for value in values) for values in (low_pass_filter.b, low_pass_filter.a))
        table.add_row(name, b, a)
    return table
