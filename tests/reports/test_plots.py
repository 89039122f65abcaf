"""The pictures hold the numbers."""

import numpy as np
import scipy.signal
from matplotlib.figure import Figure

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.reports.plots import plot_filters


def test_filters_are_drawn_as_scipy_has_them(monkeypatch):
    low_pass_filter, figures = PAPER_FILTERS["first-order-v1"], []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot_filters({"one": low_pass_filter}, "f.png")
    ((impulse, step, gain, delay),) = [figure.axes for figure in figures]
    kappa = scipy.signal.lfilter(low_pass_filter.b, low_pass_filter.a, np.eye(1, 200)[0])
    drawn = impulse.get_lines()[0].get_ydata()
    np.testing.assert_allclose(drawn, kappa[: len(drawn)], rtol=1e-12)
    drawn = step.get_lines()[0].get_ydata()
    np.testing.assert_allclose(drawn, np.cumsum(kappa)[: len(drawn)], rtol=1e-12)
    line = gain.get_lines()[0]
    _, response = scipy.signal.freqz(low_pass_filter.b, low_pass_filter.a, np.pi * line.get_xdata())
    above = line.get_ydata() > -100
    np.testing.assert_allclose(line.get_ydata()[above], 20 * np.log10(np.abs(response))[above], atol=1e-9)
    line = delay.get_lines()[0]
    _, expected = scipy.signal.group_delay((low_pass_filter.b, low_pass_filter.a), np.pi * line.get_xdata()[:-1])
    np.testing.assert_allclose(line.get_ydata()[:-1], expected, atol=1e-9)
