"""The page says how often the theorem predicted the best filter, and what the paper's filter did where it should gain."""

import dataclasses

import pytest

LAGS = 64


def row_of(method, rate, held_out, *, rho=None, average=None, **more):
    """Return the result of a run whose signal has autocorrelation ρ at lag 1, and ρ^τ at lag τ."""
    from scripts.regime.cells import Cell

    row = dataclasses.asdict(Cell("tiny", method, rate, **more)) | {"held_out": held_out, "seconds": 1.0}
    row |= {"held_out_of_average": held_out if average is None else average, "curve": [held_out] * 10}
    if rho is not None:
        row["spectrum_of_signal"] = {"autocorrelation": [rho**lag for lag in range(LAGS)], "of_draws": [0.0]}
    return row


@pytest.fixture
def page(tiny, tmp_path):
    """Return the page of some rows."""
    from scripts.regime.cells import Cell
    from scripts.regime.page import write_page
    from scripts.regime.results import Results

    def written(*rows):
        results = Results(tmp_path / "results.jsonl")
        names = [each.name for each in dataclasses.fields(Cell)]
        for row in rows:
            results.add(Cell(**{name: row[name] for name in names}), lambda cell, row=row: row)
        write_page(results, tmp_path / "page.md")
        return " ".join((tmp_path / "page.md").read_text().split())

    return written


LP = "LP-DPSGD, first-order-v1"


def test_a_prediction_is_right_where_the_filter_that_it_names_is_best(page):
    found = page(
        row_of("DPSGD", 0.4, 0.50, rho=0.9), row_of(LP, 0.4, 0.53, rho=0.9),  # gains as predicted
        row_of("DPSGD", 0.8, 0.60, rho=-0.9), row_of(LP, 0.8, 0.64, rho=-0.9, average=0.59),  # gains against it
        row_of("DPSGD", 1.6, 0.70, rho=-0.9), row_of(LP, 1.6, 0.68, rho=-0.9),  # loses as predicted
        row_of("DPSGD", 3.2, 0.70, rho=0.9),  # was not compared
    )  # fmt: skip
    assert "is the best in 2 of 3 settings by the last weights, and in 3 by their average" in found
    assert "its accuracy at the same rate is +3.0 (+3.0 to +3.0) points" in found
    assert "where it predicts a loss, +1.0 (-2.0 to +4.0) points" in found
    assert "(ρ₁ < 0) in 1 of 1 tasks" in found  # at 1.6, the first of the two best ones


def test_only_runs_that_differ_in_the_filter_alone_are_compared(page):
    found = page(
        row_of("DPSGD", 0.4, 0.50, rho=0.9),
        row_of(LP, 0.4, 0.53, seed=0), row_of(LP, 0.4, 0.53, epsilon=2.0), row_of(LP, 0.8, 0.53),
        row_of(LP, 0.4, 0.53, clip_norm=4.0), row_of("LP-DPAdamBC, first-order-v1", 0.4, 0.53),
    )  # fmt: skip
    assert "| tiny | 1, 0.4 | 0.90 |" in found
    assert "50.0, 50.0 | – | – | – | – |" in found
    assert "settings" not in found.split("## How much there is")[0]


def test_the_table_of_further_means_has_what_was_run(page, monkeypatch):
    from scripts.regime import search

    monkeypatch.setattr(search, "FURTHER_TASKS", ("tiny",))
    cells = search.further_cells("tiny")
    assert len(cells) == 15
    rows = [
        vars(cell) | {"held_out": 0.5, "held_out_of_average": 0.5, "seconds": 1.0, "test": test, "test_of_average": 0.7}
        for cell, test in ((cells[0], 0.60), (cells[1], 0.62), (cells[-1], 0.65))
    ]
    found = page(*rows).split("## What else raises accuracy")[1].split("##")[0]
    assert "| ours, auto, B = 1,000 | 2 | 61.00 ± 1.00 | 70.00 ± 0.00 |" in found
    assert "| ours, auto, B = 1,000, 4 views | 1 | 65.00 | 70.00 |" in found
    assert "Muon" not in found
