"""Show low-pass filters: their figures and coefficients as tables, their responses as a picture.

Name a filter as in the argument low_pass_filter: a preset, a design, or its coefficients. Without names the command shows
the eleven filters of the paper.

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
    "order: how many tensors of the size of the weights the filter keeps.\n"
    "noise passed: share of the noise's variance that is left.\n"
    "cutoff: frequency at which half of the power passes; 1 is a change of sign at every step.\n"
    "delay: by how many steps slow changes of the gradient arrive later.\n"
    "settled: steps until the answer to a sudden change stays within 2 % of its final value.\n"
    "started: steps until the noise that is left is within 10 % of its final amount.\n"
    "max pole: the largest; nearer to 1, the filter remembers longer.\n"
    "max ηλ: learning rate times curvature up to which SGD is stable; 2 without a filter.\n"
    f"See {page('method/filters')}."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf filter`."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="filters to show; by default those of the paper")
    endings = " or ".join(PICTURE_ENDINGS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw the filters into FILE, which ends in {endings}")


def run(args: argparse.Namespace) -> int:
    """Read the filters, print them, and draw them."""
    if args.plot is not None:
        check_picture(args.plot)  # The check comes before the tables, which would hide its message.
    console = Console()
    # The keys are the filters' own names, so that two spellings of one filter are one row.
    filters = {str(each): each for each in map(LowPassFilter.parse, args.names)} or PAPER_FILTERS
    console.print(figures_table(filters))
    console.print(coefficients_table(filters))
    console.print(READING)
    if args.plot is not None:
        plot_filters(filters, args.plot)
    return 0


def figures_table(filters: Mapping[str, LowPassFilter]) -> Table:
    """Return a table of the figures, one filter per row."""
    numbers = ["order", "noise\npassed", "cutoff", "delay", "settled", "started", "max\npole", "max\nηλ"]
    columns = [Column("filter", overflow="fold"), *(Column(name, justify="right", no_wrap=True) for name in numbers)]
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for name, low_pass_filter in filters.items():
        figures = filter_figures(low_pass_filter)
        gains = figures.noise_gain, figures.cutoff, figures.delay
        steps = figures.settling_steps, figures.startup_steps
        largest = figures.largest_pole, figures.stability_limit
        cells = *(f"{each:.3g}" for each in gains), *(f"{each:,}" for each in steps), *(f"{each:.4g}" for each in largest)
        table.add_row(name, str(figures.order), *cells)
    return table


def coefficients_table(filters: Mapping[str, LowPassFilter]) -> Table:
    """Return a table of the coefficients to six digits, one filter per row."""
    columns = [Column(name, overflow="fold") for name in ("filter", "b", "a")]
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, low_pass_filter in filters.items():
        b, a = (", ".join(f"{value:.6g}" for value in values) for values in (low_pass_filter.b, low_pass_filter.a))
        table.add_row(name, b, a)
    return table
