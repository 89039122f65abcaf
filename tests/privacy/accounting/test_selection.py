"""The ε of a search: against exact enumeration, simulation, brute force, Google's accountant and composition."""

import functools
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from doppler_hf.privacy.accounting import Releases, get_noise_multiplier, get_total_epsilon
from doppler_hf.privacy.accounting.accounting import merged_rounds
from doppler_hf.privacy.accounting.calibration import noise_multiplier_of_trial
from doppler_hf.privacy.accounting.composition import delta_curve, epsilons_of, gaussian_delta, gaussian_epsilon
from doppler_hf.privacy.accounting.selection import (
    Guarantee,
    NumberOfTrials,
    divide_budget,
    second_epsilon,
    selection_of,
    selection_of_releases,
)
from tests.support.refusals import refused
from tests.support.tiers import further, thorough

LOGARITHMIC, GEOMETRIC, POISSON = 0.0, 1.0, math.inf
SHAPES = [LOGARITHMIC, GEOMETRIC, 0.5, POISSON]
FOUR = (1.0, 0.5, 0.375, 0.3125)


def probabilities(trials):
    """Return P(K = k), k = 0, 1, …, by SciPy."""
    k = np.arange(20_000)
    if trials.shape == LOGARITHMIC:
        return scipy.stats.logser(1 - trials.parameter).pmf(k)
    if trials.shape == POISSON:
        found = scipy.stats.poisson(trials.parameter).pmf(k)
    else:
        found = scipy.stats.nbinom(trials.shape, trials.parameter).pmf(k)
    return np.append(0.0, found[1:] / (1 - found[0]))


@pytest.mark.parametrize("mean", [1.2, 3, 10, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_distribution_is_that_of_scipy(shape, mean):
    trials = NumberOfTrials(mean, shape)
    found = probabilities(trials)
    assert found.sum() == pytest.approx(1)
    assert found @ np.arange(len(found)) == pytest.approx(mean)
    for s in (0.1, 0.5, 0.9, 0.999):
        assert trials.generating(s) == pytest.approx(found @ s ** np.arange(len(found)))
    assert (trials.generating(0.0), trials.generating(1.0)) == (0.0, pytest.approx(1.0))
    at_least = np.cumsum(found[::-1])[::-1]
    for made in (1, 2, 7, 40):
        if at_least[made] > 1e-9:
            assert trials.another_after(made) == pytest.approx(at_least[made + 1] / at_least[made], rel=1e-6)


@pytest.mark.parametrize(("mean", "shape"), [(1.0, 0.0), (0.5, 1.0), (20_000, 0.0), (10, -1.0), (math.nan, 0.0)])
def test_a_distribution_that_is_none_is_refused(mean, shape):
    with refused("out-of-range"):
        _ = NumberOfTrials(mean, shape).parameter


def slope(trials, s):
    """Return f′ up to a factor."""
    return (
        math.exp(trials.parameter * s)
        if trials.shape == POISSON
        else (1 - (1 - trials.parameter) * s) ** (-trials.shape - 1)
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (0.3, 0.02), (1.0, 0.0), (2.0, 0.4), (0.5, 1.0)])
@pytest.mark.parametrize("mean", [3, 30])
@pytest.mark.parametrize("shape", SHAPES)
def test_growth_is_the_largest_ratio_of_slopes(shape, mean, epsilon, delta):
    trials = NumberOfTrials(mean, shape)
    t = np.append(np.linspace(0, 1, 5001), (1 - delta) * math.exp(-epsilon))
    ratios = [slope(trials, 1 - at) / slope(trials, 1 - min(1, math.exp(epsilon) * at + delta)) for at in t]
    found = trials.growth(np.array([epsilon]), np.array([delta]))
    assert found[0] == pytest.approx(math.log(max(ratios)), abs=1e-9)


# --- exact enumeration ---


def profile(p, q, epsilons):
    """Return δ in both directions for each ε: the sum of what exceeds e^ε times the probability with the other data."""
    growth = np.exp(np.asarray(epsilons))[:, None]
    return np.max([np.maximum(one - growth * other, 0).sum(axis=1) for one, other in ((p, q), (q, p))], axis=0)


def epsilon_of(p, q, delta):
    """Return the least ε at δ, up to 60."""
    if profile(p, q, [0.0])[0] <= delta:
        return 0.0
    return scipy.optimize.brentq(lambda epsilon: profile(p, q, [epsilon])[0] - delta, 0.0, 60.0, xtol=1e-12) + 1e-11


def best_of(generating, p):
    """Return the exact distribution of the best of K outcomes, which are in the order of their scores, worst first."""
    below = np.append(0.0, np.cumsum(p))
    return np.diff([generating(min(s, 1.0)) for s in below])


def neighbours(random, size):
    """Return two distributions that differ as those of neighbours, in some random order of scores or in one by ratios."""
    p = random.dirichlet(np.full(size, random.choice([0.3, 1.0, 5.0])))
    q = p * np.exp(random.normal(0, random.choice([0.1, 0.5, 2.0]), size))
    q /= q.sum()
    if random.random() < 0.5:  # The worst orders: the outcomes of small ratio have the best scores, except for some.
        order = np.argsort(q / p)
        order = np.append(order[: (cut := random.integers(size))], order[cut:][::-1])
        order = order[::-1] if random.random() < 0.5 else order
        p, q = p[order], q[order]
    return p, q


def searches(shape, mean, *, seed, number):
    """Yield two neighbours, the exact outcomes of a search on both, and what the theorem says of it."""
    random, trials = np.random.default_rng(seed), NumberOfTrials(mean, shape)
    for _ in range(number):
        p, q = neighbours(random, int(random.integers(2, 9)))
        selection = selection_of(
            trials,
            delta=float(random.choice([1e-3, 1e-2, 0.1])),
            epsilon_at=functools.partial(epsilon_of, p, q),
            deltas_at=functools.partial(profile, p, q),
        )
        yield (p, q), [best_of(trials.generating, each) for each in (p, q)], selection


@pytest.mark.parametrize("mean", [1.5, 4, *thorough(20)])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_finite_search_exceeds_the_bound(shape, mean):
    closest = 0.0
    for _, (kept, without), selection in searches(shape, mean, seed=1, number=60):
        found = profile(kept, without, [selection.epsilon])[0]
        assert found <= selection.delta * (1 + 1e-7)
        closest = max(closest, epsilon_of(kept, without, selection.delta) / max(selection.epsilon, 1e-9))
    assert closest > 0.5  # The cases come near enough to the bound to tell a wrong one.


def log_probability(trials, k):
    """Return ln P(K = k) of a logarithmic or a geometric distribution."""
    gamma = trials.parameter
    weight = -np.log(k) - math.log(-math.log(gamma)) if trials.shape == 0.0 else math.log(gamma / (1.0 - gamma))
    return k * math.log1p(-gamma) + weight


def log_slope(trials, t, *, is_published):
    """Return ln G(1 − t) for each row of t, as in docs/method/accounting.md. Three in ten trials take 8 units, others 1."""
    counts = np.mgrid[:120, :120].reshape(2, -1)  # of the trials that are not published
    counts = counts[:, is_published(np.array([1, 8]) @ counts)]
    others = counts.sum(axis=0)
    weights = log_probability(trials, others + 1) + gammaln(others + 2) - gammaln(counts + 1).sum(axis=0)
    return logsumexp(weights + np.log([0.7, 0.3]) @ counts + np.log1p(-t) @ counts, axis=1)


@pytest.mark.parametrize("shape", [0.0, 1.0])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 0.1), (1.0, 0.01)])
def test_publishing_nothing_after_a_date_does_not_raise_the_growth(shape, epsilon, delta):
    """Publishing only searches that end after it raises the growth, so this test can fail."""
    trials, random = NumberOfTrials(5.0, shape), np.random.default_rng(0)
    before = random.random((100, 2)) ** random.choice([1, 4], size=(100, 1))
    after = np.minimum(1.0 - 1e-12, (math.exp(epsilon) * before + delta) * random.choice([0.5, 1.0], size=(100, 2)))
    growth = trials.growth(np.array([epsilon]), np.array([delta])).item()
    for is_published, holds in (
        (lambda time: time <= 20, True),
        (lambda time: time <= 60, True),
        (lambda time: time > 20, False),
    ):
        slopes = [log_slope(trials, t, is_published=is_published) for t in (before, after)]
        assert ((slopes[0] - slopes[1]).max() <= growth + 1e-9) == holds


def test_every_pair_of_guarantees_gives_a_bound():
    """The theorem, for a fixed first and any second guarantee, not just for the best one."""
    random, trials = np.random.default_rng(3), NumberOfTrials(5, GEOMETRIC)
    for _ in range(100):
        p, q = neighbours(random, 6)
        first, second = random.uniform(0, 2, 2)
        (share,), (delta,) = profile(p, q, [first]), profile(p, q, [second])
        epsilon = first + trials.growth(np.array(second), np.array(delta))
        assert profile(*(best_of(trials.generating, each) for each in (p, q)), [epsilon])[0] <= 5 * share + 1e-12


@pytest.mark.parametrize("what", ["a fixed number of trials", "no growth", "delta not divided"])
def test_the_enumeration_finds_a_wrong_bound(what):
    """The same cases, with one part of the theorem left out, exceed the bound."""
    is_exceeded = False
    for (p, q), (kept, without), selection in searches(GEOMETRIC, 4, seed=1, number=60):
        epsilon, delta = selection.epsilon, selection.delta
        if what == "a fixed number of trials":
            kept, without = (best_of(lambda s: s**4, each) for each in (p, q))
        elif what == "no growth":
            epsilon = selection.first.epsilon
        else:
            delta = selection.first.delta
        is_exceeded |= profile(kept, without, [epsilon])[0] > delta * (1 + 1e-6)
    assert is_exceeded


# --- a Gaussian mechanism ---


def gaussian_selection(trials, *, mu, delta):
    return selection_of(
        trials,
        delta=delta,
        epsilon_at=lambda share: gaussian_epsilon(mu, delta=share),
        deltas_at=functools.partial(gaussian_delta, mu),
    )


def drawn(trials, random, number):
    """Return `number` values of K, drawn as a search does: after each trial, a coin decides whether there is another."""
    another = [trials.another_after(made) for made in range(1, 400)]
    coins = random.random((number, len(another))) >= another
    return np.where(coins.any(axis=1), coins.argmax(axis=1) + 1, len(another) + 1)


OBJECTIVES = {
    "the likelihood ratio": lambda x: x,
    "the likelihood ratio, minimized": lambda x: -x,
    # What the record makes rare comes first, then what it makes likely: nearly the worst objective.
    "both ends": lambda x: np.where(x < -0.8, 2.0, np.where(x > 3.0, 1.0, -1.0)) + 1e-3 * np.tanh(x),
}


@pytest.mark.parametrize("shape", [LOGARITHMIC, GEOMETRIC])
def test_a_simulated_search_of_a_gaussian_mechanism_with_an_adversarial_objective(shape):
    """Trials release x from N(µ, 1) with the record and from N(0, 1) without it, and the objective is a function of x."""
    mu, mean, delta, number = 1.0, 10, 0.03, 20_000
    random, trials = np.random.default_rng(2), NumberOfTrials(mean, shape)
    epsilon = gaussian_selection(trials, mu=mu, delta=delta).epsilon

    def excess(counts, objective):
        """Return the largest excess of an event {best x > a} or {best x ≤ a} over e^ε times its probability."""
        best = []
        for shift in (0.0, mu):
            x = shift + random.standard_normal((number, counts.max()))
            scores = np.where(np.arange(counts.max()) < counts[:, None], OBJECTIVES[objective](x), -np.inf)
            best.append(np.sort(x[np.arange(number), scores.argmax(axis=1)]))
        below = np.array([np.searchsorted(each, np.linspace(-3, 5, 100)) / number for each in best])
        return max((event[one] - math.exp(epsilon) * event[1 - one]).max() for event in (below, 1 - below) for one in (0, 1))

    counts = drawn(trials, random, number)
    assert counts.mean() == pytest.approx(mean, abs=5 * counts.std() / math.sqrt(number))
    assert max(excess(counts, objective) for objective in OBJECTIVES) <= delta + 0.01
    # With a fixed number of trials, the search tells far more.
    assert max(excess(np.full(number, mean), objective) for objective in OBJECTIVES) > delta + 0.05


@pytest.mark.parametrize("shape", [LOGARITHMIC, GEOMETRIC])
@pytest.mark.parametrize("mean", [3, 10, 30])
def test_some_objective_reaches_nearly_the_bound(mean, shape):
    """An objective that prefers what a record makes rare, and then what it makes likely, costs almost ε."""
    trials, delta = NumberOfTrials(mean, shape), 1e-6
    selection = gaussian_selection(trials, mu=0.6, delta=delta)
    first, last = np.linspace(-3, 1, 25)[:, None], np.linspace(1, 7, 600)[None]
    of_slope = np.vectorize(lambda s: slope(trials, s) / slope(trials, 1.0) * mean)

    def attained(epsilon):
        """Return δ: the best scores have x < first, and after these x > last, which is so rare that f′ is constant."""
        kept, without = of_slope(norm.sf(first - 0.6)), of_slope(norm.sf(first))
        return (kept * norm.sf(last - 0.6) - math.exp(epsilon) * without * norm.sf(last)).max()

    assert attained(selection.epsilon) <= delta
    assert attained((0.97 if shape == LOGARITHMIC else 0.94) * selection.epsilon) > delta


RUNS = {
    "a Gaussian mechanism": Releases(2.0, 1.0, 1, sampling="poisson"),
    "a Gaussian mechanism with little noise": Releases(0.4, 1.0, 1, sampling="poisson"),
    "Poisson sampling": Releases(1.0, 0.01, 1000, sampling="poisson"),
    "Poisson sampling in few steps": Releases(0.7, 0.05, 40, sampling="poisson"),
}
# For a hundred trials of a Poisson distribution the bound of Google's accountant is smaller: see docs/method/accounting.md.
CASES = [
    case
    for case in itertools.product(RUNS, [LOGARITHMIC, GEOMETRIC, 0.5, POISSON], [2, 10, 100], [1e-5, 1e-8])
    if case[1:3] != (POISSON, 100)
]


@pytest.mark.parametrize(("run", "shape", "mean", "delta"), further(CASES, quick=CASES[::13]))
def test_never_above_the_renyi_bound_of_google(run, shape, mean, delta):
    releases = RUNS[run]
    event = dp_accounting.PoissonSampledDpEvent(
        releases.sample_rate, dp_accounting.GaussianDpEvent(releases.noise_multiplier)
    )
    event = dp_accounting.SelfComposedDpEvent(event, releases.steps)
    theirs = RdpAccountant().compose(RepeatAndSelectDpEvent(event, mean, shape)).get_epsilon(delta)
    ours = selection_of_releases(releases, NumberOfTrials(mean, shape), delta=delta)
    assert ours.delta == pytest.approx(delta)
    assert ours.epsilon <= theirs


@pytest.mark.parametrize("releases", [Releases(1.0, 0.01, 300), *thorough((Releases(2.0, 0.01, 300, FOUR),))])
@pytest.mark.parametrize("mean", [3, 10])
def test_less_than_the_composition_of_as_many_runs_and_more_than_one_run(releases, mean):
    found = selection_of_releases(releases, NumberOfTrials(mean), delta=1e-6).epsilon
    one, all_of_them = (get_total_epsilon([releases] * runs, delta=1e-6) for runs in (1, mean))
    assert one < found < all_of_them


def test_epsilon_grows_with_the_trials_and_falls_with_delta():
    releases = Releases(1.0, 0.01, 1000)
    found = [
        [
            selection_of_releases(releases, NumberOfTrials(mean), delta=delta, is_rough=True).epsilon
            for mean in (1.5, 3, 10, 100)
        ]
        for delta in (1e-7, 1e-5)
    ]
    assert np.all(np.diff(found, axis=1) > 0)
    assert np.all(np.diff(found, axis=0) < 0)


@pytest.mark.parametrize("mean", [2, *thorough(10, 50)])
@pytest.mark.parametrize("releases", [Releases(1.0, 0.01, 1000), Releases(0.7, 0.05, 40, sampling="poisson")])
def test_at_equal_expectation_the_logarithmic_distribution_costs_least(releases, mean):
    costs = [
        selection_of_releases(releases, NumberOfTrials(mean, shape), delta=1e-6, is_rough=True).epsilon
        for shape in (LOGARITHMIC, GEOMETRIC, POISSON)
    ]
    assert costs == sorted(costs)


# --- calibration ---


@functools.cache
def divided(mean=10, shape=LOGARITHMIC):
    return divide_budget(
        NumberOfTrials(mean, shape), target_epsilon=3.0, target_delta=1e-5,
        single_run=Releases(1.0, 0.02, 150),
    )  # fmt: skip


@pytest.mark.parametrize("mean", [10, *thorough(2, 100)])
def test_a_divided_budget_costs_its_target(mean):
    selection = divided(mean)
    assert selection.epsilon == pytest.approx(3.0, rel=1e-12)
    assert selection.delta == pytest.approx(1e-5, rel=1e-12)
    # It is the best division for such a trial: one more direct computation with its σ gives the same ε.
    sigma = noise_multiplier_of_trial(selection, sample_rate=0.02, steps=150)
    again = selection_of_releases(Releases(sigma, 0.02, 150), selection.trials, delta=1e-5)
    assert again.epsilon == pytest.approx(3.0, rel=5e-3)


@pytest.mark.parametrize(
    "terms",
    [
        dict(sample_rate=0.02, steps=150),
        dict(sample_rate=0.1, steps=400),
        *thorough(
            dict(sample_rate=0.005, steps=50),
            dict(sample_rate=0.02, steps=150, sampling="poisson"),
            dict(sample_rate=0.02, steps=150, strategy=FOUR),
            dict(sample_rate=0.1, steps=60, strategy=FOUR),
        ),
    ],
)
def test_trials_of_other_settings_satisfy_both_guarantees(terms):
    selection = divided()
    sigma = noise_multiplier_of_trial(selection, **terms)
    releases = (
        Releases(sigma, *terms.values()) if "sampling" not in terms else Releases(sigma, 0.02, 150, sampling="poisson")
    )
    first = get_total_epsilon([releases], delta=selection.first.delta)
    second = delta_curve(merged_rounds([releases]), np.array([selection.second.epsilon]))[1][0]
    assert first <= selection.first.epsilon
    assert second_epsilon([releases], selection) <= selection.second.epsilon
    assert second <= selection.second.delta * 1.02  # on another grid
    # One of the two is used up.
    ratios = first / selection.first.epsilon, max(epsilons_of(merged_rounds([releases]), delta=selection.second.delta))
    assert ratios[0] > 0.99 or ratios[1] > 0.99 * selection.second.epsilon
    # The noise is more than that of one run at ε, and less than if each trial had a tenth of it.
    one, tenth = (
        get_noise_multiplier(target_epsilon=epsilon, target_delta=1e-5, rough=True, **terms) for epsilon in (3.0, 0.3)
    )
    assert one < sigma < tenth


def test_a_second_guarantee_that_no_noise_reaches_is_refused():
    terms = dict(sample_rate=0.5, steps=400)
    selection = divided()
    out_of_reach = selection._replace(second=Guarantee(1e-9, 1e-10))
    with refused("trial-out-of-reach", match="Raise target_epsilon or target_delta, or expect fewer trials"):
        noise_multiplier_of_trial(out_of_reach, **terms)
    assert noise_multiplier_of_trial(selection, **terms) > 0


def test_the_second_guarantee_raises_the_noise_where_the_first_would_not():
    """A guarantee for ε alone is not enough: the first one is met with less noise."""
    selection = divided()
    terms = dict(sample_rate=0.5, steps=400)
    first_only = get_noise_multiplier(target_epsilon=selection.first.epsilon, target_delta=selection.first.delta, **terms)
    sigma = noise_multiplier_of_trial(selection, **terms)
    of_first_only, of_sigma = (second_epsilon([Releases(each, *terms.values())], selection) for each in (first_only, sigma))
    assert of_first_only > selection.second.epsilon or sigma == first_only
    assert of_sigma <= selection.second.epsilon
    strict = selection._replace(second=selection.second._replace(epsilon=selection.second.epsilon / 2))
    assert noise_multiplier_of_trial(strict, **terms) > sigma


def test_a_search_that_no_noise_can_pay_is_refused():
    with refused("search-out-of-reach"):
        divide_budget(NumberOfTrials(10), target_epsilon=1e-9, target_delta=1e-9, single_run=Releases(1.0, 1.0, 1))
    with refused("out-of-range"):  # δ/K is too small for the accountant
        divide_budget(NumberOfTrials(100), target_epsilon=3, target_delta=1e-9, single_run=Releases(1.0, 0.1, 10))
