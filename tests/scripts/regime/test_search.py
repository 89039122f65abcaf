"""The search finds the best rate with both its neighbours tried, whatever the seed's luck, and the table's order is kept."""

import dataclasses
import math

import pytest


@pytest.fixture
def results(tmp_path):
    from scripts.regime.results import Results

    return Results(tmp_path / "results.jsonl")


def made_up(cell, *, best):
    """A result whose accuracy is highest at one rate, and 2 points less at each factor of two from it."""
    score = 0.6 - 0.02 * abs(math.log2(cell.learning_rate * cell.clip_norm / best))
    return dataclasses.asdict(cell) | {"held_out": score, "curve": [score] * 10, "seconds": 1.0}


@pytest.mark.parametrize("peak", range(-6, 9))
@pytest.mark.parametrize("first", [-2, 0, 3])
def test_a_climb_ends_at_the_best_with_both_sides_tried(first, peak):
    from scripts.regime.search import next_place

    scores = {}
    while (place := next_place(scores, first=first)) is not None:
        assert place not in scores
        scores[place] = -abs(place - peak)
    assert {peak - 1, peak, peak + 1} <= scores.keys()
    assert len(scores) <= abs(first - peak) + 3


def test_a_climb_without_any_difference_ends():
    from scripts.regime.search import next_place

    scores = {}
    while (place := next_place(scores, first=0)) is not None:
        scores[place] = 0.1
    assert sorted(scores) == [-1, 0, 1]


def test_the_best_rate_of_a_line_is_found_beyond_the_papers_grid(results):
    from scripts.regime.search import Line, Search

    search = Search(Line("cifar10", "DPSGD"), results, clip_norm=1.0)
    while (place := search.next_place()) is not None:
        assert search.best is None
        results.add(search.cell(place), lambda cell: made_up(cell, best=6.4))
    assert search.cell(search.best).learning_rate == 6.4


def test_a_line_begins_at_the_best_rate_of_the_one_that_it_comes_after(results):
    from scripts.regime.search import Line, Search

    search = Search(Line("cifar10", "DPSGD"), results, clip_norm=1.0)
    while (place := search.next_place()) is not None:
        results.add(search.cell(place), lambda cell: made_up(cell, best=3.2))
    other = Search(Line("cifar10", "DPSGD with momentum", after="DPSGD"), results, clip_norm=1.0)
    assert other.cell(other.next_place()).learning_rate == 3.2
    with_cosine = Line("cifar10", "DPSGD", (("schedule", "cosine"),))
    assert Search(with_cosine, results, clip_norm=1.0).next_place() == search.best


def test_the_clip_norm_is_chosen_at_one_product_of_rate_and_norm(results):
    from scripts.regime.search import CLIP_NORMS, SGD_LINES, best_clip_norm, lines_of, next_cell, search_of

    def scored(cell):
        return made_up(cell, best=1.6) | {
            "held_out": 0.5 + 0.01 * (cell.clip_norm == 0.25) - abs(cell.learning_rate * cell.clip_norm - 1.6)
        }

    groups = lines_of("cifar10")
    while best_clip_norm("cifar10", results) is None:
        cell, _ = next_cell("cifar10", groups, results)
        assert cell.method == SGD_LINES[0], "with another C the others would be searched again"
        results.add(cell, scored)
    tried = {cell.clip_norm for cell in results}
    assert tried == {*CLIP_NORMS}
    assert best_clip_norm("cifar10", results) == 0.25
    assert best_clip_norm("cifar10", results, clipping="automatic") == 1.0
    assert search_of(groups[0][1], results).cell(0).clip_norm == 0.25


def test_no_cell_is_trained_twice_and_a_groups_rates_come_before_its_reports(results):
    from scripts.regime.search import SGD_LINES, TUNING_SEED, lines_of, next_cell

    groups = lines_of("mnist")[:2]
    order = []
    while (found := next_cell("mnist", groups, results)) is not None:
        cell, _ = found
        assert results.get(cell) is None
        results.add(cell, lambda cell: made_up(cell, best=1.6 if cell.method in SGD_LINES else 1e-3))
        order.append(cell)
    first = [cell for cell in order if cell.method in SGD_LINES and cell.epsilon is not None]
    chosen = [cell.seed == TUNING_SEED for cell in first]
    assert chosen == sorted(chosen, reverse=True)
    # DPSGD, momentum and the filter, and the same for Adam, by three seeds each; and one run without noise.
    assert sum(cell.tests_once for cell in order) == 6 * 3
    assert sum(cell.epsilon is None for cell in order) == 1
    assert all(cell.seed != TUNING_SEED for cell in order if cell.tests_once)


def test_the_papers_own_rates_are_tried_too(results):
    from scripts.regime.search import SGD_LINES, lines_of, next_cell

    groups = [*lines_of("mnist")[:2], []]
    while (found := next_cell("mnist", groups, results)) is not None:
        results.add(found[0], lambda cell: made_up(cell, best=6.4 if cell.method in SGD_LINES else 1e-3))
    for method in SGD_LINES[:2]:
        tried = {cell.learning_rate * cell.clip_norm for cell in results if cell.method == method}
        assert {0.1, 0.4, 0.8, 3.2, 6.4, 12.8} <= tried


def test_only_a_rate_above_a_better_one_at_a_constant_rate_may_be_stopped(results):
    from scripts.regime.search import Line, Search

    search = Search(Line("cifar10", "DPSGD"), results, clip_norm=1.0)
    results.add(search.cell(0), lambda cell: made_up(cell, best=0.8))
    assert search.hopeless(1) is not None
    assert search.hopeless(-1) is None
    falling = Search(Line("cifar10", "DPSGD", (("schedule", "cosine"),)), results, clip_norm=1.0)
    results.add(falling.cell(0), lambda cell: made_up(cell, best=0.8))
    assert falling.hopeless(1) is None


def test_a_run_is_hopeless_from_two_fifths_on_and_five_points_behind():
    from scripts.regime.cells import HopelessRun

    rule = HopelessRun(tuple(0.1 * point for point in range(1, 11)))
    assert not rule.is_behind([0.0, 0.0, 0.0])
    assert rule.is_behind([0.1, 0.2, 0.3, 0.34])
    assert not rule.is_behind([0.0, 0.0, 0.0, 0.36])
    assert not rule.is_behind([0.0] * 10)


def test_the_lines_of_a_task_differ():
    from scripts.regime.search import lines_of

    lines = [dataclasses.replace(line, after=None) for group in lines_of("cifar10") for line in group]
    assert len({line.cell(0.1, clip_norm=1.0) for line in lines}) == len(lines)
