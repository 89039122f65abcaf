"""Which runs go on with a plan, and which begin another one, whose ε adds up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_hf.cli.verify import epsilon_mismatches
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Releases, get_total_epsilon
from doppler_hf.privacy.ledger.record import LedgerRecord
from tests.support.ledgers import after, rehashed, statement, without_epsilon_of_begun_runs
from tests.support.refusals import refused

# A round of 20 steps, of which 30 are planned.
TERMS = dict(steps_planned=30)
TARGET = dict(target_epsilon=8.0, **TERMS)
BANDED = dict(noise_shape="banded:bands=2", **TERMS)
POISSON = dict(sampling="poisson", **TERMS)


def closed(ledger, steps):
    after(ledger, steps).close()
    return ledger


def opened(terms, steps, *, clean=True):
    ledger = PrivacyLedger.open(statement(**terms))
    return closed(ledger, steps) if clean else after(ledger, steps)


def resumed(ledger, terms, from_step, steps=0, *, keeps_rounds=False, clean=True):
    ledger = ledger.resume(statement(**terms), from_step=from_step, continues_rounds=keeps_rounds)
    return closed(ledger, steps) if clean else after(ledger, steps)


def lengths(ledger):
    """The steps of each plan to its end, by rounds."""
    return [[each.steps for each in plan] for plan in ledger.plans]


# --- after a clean end ----------------------------------------------------------------------------------------------------


def test_a_finished_run_that_is_trained_again_from_a_checkpoint_begins_a_new_plan_each_time():
    ledger = opened(TERMS, 30)
    for times in range(1, 4):
        ledger = resumed(ledger, TERMS, 15, 15)
        assert lengths(ledger) == [[30]] + [[15]] * times
        costs = [get_total_epsilon([Releases(1.0, 0.05, each)], delta=1e-5 / (1 + times)) for each in [30] + [15] * times]
        assert ledger.epsilon() == pytest.approx(sum(costs), rel=1e-12)
    assert [entry["continues_plan"] for entry in ledger.entries if entry["event"] == "resumed"] == [False] * 3
    assert epsilon_mismatches(ledger) == []


@pytest.mark.parametrize("keeps_rounds", [True, False])
@pytest.mark.parametrize("terms", [TERMS, TARGET, POISSON])
@pytest.mark.parametrize("stopped_at", [20, 12])
def test_a_run_that_was_stopped_early_goes_on_where_it_was_left_if_its_rounds_do(terms, stopped_at, keeps_rounds):
    """At 20 its round is over, and a step of Poisson sampling is a round of its own, so that any new one will do."""
    if terms is POISSON and keeps_rounds:
        return
    ledger = opened(terms, stopped_at)
    stated, is_the_same = ledger.epsilon(), keeps_rounds or stopped_at == 20 or terms is POISSON
    left = ledger.steps_allowed_to(statement(**terms), from_step=stopped_at, keeps_rounds=keeps_rounds)
    assert left == (30 - stopped_at if is_the_same else None)
    if not is_the_same:
        keeps_rounds = False
    ledger = resumed(ledger, terms, stopped_at, 30 - stopped_at, keeps_rounds=keeps_rounds)
    if is_the_same:
        assert sum(map(sum, lengths(ledger))) == 30
        assert ledger.epsilon() == pytest.approx(stated, rel=1e-9)
    else:
        assert lengths(ledger) == [[30], [30 - stopped_at]]
        assert ledger.epsilon() > 1.2 * stated
    assert epsilon_mismatches(ledger) == []


def test_groups_stay_over_rounds_so_that_new_ones_are_another_plan():
    for stopped_at in (20, 12):
        ledger = opened(BANDED, stopped_at)
        terms = statement(**BANDED)
        assert ledger.steps_allowed_to(terms, from_step=stopped_at, keeps_rounds=True) == 30 - stopped_at
        assert ledger.steps_allowed_to(terms, from_step=stopped_at, keeps_rounds=False) is None


def test_without_a_target_a_step_that_is_made_again_after_a_clean_end_begins_a_new_plan():
    ledger = opened(TERMS, 12)
    assert ledger.steps_allowed_to(statement(**TERMS), from_step=11, keeps_rounds=True) is None
    with refused("impossible-entry"):
        ledger.resume(statement(**TERMS), from_step=11, continues_rounds=True)
    assert lengths(resumed(ledger, TERMS, 11, 19)) == [[30], [19]]


def test_with_a_target_steps_that_are_made_again_are_missing_at_the_end_of_the_plan():
    ledger = opened(TARGET, 12)
    stated = ledger.epsilon()
    terms = statement(**TARGET)
    for from_step in (12, 5, 0):
        assert ledger.steps_allowed_to(terms, from_step=from_step, keeps_rounds=True) == 18
    again = resumed(ledger, TARGET, 5, 6, keeps_rounds=True)
    assert again.steps_allowed_to(terms, from_step=11, keeps_rounds=True) == 12
    assert again.steps_allowed_to(terms, from_step=5, keeps_rounds=True) == 12
    again = resumed(again, TARGET, 5, 12, keeps_rounds=True)
    assert again.steps_allowed_to(terms, from_step=17, keeps_rounds=True) == 0
    assert (again.steps_run, lengths(again), again.epsilon()) == (30, [[30]], stated)
    assert epsilon_mismatches(again) == []


def test_another_target_or_length_begins_a_new_plan_whatever_the_noise():
    for terms, other in ((TARGET, TARGET | dict(target_epsilon=9.0)), (TARGET, TERMS), (TERMS, dict(steps_planned=31))):
        for clean in (True, False):
            ledger = opened(terms, 12, clean=clean)
            assert ledger.steps_allowed_to(statement(**other), from_step=12, keeps_rounds=True) is None
            assert len(lengths(resumed(ledger, other, 12, 1))) == 2


# --- after a crash --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [TERMS, TARGET])
def test_steps_that_a_crash_has_lost_lengthen_the_plan(terms):
    ledger = opened(terms, 12, clean=False)
    ledger = resumed(ledger, terms, 10, 20, keeps_rounds=True)
    assert lengths(ledger) == [[32]]
    assert ledger.steps_run == 32


def test_a_clean_end_is_remembered_whatever_is_interrupted_after_it():
    """Else whoever resumes, presses Ctrl-C and resumes again could make all steps once more."""
    terms = statement(**TERMS)
    nothing = resumed(opened(TERMS, 30), TERMS, 30, 0, keeps_rounds=True, clean=False)
    some = resumed(opened(TERMS, 12), TERMS, 12, 3, keeps_rounds=True, clean=False)
    for ledger, at in ((nothing, 29), (some, 11)):
        assert ledger.steps_allowed_to(terms, from_step=at, keeps_rounds=True) is None
    assert some.steps_allowed_to(terms, from_step=12, keeps_rounds=True) == 18
    # Nor does a run without a step make chance of what had cut a round.
    nothing = resumed(opened(TERMS, 12), TERMS, 12, 0, keeps_rounds=True, clean=False)
    assert nothing.steps_allowed_to(terms, from_step=12, keeps_rounds=True) == 18
    assert nothing.steps_allowed_to(terms, from_step=12, keeps_rounds=False) is None
    assert some.steps_allowed_to(terms, from_step=14, keeps_rounds=True) == 16
    # But who looks at the results of one that found nothing left to do has chosen to make steps again.
    failed = resumed(opened(TERMS, 30, clean=False), TERMS, 30, 0)
    assert failed.steps_allowed_to(terms, from_step=15, keeps_rounds=False) is None
    # And so has who takes an earlier checkpoint than the latest.
    saved = after(PrivacyLedger.open(statement(**TERMS)), 20)
    saved.checkpoint(20)
    # Its files may have been cut off, unless the training went on.
    assert saved.as_written().steps_allowed_to(terms, from_step=10, keeps_rounds=True) == 20
    after(saved, 5)
    assert saved.as_written().steps_allowed_to(terms, from_step=20, keeps_rounds=True) == 10
    assert saved.as_written().steps_allowed_to(terms, from_step=10, keeps_rounds=True) is None
    # The same for a plan that began at a checkpoint.
    again = resumed(opened(TERMS, 30), TERMS, 15, 3, clean=False)
    assert again.steps_allowed_to(terms, from_step=14, keeps_rounds=True) is None
    assert again.steps_allowed_to(terms, from_step=15, keeps_rounds=True) == 15
    # With a target steps before the clean end come off the plan's own.
    target = resumed(opened(TARGET, 12), TARGET, 12, 3, keeps_rounds=True, clean=False)
    assert target.steps_allowed_to(statement(**TARGET), from_step=5, keeps_rounds=True) == 18


LAUNCHES = st.lists(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=7
)  # where it resumes, how many steps it makes, whether it ends cleanly, whether its rounds go on


@pytest.mark.parametrize("terms", [TERMS, TARGET])
@settings(max_examples=40, deadline=None)
@given(launches=LAUNCHES)
def test_a_plan_is_never_longer_than_planned_but_for_what_crashes_have_lost(terms, launches):
    terms = terms | dict(private=False)
    ledger, at, lost, made, planned, crashed = PrivacyLedger.open(statement(**terms)), 0, 0, 0, 30, False
    for number, (where, how_many, clean, keeps_rounds) in enumerate(launches):
        if number:
            from_step = int(where * at)
            allowed = ledger.steps_allowed_to(statement(**terms), from_step=from_step, keeps_rounds=keeps_rounds)
            ledger = ledger.resume(
                statement(**terms), from_step=from_step, continues_rounds=keeps_rounds and allowed is not None
            )
            lost += max(0, at - from_step) if crashed else 0
            if len(ledger._record.plans[-1]) == 1:
                lost, made, planned = 0, 0, 30 - from_step
            at = from_step
        steps = min(int(how_many * 30), ledger.runs[-1].steps_allowed, 30 - at)
        after(ledger, steps)
        made, at, crashed = made + steps, at + steps, not clean
        if clean:
            ledger.close()
        assert made <= planned + lost
        assert sum(map(sum, lengths(ledger))) >= ledger.steps_run


# --- what the statement is worth ------------------------------------------------------------------------------------------


def losses_of_rounds(rng, count, steps, rate, sigma=1.0):
    """Privacy losses of so many first steps of a round, by a turn that is drawn in secret: shape (count, steps)."""
    noise = rng.standard_normal((count, steps)) * sigma
    turn = np.floor(rng.random(count) / rate).astype(int)
    members = np.flatnonzero(turn < steps)
    noise[members, turn[members]] += 1.0
    ratios = np.exp(noise / sigma**2 - 1 / (2 * sigma**2))
    made = np.arange(1, steps + 1)
    return np.log(1 - made * rate + rate * np.cumsum(ratios, axis=1))


def test_results_that_choose_where_a_plan_ends_find_no_more_than_is_stated():
    """An attacker who stops as soon as the loss is large, and goes on otherwise, against the δ that is stated."""
    q, delta = 5 / 60, 60**-1.1
    rng = np.random.default_rng(0)
    terms = dict(num_units=60, expected_batch_size=5, sample_rate=q, target_delta=delta, steps_planned=10)
    ledger = opened(terms, 5)
    stated = ledger.epsilon()
    assert resumed(ledger, terms, 5, 5, keeps_rounds=True).epsilon() == pytest.approx(stated)
    loss = losses_of_rounds(rng, 400_000, 10, q)
    stops = np.argmax(np.column_stack([loss > stated + 0.05, np.ones(len(loss), bool)]), axis=1).clip(max=9)
    found = np.maximum(0, -np.expm1(stated - loss[np.arange(len(loss)), stops])).mean()
    assert 0.5 * delta < found < delta
    # Ten steps that are made again, as one plan of 15, were worth less than that: 1.2 times δ was to be found.
    once, again = loss[:, -1], losses_of_rounds(rng, 400_000, 5, q)[:, -1]
    one_plan = [get_total_epsilon([Releases(1.0, q, 10), *rest], delta=delta) for rest in ([], [Releases(1.0, q, 5)])]
    ledger = resumed(opened(terms, 10), terms, 5, 5)
    two_plans = [stated, ledger.epsilon()]
    worth = [found_by_choice(once, again, epsilons) for epsilons in (one_plan, two_plans)]
    assert worth[1] < 1.05 * delta < 1.15 * delta < worth[0]


def found_by_choice(once, again, epsilons, *, margin=0.1):
    """δ of who keeps the first result if its loss is large, and else trains again."""
    is_kept = once > epsilons[0] + margin
    first = np.maximum(0, -np.expm1(epsilons[0] - once[is_kept])).sum()
    both = (once + again)[~is_kept]
    return (first + np.maximum(0, -np.expm1(epsilons[1] - both)).sum()) / len(once)


# --- entries of version 0.3.0 ---------------------------------------------------------------------------------------------


def as_written_before(ledger):
    """The entries of format 10, which do not say whether a run goes on with a plan, nor what a run that begins costs."""
    entries = without_epsilon_of_begun_runs(ledger.entries)
    entries = [{name: value for name, value in entry.items() if name != "continues_plan"} for entry in entries]
    return PrivacyLedger(LedgerRecord(rehashed(entries)))


def test_entries_of_the_version_before_are_held_to_its_rule_and_cost_what_they_cost_today():
    ledger = resumed(opened(TERMS, 30), TERMS, 15, 15)
    before = as_written_before(ledger)
    assert lengths(before) == lengths(ledger)
    assert before.epsilon() == ledger.epsilon()
    assert len(epsilon_mismatches(before)) == 1  # what is stated today is more than what was stated then
    entries = [dict(entry) for entry in before.entries]
    then = get_total_epsilon([Releases(1.0, 0.05, 30), Releases(1.0, 0.05, 15)], delta=1e-5)
    entries[-1]["planned_epsilon"] = then
    before = PrivacyLedger(LedgerRecord(rehashed(entries)))
    assert epsilon_mismatches(before) == []
    assert before.stated_epsilon == then < 0.9 * before.epsilon()
    # What is trained with it from now on states what all of it costs.
    again = resumed(before, TERMS, 15, 15)
    assert lengths(again) == [[30], [15], [15]]
    assert again.stated_epsilon == again.epsilon()
    assert epsilon_mismatches(again) == []


def test_a_run_that_says_it_goes_on_where_it_does_not_is_refused():
    for ledger in (resumed(opened(TERMS, 30), TERMS, 15, 15), resumed(opened(TERMS, 12, clean=False), TERMS, 10, 20)):
        entries = [dict(entry) for entry in ledger.entries]
        entry = next(entry for entry in entries if entry["event"] == "resumed")
        entry["continues_plan"] = not entry["continues_plan"]
        with refused("impossible-entry", match="'resumed'"):
            LedgerRecord(rehashed(entries))
