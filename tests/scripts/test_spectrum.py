"""The measurement of a run's spectrum: the table says what the series hold, and a real run goes through it."""

import io

import numpy as np
import pytest
from rich.console import Console

from doppler_hf.filters import PAPER_FILTERS, noise_gain
from doppler_hf.run.gradient_recorder import GradientRecorder
from scripts.experiments import spectrum


def recording(filter_name="first-order-v1", *, steps=300, signal=0.5):
    """A recording of a signal with a period of 100 steps in 40 coordinates, and of white noise of deviation 2."""
    generator = np.random.default_rng(0)
    recorder = GradientRecorder(dimensions=40, record_raw=True)
    recorder.low_pass_filter, recorder.noise_std = PAPER_FILTERS[filter_name], 2.0
    phases = 2 * np.pi * (np.arange(steps)[:, None] / 100 + np.arange(40) / 40)
    raw = signal * np.sqrt(2) * np.sin(phases)
    recorder._raw, recorder._private = list(raw), list(raw + 2 * generator.normal(size=raw.shape))
    return recorder


def rows(recorder):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(spectrum.table(recorder))
    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in lines}


def test_the_table_says_what_the_series_hold():
    measured = rows(recording())
    gain, error = map(float, measured["noise gain measured"].split(" ± "))
    expected = noise_gain(PAPER_FILTERS["first-order-v1"])
    # Five and a half standard errors: 4e-8 of false alarm, and little more by Student's t over 40 coordinates.
    assert abs(gain - expected) < 5.5 * error < 0.3 * expected
    assert float(measured["noise gain of the filter, Σκ²"]) == pytest.approx(expected, abs=1e-5)
    # χ² over 12,000: 0.65 % a standard deviation.
    assert float(measured["noise per number recorded, measured / known"]) == pytest.approx(1, abs=0.04)
    assert float(measured["signal per noise before the filter"]) == pytest.approx(0.25 / 4, rel=1e-3)
    # A period of 100 steps is 0.02 of Nyquist: all of the signal, and of white noise as much as there is room.
    assert float(measured["power at frequencies up to 0.1: before noise"].strip("%")) > 98
    assert 12 < float(measured["with noise"].strip("%")) < 19
    assert measured["autocorrelation before noise at lag 1, 10, 100"].startswith("0.9")


def test_a_picture_without_a_format_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--picture must end in one of .* got 'x'"):
        spectrum.main(["--picture=x"])
