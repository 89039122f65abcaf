"""Units take one secret turn a round; draws are disjoint over processes, cut, never dropped. False alarms: as stated."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from doppler_hf.privacy.batching import sampling
from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.sampling import AllocationSampler, digest_of_data, example_weight
from tests.support.refusals import refused
from tests.support.tiny import text_data


def draws(sampler, steps):
    """Whole draws, put together from their micro-batches, over as many epochs as it takes."""
    found = []
    while len(found) < steps:
        batches = list(sampler)
        found += [sum(batches[start : start + sampler.pieces], []) for start in range(0, len(batches), sampler.pieces)]
    return found[:steps]


def test_batch_sizes_are_binomial():
    n, b = 200, 20
    sizes = [len(draw) for draw in draws(AllocationSampler(num_examples=n, expected_batch_size=b), 4000)]
    support = np.arange(10, 31)
    expected = 4000 * scipy.stats.binom.pmf(support, n, b / n)
    observed = np.array([sizes.count(size) for size in support])
    rest = 4000 - expected.sum(), 4000 - observed.sum()
    # χ² goodness of fit, one false alarm in a million runs.
    assert scipy.stats.chisquare([*observed, rest[1]], [*expected, rest[0]]).pvalue > 1e-6


def membership(sampler, steps):
    member = np.zeros((steps, sampler.num_units), dtype=bool)
    for step in range(steps):
        member[step, sampler.draw(step)] = True
    return member


@pytest.mark.parametrize(
    ("units", "batch", "turns", "sampling"),
    [
        # All take part in each round; most of them; in rounds of one step, by the rate and by name; all at once.
        (50, 10, 5, "allocation"),
        (53, 10, 5, "allocation"),
        (53, 30, 1, "allocation"),
        (50, 10, 1, "poisson"),
        (53, 30, 1, "poisson"),
        (50, 50, 1, "allocation"),
    ],
)
def test_every_example_has_one_turn_a_round_each_as_likely_and_independent_of_its_neighbour(units, batch, turns, sampling):
    rounds, rate = 4000 // turns, batch / units
    sampler = AllocationSampler(num_examples=units, expected_batch_size=batch, sampling=sampling)
    assert (sampler.turns_of_round, sampler.sample_rate) == (turns, rate)
    member = membership(sampler, rounds * turns).reshape(rounds, turns, units)
    assert member.sum(axis=1).max() <= 1
    # χ² of how often a unit has each turn, or none: one false alarm in a million runs, of all units together.
    expected = rounds * np.array([rate] * turns + [1 - turns * rate])
    observed = np.concatenate([member.sum(axis=0), (~member.any(axis=1)).sum(axis=0)[None]])
    possible = expected > 1e-9
    assert not observed[~possible].any()
    statistic = ((observed - expected[:, None])[possible] ** 2 / expected[possible, None]).sum()
    assert scipy.stats.chi2.sf(statistic, max(1, (possible.sum() - 1) * units)) > 1e-6
    # Turns of neighbours, and of a unit in the next round, are independent.
    spread = np.sqrt(rate**2 * (1 - rate**2) / (member.size / 3))
    assert abs((member[..., :-1] & member[..., 1:]).mean() - rate**2) <= 6 * spread
    assert abs((member[:-1] & member[1:]).mean() - rate**2) <= 6 * spread


@pytest.mark.parametrize("options", [dict(groups=2), dict(sampling="poisson")], ids=str)
def test_a_unit_more_moves_no_other(options):
    few, many = (AllocationSampler(num_examples=n, expected_batch_size=10, seed=1, **options) for n in (100, 101))
    # Their rates differ by a hundredth, so that a word in some hundred falls on the other side of a bound.
    same = (membership(few, 50) == membership(many, 50)[:, :100]).all(axis=0)
    assert same.mean() > 0.8


def test_rounds_begin_at_the_first_step_and_are_drawn_once():
    sampler = AllocationSampler(num_examples=40, expected_batch_size=10, first_step=6)
    drawn = [sampler.draw(step).tolist() for step in range(14)]
    assert drawn[:6] == [[]] * 6
    assert sorted(sum(drawn[6:10], [])) == sorted(sum(drawn[10:], [])) == list(range(40))
    assert sampler.draw(12).tolist() == drawn[12]
    with refused("steps-out-of-order"):
        sampler.draw(9)


@pytest.mark.parametrize("at_once", [1, 7, 34, 35])
@pytest.mark.parametrize("groups", [1, 2])
def test_turns_that_are_drawn_a_few_at_a_time_are_those_of_all_together(groups, at_once, monkeypatch):
    def drawn():
        options = dict(num_examples=103, expected_batch_size=10, groups=groups, rank=1, world_size=3)
        return membership(AllocationSampler(**options, seed=1), 20)

    together = drawn()
    monkeypatch.setattr(sampling, "_AT_ONCE", at_once)
    np.testing.assert_array_equal(drawn(), together)


def test_an_example_is_at_most_once_in_a_draw():
    for draw in draws(AllocationSampler(num_examples=30, expected_batch_size=20, pieces=7), 200):
        assert max(Counter(draw).values(), default=1) == 1


def test_empty_draws_and_micro_batches_are_kept():
    sampler = AllocationSampler(num_examples=100, expected_batch_size=1, pieces=4)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 400  # 100 draws, of which about 37 are empty
    assert any(not any(batches[start : start + 4]) for start in range(0, 400, 4))


def test_processes_draw_from_disjoint_shards_that_cover_everything():
    n, world = 103, 3
    seen = [set(), set(), set()]
    for rank in range(world):
        sampler = AllocationSampler(num_examples=n, expected_batch_size=50, rank=rank, world_size=world)
        assert sampler.sample_rate == 50 / n
        for draw in draws(sampler, 60):  # an example is missed by all 60 draws with probability 1e-17
            seen[rank].update(draw)
    assert seen[0] | seen[1] | seen[2] == set(range(n))
    assert sum(map(len, seen)) == n


def test_steps_per_epoch_are_those_of_a_shuffling_loader():
    sampler = AllocationSampler(num_examples=55_584, expected_batch_size=1024, pieces=32)
    assert sampler.steps_per_epoch == 55
    assert len(sampler) == 55 * 32


def test_two_samplers_draw_differently_and_a_seed_makes_them_equal():
    def first_draw(seed):
        return tuple(AllocationSampler(num_examples=200, expected_batch_size=100, seed=seed).draw(0))

    assert first_draw(None) != first_draw(None)  # equal with probability 1e-40
    assert first_draw(3) == first_draw(3)
    assert first_draw(3) != first_draw(4)


def test_a_draw_is_sorted_by_length_and_holds_the_same_examples():
    lengths = np.random.default_rng(0).integers(1, 100, size=500).tolist()
    options = dict(num_examples=500, expected_batch_size=200, pieces=5, seed=0)
    plain, by_length = AllocationSampler(**options), AllocationSampler(**options, lengths=lengths)
    for left, right in zip(draws(plain, 9), draws(by_length, 9), strict=True):
        assert sorted(left) == sorted(right)
        assert [lengths[index] for index in right] == sorted(lengths[index] for index in left)


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (dict(expected_batch_size=11), "batch-out-of-range", "11 .* 10 "),
        (dict(expected_batch_size=0), "batch-out-of-range", "0"),
        (dict(groups=3), "too-few-units", "3 groups .*5.* 15 .*10"),
        (dict(groups=2, sampling="poisson"), "groups-with-poisson", "2"),
        (dict(rank=2, world_size=2), "out-of-range", "world_size=2; got 2"),
        (dict(lengths=[1, 2]), "other-lengths", "lengths .*10 .*2"),
        (dict(units=[0, 1]), "other-lengths", "units .*10 .*2"),
        (dict(units=[0, 2] * 5), "units-with-gaps", "no record of user 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, code, value):
    with refused(code, match=value):
        AllocationSampler(**(dict(num_examples=10, expected_batch_size=5) | arguments))


def test_users_whose_numbers_have_gaps_are_renumbered_as_advised():
    units = np.array([0, 2] * 5)
    units = np.unique(units, return_inverse=True)[1]
    assert AllocationSampler(num_examples=10, expected_batch_size=1, units=units).num_units == 2


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_a_unit_takes_part_in_the_turns_of_its_group_only(groups):
    sampler = AllocationSampler(num_examples=200, expected_batch_size=20, groups=groups)
    turns = [set() for _ in range(200)]
    for step in range(40 * groups):
        for unit in sampler.draw(step):
            turns[unit].add(step % groups)
    assert max(map(len, turns)) == 1
    assert sum(map(len, turns)) > 190


def test_groups_are_even_and_the_rate_is_that_of_all_steps():
    groups, units, batch = 4, 100_000, 5000
    sampler = AllocationSampler(num_examples=units, expected_batch_size=batch, groups=groups)
    sizes = np.bincount(sampler.group_of(np.arange(units)), minlength=groups)
    assert scipy.stats.chisquare(sizes).pvalue > 1e-6
    for step in range(groups):
        expected = groups * batch / units * sizes[step]
        spread = np.sqrt(expected * (1 - groups * batch / units))
        assert abs(len(sampler.draw(step)) - expected) < 5.5 * spread  # 4e-8 each


def test_a_units_group_is_its_own_coin():
    few, many = (AllocationSampler(num_examples=n, expected_batch_size=10, groups=4, seed=1) for n in (100, 101))
    units = np.arange(100)
    assert np.array_equal(few.group_of(units), many.group_of(units))  # counted off, one unit more in front would move all
    few.take_turns(2)
    assert np.array_equal(few.group_of(units), many.group_of(units) % 2)  # the same coins, of a sampler that is asked anew
    secret = [AllocationSampler(num_examples=100, expected_batch_size=10, groups=4) for _ in range(2)]
    groups = [sampler.group_of(units).tolist() for sampler in secret]
    assert groups[0] != groups[1]  # equal with probability 1e-60
    assert groups[0] == secret[0].group_of(units).tolist()


def test_steps_go_on_from_epoch_to_epoch_though_groups_do_not_divide_them():
    sampler = AllocationSampler(num_examples=100, expected_batch_size=15, pieces=2, groups=4)  # 7 steps an epoch
    steps = [piece.step for _ in range(3) for piece in sampler]
    assert steps == [step for step in range(21) for _ in range(2)]
    sampler.begin_at(25)
    assert next(iter(sampler)).step == 25


def test_units_and_groups_go_together():
    units = np.repeat(np.arange(50), 4)
    sampler = AllocationSampler(num_examples=200, expected_batch_size=10, groups=5, units=units, max_examples_per_unit=3)
    drawn = [sampler.draw(step) for step in range(50)]
    for step, examples in enumerate(drawn):
        assert {*sampler.group_of(units[examples])} <= {step % 5}
        assert set(np.bincount(units[examples])) <= {0, 3}


def test_the_shares_of_a_unit_add_up_to_at_most_one_in_float32():
    """Of some numbers 1/count is rounded up, as of 3 · 2ⁿ: then the unit's contribution would be longer than C."""
    for count in range(1, 3000):
        share = example_weight(count)
        assert share == np.float32(share)
        assert Fraction(share) * count <= 1
        assert Fraction(share) * count > Fraction(999_999, 1_000_000)
    assert any(Fraction(float(np.float32(1.0 / count))) * count > 1 for count in range(1, 3000))


def digest(data, *, units=None):
    sampler = AllocationSampler(num_examples=len(data), expected_batch_size=2, lengths=lengths_of(data), units=units)
    return digest_of_data(data, sampler)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.shuffle(seed=1),
        lambda data: data.select(range(23)),
        lambda data: data.remove_columns("input_ids").shuffle(seed=1),
    ],
    ids=["another order", "one less", "labels alone, in another order"],
)
def test_other_data_have_another_digest(change):
    data = text_data()
    changed = change(data)
    assert digest(changed) != digest(data.select_columns(changed.column_names))
    assert digest(data) == digest(text_data())


def test_other_units_have_another_digest():
    units = np.arange(24) // 2
    assert digest(text_data(), units=units) != digest(text_data(), units=units[::-1].copy())
