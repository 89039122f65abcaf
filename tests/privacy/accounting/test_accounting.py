"""ε of histories of releases, and the rounds that they are made of."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from doppler_hf.privacy.accounting.accounting import (
    Account,
    Releases,
    get_epsilon,
    get_epsilon_of_plans,
    get_total_epsilon,
    joint_noise_multiplier,
    turns_of_round,
    without_partial_round,
)
from doppler_hf.privacy.accounting.attack import trade_off
from doppler_hf.privacy.accounting.composition import Rounds
from tests.support.ledgers import statement
from tests.support.refusals import refused
from tests.support.tiers import thorough

FOUR = (1.0, 0.5, 0.375, 0.3125)


@pytest.mark.parametrize(
    ("releases", "rounds"),
    [
        # about ⌊N/B⌋ turns a round, and what is left at the end
        (Releases(1.0, 0.25, 8), [Rounds(1.0, 0.25, 4, 2)]),
        (Releases(1.0, 0.25, 9), [Rounds(1.0, 0.25, 4, 2), Rounds(1.0, 0.25, 1, 1)]),
        (Releases(1.0, 0.25, 3), [Rounds(1.0, 0.25, 3, 1)]),
        (Releases(1.0, 0.3, 7), [Rounds(1.0, 0.3, 3, 2), Rounds(1.0, 0.3, 1, 1)]),
        # at a high rate each step is a round of its own: Poisson sampling
        (Releases(1.0, 0.6, 5), [Rounds(1.0, 0.6, 1, 5)]),
        (Releases(1.0, 1.0, 5), [Rounds(1.0, 1.0, 1, 5)]),
        # four groups: a turn every fourth step, and of those left the first groups have one more
        (Releases(1.0, 0.05, 40, FOUR), [Rounds(1.0, 0.2, 5, 2)]),
        (Releases(1.0, 0.05, 25, FOUR), [Rounds(1.0, 0.2, 5, 1), Rounds(1.0, 0.2, 1, 1, 0.25)]),
        (Releases(1.0, 0.25, 6, FOUR), [Rounds(1.0, 1.0, 1, 1), Rounds(1.0, 1.0, 0, 1, 0.5)]),
        (Releases(1.0, 0.25, 0), []),
        (Releases(1.0, 0.25, 9, sampling="poisson"), [Rounds(1.0, 0.25, 1, 9)]),
    ],
)
def test_rounds_of_a_number_of_steps(releases, rounds):
    assert list(releases.rounds()) == rounds


@pytest.mark.parametrize(
    ("batch", "units"), [(1, 3), (1000, 67349), (7, 49), (3, 9_999_999), (3, 300_000_030), (333, 999), (500, 999)]
)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_turns_of_a_round_are_those_of_whole_numbers(batch, units, groups):
    assert turns_of_round(batch / units, groups) == max(1, units // (groups * batch))


@pytest.mark.parametrize(
    ("steps", "groups", "left"),
    # Rounds of 48 steps: two groups of eight, or of four, would have a turn more; whole turns; the first round; one group.
    [(50, 8, 48), (50, 4, 48), (56, 8, 56), (103, 8, 96), (7, 8, 7), (48, 8, 48), (53, 1, 53)],
)
def test_steps_in_which_only_some_groups_have_a_turn_are_left_out(steps, groups, left):
    assert without_partial_round(steps, sample_rate=0.02, groups=groups) == left


def test_poisson_sampling_has_no_groups():
    with refused("groups-with-poisson"):
        get_total_epsilon([Releases(1.0, 0.05, 40, FOUR, "poisson")], delta=1e-5)


def test_a_statement_names_its_strategy_its_sampling_and_the_noise_of_gradient_and_loss_together():
    shaped = statement(noise_shape="banded:bands=4")
    assert (shaped.groups, shaped.releases(10)) == (4, Releases(1.0, 0.05, 10, FOUR))
    assert statement().releases(10) == Releases(1.0, 0.05, 10)
    assert statement(sampling="poisson").releases(10) == Releases(1.0, 0.05, 10, sampling="poisson")
    assert "Poisson" in statement(sampling="poisson").mechanism
    with_loss = statement(train_loss="private", per_sample_max_loss=4.0, loss_noise_multiplier=3.0)
    assert with_loss.releases(10) == Releases(joint_noise_multiplier(1.0, 3.0), 0.05, 10)


@pytest.mark.parametrize("strategy", [(1.0,), *thorough((FOUR,))])
def test_epsilon_grows_with_every_turn(strategy):
    found = [get_total_epsilon([Releases(1.1, 0.05, steps, strategy)], delta=1e-5) for steps in range(0, 60, 3)]
    assert found[0] == 0.0
    assert found == sorted(found)
    assert found[-1] > found[3] > 0


def largest_gain(sigmas, rate, epsilon):
    """∫ (P − e^ε Q)₊ over the plane, P = (1 − q) N(0, I) + q N((1/σ₁, 1/σ₂), I), Q = N(0, I): δ of two joint releases."""
    step = 0.02
    axis = np.arange(-8, 14, step)
    base = norm.pdf(axis)[:, None] * norm.pdf(axis)
    shifted = norm.pdf(axis - 1 / sigmas[0])[:, None] * norm.pdf(axis - 1 / sigmas[1])
    return np.maximum((1 - rate) * base + rate * shifted - math.exp(epsilon) * base, 0).sum() * step**2


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("sigmas", [(0.7, 3.0), (2.0, 0.5)])
def test_two_releases_of_one_draw_against_the_plane(sigmas, rate):
    joint = joint_noise_multiplier(*sigmas)
    epsilon = get_epsilon(noise_multiplier=joint, sample_rate=rate, steps=1, delta=1e-3)
    assert largest_gain(sigmas, rate, epsilon) == pytest.approx(1e-3, rel=0.01)
    # Nothing less would do.
    smaller = get_epsilon(noise_multiplier=min(sigmas), sample_rate=rate, steps=1, delta=1e-3)
    assert largest_gain(sigmas, rate, smaller) > 1.2e-3


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_joint_noise_multiplier(sigmas):
    joint = joint_noise_multiplier(*sigmas)
    assert joint == pytest.approx(np.linalg.norm([1 / sigma for sigma in sigmas]) ** -1, rel=1e-12)
    assert joint == pytest.approx(joint_noise_multiplier(*reversed(sigmas), math.inf), rel=1e-12)
    # In full batches the draw is the same in every step, so one joint release is as good as one after the other.
    apart = get_total_epsilon([Releases(sigma, 1.0, 1) for sigma in sigmas], delta=1e-5)
    together = get_epsilon(noise_multiplier=joint, sample_rate=1.0, steps=1, delta=1e-5)
    assert together == pytest.approx(apart, rel=2e-3, abs=1e-4)


def test_no_noise_costs_everything_and_no_step_nothing():
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=1, delta=1e-5) == math.inf
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=0, delta=1e-5) == 0.0


@pytest.mark.parametrize("strategy", [(1.0,), *thorough(((1.0, -0.5),))])
def test_whatever_noise_costs_no_more_than_less_of_it(strategy):
    histories = [[Releases(sigma, 0.01, 1000, strategy)] for sigma in (1e4, 1e6, 1e8, 1e200)]
    for costs in (
        [get_total_epsilon(history, delta=1e-5) for history in histories],
        [trade_off(history).true_positive_rate(0.01) for history in histories],
    ):
        assert costs == sorted(costs, reverse=True)


def test_runs_add_up_and_each_begins_a_round():
    def total(*history):
        return get_total_epsilon(history, delta=1e-5)

    whole = total(Releases(1.0, 0.01, 300))
    assert total(Releases(1.0, 0.01, 100), Releases(1.0, 0.01, 200)) == pytest.approx(whole, rel=1e-3)
    # Stopped within a round: whoever took part in the first half of it may take part again.
    assert total(Releases(1.0, 0.01, 150), Releases(1.0, 0.01, 150)) > whole * 1.001
    assert total(Releases(1.0, 0.01, 300), Releases(2.0, 0.01, 300)) > whole


def test_an_account_states_what_is_planned_or_its_target_but_never_less_than_what_was_counted():
    """A target hides no step that was counted beyond it, as those of a run that was killed."""
    few, many = ([[Releases(1.0, 0.05, steps)]] for steps in (20, 100))
    of_few, of_many = (get_epsilon(noise_multiplier=1.0, sample_rate=0.05, steps=steps, delta=1e-5) for steps in (20, 100))
    between = (of_few + of_many) / 2
    assert Account(many, few, target=None).epsilon(delta=1e-5) == of_many
    assert Account(few, few, target=between).epsilon(delta=1e-5) == of_few
    assert Account(many, few, target=between).epsilon(delta=1e-5) == between
    assert Account(many, many, target=between).epsilon(delta=1e-5) == of_many
    both = [*few, *many]
    assert Account(both, both, target=between).epsilon(delta=1e-5) == get_epsilon_of_plans(both, delta=1e-5) > of_many


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (dict(sample_rate=0.0), "sample_rate .*0"),
        (dict(steps=-1), "^steps .*-1"),
        (dict(noise_multiplier=-0.1), "^noise_multiplier .*-0.1"),
        (dict(delta=1.0), "^delta .*1"),
        (dict(delta=1e-11), "^delta .*1e-11"),
    ],
)
def test_bad_arguments_are_refused(arguments, value):
    with refused("out-of-range", match=value):
        get_epsilon(**(dict(noise_multiplier=1.0, sample_rate=0.1, steps=10, delta=1e-5) | arguments))
