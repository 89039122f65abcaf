"""The pictures are written and hold the numbers, and curves that cannot be averaged are refused."""

import pytest
from matplotlib import pyplot

from doppler_hf.planning import PlannedRun
from doppler_hf.plotting import plot_learning_curves, plot_planned_runs

RUNS = [[(1.0, 50.0), (2.0, 70.0)], [(1.0, 55.0), (2.0, 80.0)]]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_is_written_into_a_new_folder(tmp_path, ending):
    path = tmp_path / "new" / f"curve.{ending}"
    plot_learning_curves({"none": RUNS, "momentum": RUNS}, path, ylabel="accuracy (%)", title="a title")
    assert path.stat().st_size > 5000


def test_runs_of_different_lengths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="runs of 'none' must share their epochs"):
        plot_learning_curves({"none": [RUNS[0], RUNS[0][:1]]}, tmp_path / "x.png", ylabel="", title="")


def test_planned_runs_are_drawn_as_they_are(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    table = {
        epochs: [PlannedRun(1000, batch_size, 4 * batch_size, epochs + batch_size / 10, 0.5) for batch_size in (10, 20, 40)]
        for epochs in (1.0, 2.5)
    }
    plot_planned_runs(table, table[2.5][1], tmp_path / "new" / "plan.png", title="a title")
    assert (tmp_path / "new" / "plan.png").stat().st_size > 5000
    (figure,) = figures
    assert figure.get_suptitle() == "a title"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["1", "2.5"]
    names = ("noise_multiplier", "noise_std", "average_noise_std")
    for axes, name in zip(figure.axes, names, strict=True):
        *curves, mark = axes.get_lines()
        for curve, runs in zip(curves, table.values(), strict=True):
            assert list(curve.get_xdata()) == [10, 20, 40]
            assert list(curve.get_ydata()) == [getattr(run, name) for run in runs]
        assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([20], [getattr(table[2.5][1], name)])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "20", "40"]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    monkeypatch.undo()
    pyplot.close(figure)
