"""Show low-pass filters, or design one: their figures as a table, their responses as a picture.

A filter is named as in low_pass_filter: a preset, a design, or its coefficients. Without names, `show` takes the paper's
eleven filters.

  doppler-hf filter show momentum second-order "b=0.1,0.1;a=1,-0.8" --plot filters.png
  doppler-hf filter show none first-order-v1 --noise banded:bands=8 --plot noise.png
  doppler-hf filter design --type butterworth --order 2 --cutoff 0.1
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Column, Table

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, NoiseShape, filter_figures, noise_gain, write_coefficients
from doppler_hf.filters.grammar import DESIGNS
from doppler_hf.reports.plots import PICTURE_ENDINGS, check_picture, plot_filters, plot_noise

# The parameters of a design beside its type: flag, type, meaning.
PARAMETERS: Final = {
    "order": (int, "number of poles"),
    "cutoff": (float, "as a fraction of Nyquist, in (0, 1)"),
    "ripple_db": (float, "depth of chebyshev1's ripple in the passband"),
    "attenuation_db": (float, "of chebyshev2's stopband"),
    "beta": (float, "momentum's decay"),
    "taps": (int, "length of the moving-average"),
}

READING: Final = (
    "Σκ²: share of the noise that passes. -3 dB: cutoff, as a fraction of Nyquist. delay, settled (to 2 % of a step), "
    "started (to 10 % of the final noise): in steps. pole: the largest modulus. order: buffers per parameter. See "
    "docs/method/filters.md."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf filter`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="compare filters by name", allow_abbrev=False)
    show.add_argument("names", nargs="*", metavar="NAME", help="filters; the paper's by default")
    show.add_argument("--noise", metavar="SHAPE", help="as banded:bands=8: show what the filters leave of such noise")
    design = actions.add_parser("design", help="design a filter and print its coefficients", allow_abbrev=False)
    design.add_argument("--type", required=True, choices=DESIGNS)
    for name, (kind, meaning) in PARAMETERS.items():
        design.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=meaning)
    for action in (show, design):
        action.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as " + ", ".join(PICTURE_ENDINGS))


def run(args: argparse.Namespace) -> int:
    """Read or design the filters, print them, and draw them."""
    if args.plot is not None:
        check_picture(args.plot)
    console = Console()
    names = [_designed_name(args)] if args.action == "design" else args.names
    filters = {str(low_pass_filter): low_pass_filter for low_pass_filter in map(LowPassFilter.parse, names)} or PAPER_FILTERS
    if args.action == "design":
        for name, low_pass_filter in filters.items():
            # To be copied into a recipe: each on one line, however wide the terminal.
            print(name, write_coefficients(low_pass_filter), sep="\n")
    noise = None if args.action == "design" or args.noise is None else NoiseShape.parse(args.noise)
    console.print(figures_table(filters, noise=NoiseShape() if noise is None else noise))
    if args.action == "show":
        console.print(coefficients_table(filters))
    console.print(READING)
    if args.plot is not None:
        if noise is None:
            plot_filters(filters, args.plot)
        else:
            plot_noise(filters, noise, args.plot)
    return 0


def _designed_name(args: argparse.Namespace) -> str:
    """Return the design's name in the grammar, whose parser then says what is missing or does not belong."""
    given = {name: vars(args)[name] for name in PARAMETERS if vars(args)[name] is not None}
    return args.type + ":" + ",".join(f"{name}={value!r}" for name, value in given.items())


def figures_table(filters: Mapping[str, LowPassFilter], *, noise: NoiseShape) -> Table:
    """Lay out the figures, a filter in a row, for noise of a shape."""
    numbers = ["order", "Σκ²", "-3 dB", "delay", "settled", "started", "pole"]
    columns = [Column("filter", overflow="fold"), *(Column(name, justify="right", no_wrap=True) for name in numbers)]
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, low_pass_filter in filters.items():
        figures = filter_figures(low_pass_filter)
        gains = noise_gain(low_pass_filter, noise), figures.cutoff, figures.delay
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
