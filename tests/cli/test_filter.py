"""`doppler-hf filter`: the tables hold the figures, the picture is written, mistakes are one line."""

import re

import numpy as np
import pytest

from doppler_hf.cli import main
from doppler_hf.filters import PAPER_FILTERS, butterworth, filter_figures
from tests.support.tiers import thorough


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def printed(words, capsys):
    assert main(["filter", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def figures_row(text, name):
    """Return the numbers of the first table's row of a filter."""
    (row,) = re.findall(rf"^ *{re.escape(name)} +([\d ,.e-]+?) *$", text.split(" b ")[0], flags=re.MULTILINE)
    return [float(word.replace(",", "")) for word in row.split()]


def test_show_prints_the_figures_and_coefficients_of_the_paper(capsys):
    text = printed([], capsys)
    for name, low_pass_filter in PAPER_FILTERS.items():
        f = filter_figures(low_pass_filter)
        expected = [f.order, f.noise_gain, f.cutoff, f.delay, f.settling_steps, f.startup_steps, f.largest_pole]
        expected.append(f.stability_limit)
        np.testing.assert_allclose(figures_row(text, name), expected, rtol=5e-3, atol=1e-12)
        assert re.search(rf"^ *{name} +{low_pass_filter.b[0]:.6g}\b", text, flags=re.MULTILINE)
    assert "-1.58621, 0.655172" in text


def test_a_design_is_shown_with_its_coefficients(capsys):
    name = "butterworth:order=2,cutoff=0.1"
    text = printed([name], capsys)
    assert figures_row(text, name)[2] == 0.1
    assert all(f"{value:.6g}" in text for value in (*butterworth(2, 0.1).b, *butterworth(2, 0.1).a))


@pytest.mark.parametrize("ending", ["png", *thorough("svg", "pdf")])
def test_picture_is_written_into_a_new_folder(ending, tmp_path, capsys):
    path = tmp_path / "new" / f"filters.{ending}"
    printed(["momentum", f"--plot={path}"], capsys)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["f7"], "There is no filter 'f7'"),
        (["--plot=a.txt"], "--plot must name a file that ends in .png or .svg or .pdf; got a.txt."),
        (["--plot=/proc/x/a.png"], "The picture /proc/x/a.png cannot be written"),
        (["momentum:"], "Expected 'momentum:beta=...'; got nothing after"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["filter", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
