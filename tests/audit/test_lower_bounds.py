"""The audit's bounds against linear programs, SciPy's exact intervals, closed forms and simulated audits of known ε."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq, linprog
from scipy.sparse import lil_array
from scipy.special import expit
from scipy.stats import binom, binomtest, norm

from doppler_hf.audit.lower_bounds import _p_value, clopper_pearson_epsilon, one_run_epsilon
from tests.support.refusals import refused
from tests.support.tiers import combined, thorough

BOUNDS = [one_run_epsilon, clopper_pearson_epsilon]


def coins(rng, canaries):
    return rng.random(canaries) < 0.5


def randomized_response(rng, included, epsilon):
    """The coin, or its opposite with probability 1 / (1 + e^ε), and below the point a number that means nothing."""
    told = np.where(rng.random(len(included)) < expit(epsilon), included, ~included)
    return told + rng.random(len(included))


def gaussian_epsilon(mu, delta):
    """Balle and Wang 2018, Theorem 8, solved for ε."""

    def spent(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))

    return brentq(lambda epsilon: spent(epsilon) - delta, 0.0, 50.0)


def most_probable(canaries, guesses, right, epsilon, delta):
    """The largest P[right guesses or more] of any mechanism from coins to guesses, by a linear program over all of them.

    The unknowns are P[guesses | coins], and for each two neighbours and each outcome how far the first exceeds e^ε times
    the second.
    """
    inputs = list(itertools.product([False, True], repeat=canaries))
    outputs = [
        (who, what)
        for who in itertools.combinations(range(canaries), guesses)
        for what in itertools.product([False, True], repeat=guesses)
    ]
    neighbours = [
        (a, b)
        for a, b in itertools.permutations(range(len(inputs)), 2)
        if sum(x != y for x, y in zip(inputs[a], inputs[b], strict=True)) == 1
    ]
    probabilities = len(inputs) * len(outputs)
    excesses = len(neighbours) * len(outputs)
    limits = lil_array((excesses + len(neighbours), probabilities + excesses))
    totals = lil_array((len(inputs), probabilities + excesses))
    gain = np.zeros(probabilities + excesses)
    for pair, (a, b) in enumerate(neighbours):
        for output in range(len(outputs)):
            row = pair * len(outputs) + output
            limits[row, a * len(outputs) + output] = 1
            limits[row, b * len(outputs) + output] = -math.exp(epsilon)
            limits[row, probabilities + row] = -1
            limits[excesses + pair, probabilities + row] = 1
    for i, coin in enumerate(inputs):
        totals[i, i * len(outputs) : (i + 1) * len(outputs)] = 1
        for output, (who, what) in enumerate(outputs):
            correct = sum(coin[canary] == guess for canary, guess in zip(who, what, strict=True))
            gain[i * len(outputs) + output] = (correct >= right) / len(inputs)
    solved = linprog(
        -gain,
        A_ub=limits.tocsr(),
        b_ub=np.concatenate([np.zeros(excesses), np.full(len(neighbours), delta)]),
        A_eq=totals.tocsr(),
        b_eq=np.ones(len(inputs)),
        method="highs",
    )
    assert solved.success
    return -solved.fun


@pytest.mark.parametrize(("canaries", "guesses"), [(1, 1), (2, 1), (2, 2), *thorough((3, 1), (3, 2), (3, 3)), (4, 2)])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.0, 0.01), (1.0, 0.02), (0.5, 0.1), (2.0, 0.05)])
def test_p_value_is_the_largest_of_any_private_mechanism(canaries, guesses, epsilon, delta):
    for right in range(1, guesses + 1):
        largest = most_probable(canaries, guesses, right, epsilon, delta)
        ours = min(1.0, _p_value(guesses, right, canaries, epsilon=epsilon, delta=delta))
        assert ours == pytest.approx(largest, rel=1e-7, abs=1e-9)


def leaky(rng, included, epsilon, delta):
    """Randomized response that tells the truth, and says that it does, with probability δ: (ε, δ)-DP exactly."""
    scores = randomized_response(rng, included, epsilon)
    return np.where(rng.random(len(included)) < delta, np.where(included, 10.0, -10.0), scores)


AUDITS = 1000


def overshoots(bound, mechanism, *, canaries, delta, truth):
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(AUDITS):
        included = coins(rng, canaries)
        count += bound(mechanism(rng, included), included, delta=delta) > truth
    return count


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("canaries", [40, *thorough(500)])
def test_randomized_response_is_not_overestimated(bound, canaries):
    # All cuts of these scores are as good as each other, so that choosing one after the fact would show.
    # False alarm 1e-6: more than the allowed share of overshoots if each audit had one with probability 0.05.
    count = overshoots(
        bound, lambda rng, included: randomized_response(rng, included, 1.0), canaries=canaries, delta=0.0, truth=1.0
    )
    assert count <= binom.isf(1e-6, AUDITS, 0.05)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.03), *thorough((1.0, 0.05))])
def test_failures_of_probability_delta_are_not_taken_for_epsilon(bound, epsilon, delta):
    # Among the 500 scores some 15 or 25 are certain, and they are the highest and the lowest. False alarm 1e-6.
    count = overshoots(
        bound, lambda rng, included: leaky(rng, included, epsilon, delta), canaries=500, delta=delta, truth=epsilon
    )
    assert count <= binom.isf(1e-6, AUDITS, 0.05)


@pytest.mark.parametrize(("mu", "least"), [(1.0, 1.8), (2.0, 3.5)])
def test_gaussian_mechanism_is_detected(mu, least):
    # Without any limit on canaries, ε(1e-5) is 4.4 and 9.5. Means of 20 bounds with standard deviations below 0.1 each.
    rng = np.random.default_rng(0)
    for bound in BOUNDS:
        found = []
        for _ in range(20):
            included = coins(rng, 10_000)
            found.append(bound(rng.normal(size=10_000) + mu * included, included, delta=1e-5))
        assert least <= np.mean(found) <= gaussian_epsilon(mu, 1e-5)


def intervals(inside, outside, delta, error):
    """The bound by SciPy's exact intervals, threshold by threshold; scores without ties."""
    largest = 0.0
    for rank in (1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 18, 23, 28, 36, 44):
        if rank > (len(outside) + 1) // 2:
            break
        threshold = np.sort(outside)[-rank]
        true = binomtest(int(np.sum(inside > threshold)), len(inside)).proportion_ci(1 - 2 * error, method="exact")
        false = binomtest(int(np.sum(outside > threshold)), len(outside)).proportion_ci(1 - 2 * error, method="exact")
        if true.low > delta:
            largest = max(largest, math.log((true.low - delta) / false.high))
    return largest


@pytest.mark.parametrize(("negatives", "delta", "mu"), combined([False, True], [0.0, 0.05], [0.0, 1.0, 3.0, 20.0]))
def test_clopper_pearson_agrees_with_scipys_exact_intervals(mu, delta, negatives):
    # 90 and 80 trials have 15 and 14 ranks up to the median, so 2 · (15 + 14) bounds share the error. A third of the group
    # that the thresholds do not come from is shifted, so that one direction is better than the other.
    rng = np.random.default_rng(1)
    shifted = rng.normal(size=80) + mu * (np.arange(80) % 3 > 0)
    still = rng.normal(size=90)
    scores, included = np.concatenate([shifted, still]), np.arange(170) < 80
    error = 0.05 / (2 * (15 + 14))
    expected = max(intervals(shifted, still, delta, error), intervals(-still, -shifted, delta, error))
    if negatives:
        scores, included = -scores, ~included
    assert clopper_pearson_epsilon(scores, included, delta=delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
def test_scores_that_say_nothing_show_nothing(bound):
    included = np.arange(1000) < 500
    assert bound(np.zeros(1000), included, delta=0.0) == 0.0
    assert bound(-included.astype(float), included, delta=0.0) == 0.0


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (dict(scores=np.array([0.0, 1.0, np.nan, 2.0])), "not-finite"),
        (dict(scores=np.zeros(3)), "other-lengths"),
        (dict(included=np.ones(4, bool)), "one-sided-coins"),
        (dict(included=np.array([0, 1, 1, 0])), "not-booleans"),
        (dict(delta=1.0), "out-of-range"),
        (dict(confidence=1.0), "out-of-range"),
    ],
)
def test_bad_input(bound, change, code):
    good = dict(scores=np.arange(4.0), included=np.array([True, False, True, False]), delta=0.0)
    bound(**good)
    with refused(code):
        bound(**good | change)
