"""A plan is solved for any of its four numbers: against searches that try every value, and the sampler's own arithmetic."""

import math

import pytest

from doppler_hf.privacy import AllocationSampler
from doppler_hf.privacy.accounting.accounting import Releases, get_epsilon, get_total_epsilon
from doppler_hf.reports import planned_runs as planning
from doppler_hf.reports.planned_runs import PlannedRun, PlanRequest, Target, alternatives
from tests.support.tiers import thorough

RUN = {"num_examples": 1000, "epsilon": 3.0, "noise_multiplier": 1.0, "epochs": 2.0, "batch_size": 100}


def epsilon(num_examples, batch_size, steps, noise_multiplier, *, delta=None):
    return get_epsilon(
        noise_multiplier=noise_multiplier,
        sample_rate=batch_size / num_examples,
        steps=steps,
        delta=num_examples**-1.1 if delta is None else delta,
    )


@pytest.mark.parametrize(("num_examples", "batch_size"), [(1000, 100), (1001, 100), (999, 100), (67349, 1000), (7, 7)])
@pytest.mark.parametrize("epochs", [0.1, 1, 2.5, 3])
def test_steps_are_those_of_transformers(num_examples, batch_size, epochs):
    request = PlanRequest(num_examples=num_examples, batch_size=batch_size, epochs=epochs, noise_multiplier=1.0)
    run = request.solve()
    sampler = AllocationSampler(num_examples=num_examples, expected_batch_size=batch_size)
    # Trainer.set_initial_training_values
    assert run.steps == math.ceil(epochs * sampler.steps_per_epoch)
    assert run.sample_rate == sampler.sample_rate


@pytest.mark.parametrize("epochs", [0.3, 1.0, 2.5, 10.0])
@pytest.mark.parametrize("num_examples", [2, 97, 120])
def test_largest_batch_size_is_that_of_a_search_of_all(num_examples, epochs, monkeypatch):
    def cost(*, noise_multiplier, sample_rate, steps, delta, sampling="allocation"):
        # Like the accountant's it rises with q and T, and it takes no time (Bu et al. 2020, the central limit).
        return sample_rate * math.sqrt(steps * math.expm1(noise_multiplier**-2))

    monkeypatch.setattr(planning, "get_epsilon", cost)
    costs = [
        cost(
            noise_multiplier=1.0,
            sample_rate=batch_size / num_examples,
            steps=math.ceil(epochs * math.ceil(num_examples / batch_size)),
            delta=0.0,
        )
        for batch_size in range(1, num_examples + 1)
    ]
    for target in [*costs, 1.001 * max(costs), *(0.999 * cost for cost in costs)]:
        request = PlanRequest(num_examples=num_examples, noise_multiplier=1.0, epochs=epochs, epsilon=target)
        if target < min(costs):
            with pytest.raises(ValueError, match="even --batch-size 1 costs"):
                request.solve()
        else:
            expected = max(batch_size for batch_size, cost in enumerate(costs, start=1) if cost <= target)
            assert request.solve().expected_batch_size == expected


def test_batch_sizes_end_at_the_whole_data_set():
    run = PlanRequest(num_examples=1000, noise_multiplier=5.0, max_steps=1, epsilon=8).solve()
    assert run.expected_batch_size == 1000


@pytest.mark.parametrize(("batch_size", "target", "least", "most"), [(10, 1.0, 101, 10_000), (400, 2.0, 1, 10)])
def test_longest_run_ends_before_the_step_that_overruns(batch_size, target, least, most):
    """Several epochs with batches of 10, a few steps with batches of 400."""
    run = PlanRequest(num_examples=1000, noise_multiplier=2.0, batch_size=batch_size, epsilon=target).solve()
    assert least <= run.steps <= most
    assert epsilon(1000, batch_size, run.steps, 2.0) <= target < epsilon(1000, batch_size, run.steps + 1, 2.0)


@pytest.mark.parametrize("unknown", ["epsilon", "noise_multiplier", "epochs", "batch_size"])
def test_each_number_is_found_again_from_the_other_three(unknown):
    start = PlanRequest(**{**RUN, "noise_multiplier": None}).solve()
    known = RUN | {"noise_multiplier": start.noise_multiplier}
    request = PlanRequest(**{**known, unknown: None})
    assert request.unknown == unknown
    run = request.solve()
    if unknown in ("epsilon", "noise_multiplier"):
        assert run == start
    else:
        # Calibration leaves at most a thousandth of ε unspent, less than what one more step or example costs here.
        assert (run.steps, run.expected_batch_size) == (start.steps, start.expected_batch_size)
    spent = epsilon(1000, run.expected_batch_size, run.steps, run.noise_multiplier)
    assert 0.999 * 3.0 <= spent <= 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": None, "epochs": None}, "must be set, got without --epsilon and --epochs"),
        ({}, "must be set, got all four"),
        ({"epsilon": None, "max_steps": 10}, r"--epochs and --max-steps may be set, got 2\.0 and 10\."),
        ({"epsilon": None, "num_examples": 1}, "--num-examples must be at least 2, got 1. Give the size"),
        ({"epsilon": None, "batch_size": 1001}, "--batch-size must be at most 1000, got 1001. Lower"),
        ({"epsilon": None, "epochs": math.nan}, "--epochs must be a finite number > 0, got nan"),
        ({"epochs": None, "epsilon": math.inf}, "--epsilon must be a finite number > 0, got inf"),
        ({"epsilon": None, "delta": 1.0}, r"--delta must be positive and less than 1/N = .*, got 1\."),
        ({"epsilon": None, "delta": math.nan}, r"--delta must be positive and .*, got nan"),
    ],
)
def test_requests_without_a_meaning_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PlanRequest(**RUN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": None, "noise_multiplier": 0.1}, "--batch-size 100 one step costs ε = .*Raise --noise-multiplier"),
        ({"batch_size": None, "noise_multiplier": 0.1}, "even --batch-size 1 costs ε = .*Raise --noise-multiplier"),
        (
            {"epochs": None, "noise_multiplier": 1e4, "batch_size": 1},
            "even 4096000 steps cost less than .*Lower --noise-mul",
        ),
    ],
)
def test_targets_out_of_reach_are_refused_with_the_mend(change, message):
    with pytest.raises(ValueError, match=message):
        PlanRequest(**RUN | change).solve()


@pytest.mark.parametrize(("target", "num_examples", "epochs"), [(3.0, 67_349, 3.0), *thorough((0.1, 1000, 20.0))])
def test_alternatives_cost_the_same(target, num_examples, epochs, monkeypatch):
    delta, batch_size = num_examples**-1.1, round(num_examples / 67)
    run = PlannedRun(num_examples, batch_size, math.ceil(epochs * math.ceil(num_examples / batch_size)), 0.7, 1.0)
    for more_epochs, larger_batch in ((1 / 2, 1 / 4), (2, 1 / 2), (4, 4)):
        monkeypatch.setattr(planning, "EPOCH_FACTORS", (more_epochs,))
        monkeypatch.setattr(planning, "BATCH_SIZE_FACTORS", (larger_batch,))
        ((other,),) = alternatives(run, Target(target, delta), epochs=epochs).values()
        spent = get_total_epsilon([Releases(other.noise_multiplier, other.sample_rate, other.steps)], delta=delta)
        assert target * (1 - 4e-3) <= spent <= target  # on a rough grid


@pytest.mark.parametrize(("batch_size", "batch_sizes"), [(1, [1, 2, 4]), (4, [1, 2, 4]), (6, [2, 3, 6]), (8, [2, 4, 8])])
def test_alternatives_stay_within_the_data_set(batch_size, batch_sizes, monkeypatch):
    monkeypatch.setattr(planning, "get_noise_multiplier", lambda **_: 1.0)
    run = PlannedRun(num_examples=8, expected_batch_size=batch_size, steps=9, noise_multiplier=2.0, max_grad_norm=1.0)
    table = alternatives(run, Target(1.0, 1e-5), epochs=run.epochs)
    assert [other.expected_batch_size for other in table[run.epochs]] == batch_sizes
