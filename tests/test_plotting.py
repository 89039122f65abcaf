"""The picture is written, and curves that cannot be averaged are refused."""

import pytest

from doppler_hf.plotting import plot_learning_curves

RUNS = [[(1.0, 50.0), (2.0, 70.0)], [(1.0, 55.0), (2.0, 80.0)]]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_is_written_into_a_new_folder(tmp_path, ending):
    path = tmp_path / "new" / f"curve.{ending}"
    plot_learning_curves({"none": RUNS, "momentum": RUNS}, path, ylabel="accuracy (%)", title="a title")
    assert path.stat().st_size > 5000


def test_runs_of_different_lengths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="runs of 'none' must share their epochs"):
        plot_learning_curves({"none": [RUNS[0], RUNS[0][:1]]}, tmp_path / "x.png", ylabel="", title="")
