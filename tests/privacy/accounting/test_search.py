"""The two searches against functions whose answer is known, how often they ask, and functions that misbehave."""

import math

import pytest

from doppler_hf.privacy.accounting.search import largest_count, solve_falling

TOLERATED = (-5e-4, 5e-4)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, argument):
        self.calls.append(argument)
        return self.function(argument)


@pytest.mark.parametrize("root", [1e-3, 0.3, 1.0, 7.0, 4e4])
@pytest.mark.parametrize("power", [0.9, 2.0, 5.0])
def test_a_power_is_met_in_few_calls(root, power):
    excess = Counted(lambda x: -power * math.log(x / root))
    assert abs(math.log(solve_falling(excess, start=1.0, tolerated=TOLERATED) / root)) * power <= 5e-4
    assert len(excess.calls) <= (25 if root < 0.01 else 12)


@pytest.mark.parametrize("root", [0.2, 3.0])
def test_a_steep_and_then_flat_function_is_met(root):
    # Like ε at a small sample rate: regula falsi alone would creep up on it from one side.
    excess = Counted(lambda x: math.expm1(8 * (root - x)) if x < root else (root - x) / 10)
    assert -5e-4 <= excess.function(solve_falling(excess, start=1.0, tolerated=TOLERATED)) <= 5e-4
    assert len(excess.calls) <= 35


def test_infinite_values_are_bisected():
    excess = Counted(lambda x: math.inf if x < 0.8 else -math.inf if x > 2.0 else math.log(1.1 / x))
    assert solve_falling(excess, start=100.0, tolerated=TOLERATED) == pytest.approx(1.1, rel=6e-4)


@pytest.mark.parametrize("start", [1.0, 50.0])
def test_a_jump_is_answered_from_its_lower_side(start):
    answer = solve_falling(lambda x: 1.0 if x < 1.7 else -1.0, start=start, tolerated=TOLERATED)
    assert 1.7 <= answer < 1.7 * (1 + 1e-6)


def test_out_of_reach():
    excess = Counted(lambda x: 1.0)
    assert solve_falling(excess, start=1.0, tolerated=TOLERATED) is None
    assert 1e5 < max(excess.calls) <= 1e6


@pytest.mark.parametrize("cost", [math.sqrt, float, lambda n: n**2.0, lambda n: 3 + math.log1p(n), lambda n: n and math.inf])
@pytest.mark.parametrize("at_most", [0, 1, 2, 17, 300])
def test_the_largest_count_against_counting(cost, at_most):
    for budget in (-1.0, 0.0, 1.0, 3.0, 4.1, 17.0, 1e9):
        affordable = [count for count in range(at_most + 1) if cost(count) <= budget]
        assert largest_count(cost, budget=budget, at_most=at_most) == max(affordable, default=0)


@pytest.mark.parametrize("answer", [1, 165, 19_999])
def test_few_counts_are_asked_about(answer):
    cost = Counted(lambda n: 0.1 * math.sqrt(n) + 1e-3 * n)
    assert largest_count(cost, budget=cost.function(answer), at_most=20_000) == answer
    assert len(cost.calls) <= 14


def test_a_step_is_found_by_halves():
    cost = Counted(lambda n: 0.0 if n <= 12_345 else 1e12)
    assert largest_count(cost, budget=1.0, at_most=20_000) == 12_345
    assert len(cost.calls) <= 50


def test_nothing_is_searched_where_nothing_is_left():
    cost = Counted(lambda n: 5.0 + n)
    assert largest_count(cost, budget=4.0, at_most=1000) == 0
    assert len(cost.calls) == 2
