"""The ledger adds up what was spent through crashes and restarts, and can be read back only as it was written."""

import dataclasses
import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from doppler_hf.cli.verify import budget_mismatches, epsilon_mismatches
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, PrivacyStatement, get_epsilon, get_noise_multiplier
from doppler_hf.privacy.accounting.accounting import Releases, get_total_epsilon
from doppler_hf.privacy.ledger.file import WriterLock, schema_validator
from doppler_hf.privacy.ledger.ledger import latest, set_aside
from tests.support.ledgers import after, all_events, document_in, rehashed, statement, write
from tests.support.power import Disk
from tests.support.refusals import refused

NOT_PRIVATE = dict(private=False)  # spares the accountant where only steps count


# --- what was spent -------------------------------------------------------------------------------------------------------


def test_epsilon_is_the_accountants():
    ledger = PrivacyLedger.open(statement())
    mechanism = dict(noise_multiplier=1.0, sample_rate=0.05, delta=1e-5)
    assert (ledger.epsilon(), ledger.planned_epsilon) == (0.0, get_epsilon(**mechanism, steps=60))
    assert after(ledger, 40).steps_run == 40
    assert (ledger.history, ledger.plans) == ([Releases(1.0, 0.05, 40)], [[Releases(1.0, 0.05, 60)]])
    # Results may have chosen where it ends.
    assert ledger.epsilon() == get_epsilon(**mechanism, steps=60)
    assert ledger.epsilon_of_fixed_length() == get_epsilon(**mechanism, steps=40)
    ledger.close()
    assert ledger.claims[-1].epsilon == ledger.epsilon()


def test_what_is_not_private_has_no_epsilon(tmp_path):
    ledger = after(PrivacyLedger.open(statement(private=False)), 3)
    ledger.checkpoint(3)
    ledger.close()
    ledger.save(tmp_path)
    assert ledger.epsilon() == math.inf
    stating = [entry for entry in ledger.entries if "planned_epsilon" in entry]
    assert [(entry["event"], entry["planned_epsilon"]) for entry in stating] == [
        ("opened", None), ("checkpoint", None), ("closed", None)
    ]  # fmt: skip
    assert [claim.epsilon for claim in PrivacyLedger.load(tmp_path).claims] == [math.inf] * 3


@pytest.mark.parametrize("terms", [{}, dict(target_epsilon=2.0)])
def test_entries_always_state_the_epsilon_of_all_that_is_planned(tmp_path, terms):
    """Wherever a run is killed, also before its first checkpoint, or after it was resumed for more than before."""

    def stated():
        ledger.save(tmp_path)
        read = PrivacyLedger.load(tmp_path)
        assert epsilon_mismatches(read) == []
        assert read.stated_epsilon == pytest.approx(read.planned_epsilon, rel=1e-12)
        return read.stated_epsilon

    ledger = PrivacyLedger.open(statement(steps_planned=20, **terms))
    first = stated()
    assert after(ledger, 8).stated_epsilon == stated() == first
    ledger.checkpoint(8)
    assert after(ledger, 2).stated_epsilon == stated() == first
    more = {"target_epsilon": 4.0} if terms else {"steps_planned": 40}
    ledger = ledger.resume(statement(**{"steps_planned": 20, **terms, **more}), from_step=8)
    assert stated() == after(ledger, 1).stated_epsilon == stated() > 1.2 * first


def test_what_was_not_private_once_stays_so():
    ledger = after(PrivacyLedger.open(statement(private=False)), 3).resume(statement(), from_step=3)
    after(ledger, 1).close()
    assert ledger.statement.private
    assert not ledger.private
    assert ledger.epsilon() == math.inf
    assert [claim.private for claim in ledger.claims] == [False] * 3


def test_affordable_steps_end_before_the_budget():
    ledger = after(PrivacyLedger.open(statement(target_epsilon=2.0)), 10)
    affordable = ledger.affordable_steps(500)
    costs = [after(ledger, more).epsilon_of_fixed_length() for more in (affordable, 1)]
    assert costs[0] <= 2.0 < costs[1]
    assert PrivacyLedger.open(statement()).affordable_steps(500) == 500
    assert PrivacyLedger.open(statement(target_epsilon=2.0, private=False)).affordable_steps(500) == 500
    assert after(PrivacyLedger.open(statement(target_epsilon=0.5)), 100).affordable_steps(10) == 0


def test_only_a_raw_training_loss_is_not_covered():
    private = dict(train_loss="private", per_sample_max_loss=4.0, loss_noise_multiplier=3.0)
    raw, none, private = (statement(**terms) for terms in (dict(train_loss="raw"), {}, private))
    assert len(raw.not_covered) == len(none.not_covered) + 1
    assert "training loss" in raw.not_covered[0]
    assert none.not_covered == private.not_covered
    # A loss that one run logged is not covered later either.
    assert PrivacyLedger.open(raw).resume(none, from_step=0).not_covered == list(raw.not_covered)


# --- steps are counted before they are computed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("planned", "portion"), [(60, 1), (199, 1), (1000, 10)])
def test_steps_are_reserved_in_portions_of_a_hundredth(planned, portion):
    ledger = PrivacyLedger.open(statement(steps_planned=planned, **NOT_PRIVATE))
    reserved = 0
    for step in range(min(planned, 4 * portion + 1)):
        assert ledger.reserve(at_most=planned - step) == (step % portion == 0)
        reserved += portion * (step % portion == 0)
        assert ledger.runs[-1].steps_reserved == min(reserved, planned) > ledger.steps_run
        ledger.record_step()
    after(ledger, planned - ledger.steps_run)
    assert len(ledger.entries) == 1 + math.ceil(planned / portion)
    assert ledger.entries[-1]["steps_reserved"] == planned


def test_a_step_that_was_not_reserved_cannot_be_recorded():
    with pytest.raises(AssertionError, match="before it was reserved"):
        PrivacyLedger.open(statement()).record_step()


class Killed(Exception):
    pass


# What happens in one launch of a simulated training, step by step. Where it is killed: while the reservation is written,
# after that, after the step's release, while a checkpoint is written, or not at all.
LAUNCH = st.fixed_dictionaries(
    dict(
        steps=st.integers(0, 12),
        planned=st.sampled_from([12, 250, 700]),
        sigma=st.sampled_from([1.0, 2.0]),
        save_steps=st.integers(1, 5),
        killed=st.none() | st.tuples(st.integers(0, 11), st.sampled_from(["reserve", "step", "released", "save"])),
        from_checkpoint=st.booleans(),
    )
)


class Training:
    """Trains into a folder, and knows how many steps were really released."""

    def __init__(self, folder):
        self.folder, self.released, self.saved_at = folder, 0, 0

    def launch(self, steps, planned, sigma, save_steps, killed, from_checkpoint):
        terms = statement(steps_planned=planned, noise_multiplier=sigma, **NOT_PRIVATE)
        folders = [folder for folder in (self.folder, self.folder / "checkpoint") if (folder / LEDGER_NAME).exists()]
        if folders:
            earlier = latest([PrivacyLedger.load(folder) for folder in folders])
            ledger = earlier.resume(terms, from_step=self.saved_at if from_checkpoint else 0)
        else:
            ledger = PrivacyLedger.open(terms)
        at_begin = ledger.steps_run
        self.write(ledger, self.folder)
        for step in range(steps):
            if ledger.reserve(at_most=steps - step):
                self.write(ledger, self.folder, kill=killed == (step, "reserve"))
            if killed == (step, "step"):
                raise Killed
            self.released += 1
            if killed == (step, "released"):
                raise Killed
            ledger.record_step()
            assert ledger.steps_run == at_begin + step + 1
            if (step + 1) % save_steps == 0:
                ledger.checkpoint(step + 1)
                self.saved_at = min(step + 1, ledger.steps_run)
                self.write(ledger, self.folder / "checkpoint", kill=killed == (step, "save"))
                self.write(ledger, self.folder)
        ledger.close()
        self.write(ledger, self.folder)
        return at_begin + steps

    def write(self, ledger, folder, kill=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda file: None)  # no power is lost here
            if kill:
                patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(Killed))
            ledger.save(folder)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(launches=st.lists(LAUNCH, min_size=1, max_size=5))
def test_no_crash_undercounts_and_a_clean_end_is_exact(tmp_path_factory, launches):
    training, slack = Training(tmp_path_factory.mktemp("out")), 0
    for launch in launches:
        counted = None
        try:
            counted = training.launch(**launch)
        except Killed:
            slack += max(1, launch["planned"] // 100)
        ledger = PrivacyLedger.load(training.folder)
        assert training.released <= ledger.steps_run <= training.released + slack
        if counted is not None:
            assert ledger.steps_run == counted
        assert sum(entry.steps for entry in ledger.history) == ledger.steps_run
    assert ledger.steps_run == training.released or slack > 0


# --- resuming -------------------------------------------------------------------------------------------------------------


def test_resuming_counts_the_steps_that_a_crash_undid():
    resumed = after(PrivacyLedger.open(statement()), 30).resume(statement(), from_step=20)
    assert resumed.restarts == [20]
    assert after(resumed, 40).steps_run == 70
    assert resumed.history == [Releases(1.0, 0.05, 30), Releases(1.0, 0.05, 40)]


@pytest.mark.thorough  # test_trained_again.py has a training of white noise
def test_a_run_that_its_budget_ends_early_stays_within_it():
    """Where all planned steps cost too much, ε is at most the target, and `verify` finds the same."""
    terms = dict(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.05, steps=60)
    sigma = get_noise_multiplier(**terms, strategy=NoiseShape.banded(4).c)
    whole = statement(noise_shape="banded:bands=4", noise_multiplier=sigma, target_epsilon=3.0)
    ledger = after(PrivacyLedger.open(whole), 40).resume(whole, from_step=30)
    affordable = ledger.affordable_steps(30)
    assert 10 < affordable < 30
    after(ledger, affordable).close()
    assert 2.8 < ledger.epsilon_of_fixed_length() <= ledger.epsilon() == 3.0
    assert (budget_mismatches(ledger), epsilon_mismatches(ledger)) == ([], [])


@pytest.mark.parametrize(
    ("change", "mechanism"),
    [(dict(noise_multiplier=2.0), (2.0, 0.05)), (dict(expected_batch_size=100, sample_rate=0.1), (1.0, 0.1))],
)
def test_another_mechanism_opens_another_entry(change, mechanism):
    ledger = after(PrivacyLedger.open(statement()), 30).resume(statement(**change), from_step=30)
    assert after(ledger, 5).history == [Releases(1.0, 0.05, 30), Releases(*mechanism, 5)]
    # Results may have chosen the second one, so that losses of privacy are not composed: both are counted to their ends.
    plans = [Releases(1.0, 0.05, 60), Releases(*mechanism, 30)]
    assert ledger.plans == [[each] for each in plans]
    assert ledger.epsilon() == sum(get_total_epsilon([each], delta=5e-6) for each in plans)
    assert ledger.statement == statement(**change)


@pytest.mark.parametrize(
    ("overrides", "from_step", "code", "said"),
    [
        (dict(num_units=500, expected_batch_size=25), 3, "other-terms-than-resumed", "500 .*1000"),
        (dict(target_delta=1e-6), 3, "other-terms-than-resumed", "target_delta .*1e-06 .*1e-05"),
        (
            dict(unit_of_privacy="all examples with the same 'user_id'"),
            3,
            "other-terms-than-resumed",
            "all records with the same .user_id. .*one record",
        ),
        ({}, 9, "ledger-of-another-checkpoint", "9, .*3 "),
    ],
)
def test_a_ledger_of_something_else_is_refused_and_stays_as_it_is(overrides, from_step, code, said):
    earlier = after(PrivacyLedger.open(statement(**overrides)), 3)
    entries = json.dumps(earlier.entries)
    with refused(code, match=said):
        earlier.resume(statement(), from_step=from_step)
    assert json.dumps(earlier.entries) == entries
    assert earlier.steps_run == 3


def test_the_latest_ledger_goes_on_from_all_others():
    first = after(PrivacyLedger.open(statement(**NOT_PRIVATE)), 3)
    second = after(first.resume(statement(**NOT_PRIVATE), from_step=3), 2)
    assert latest([first, second]) is latest([second, first]) is second
    fork = after(first.resume(statement(**NOT_PRIVATE), from_step=3), 2)
    other = after(PrivacyLedger.open(statement(**NOT_PRIVATE)), 3)  # in the same second, with the same arguments
    for unrelated in (fork, other):
        with refused("ledgers-disagree", match=unrelated.head[:8]):
            latest([unrelated, second, first])


# --- the file -------------------------------------------------------------------------------------------------------------


def test_the_file_reads_back(tmp_path):
    ledger = all_events(train_loss="raw")
    ledger.save(tmp_path)
    for path in (tmp_path, tmp_path / LEDGER_NAME, str(tmp_path)):
        loaded = PrivacyLedger.load(path)
        assert list(loaded.entries) == list(ledger.entries)
        assert loaded.statement == ledger.statement
        assert (loaded.steps_run, loaded.restarts, loaded.head) == (10, [6], ledger.head)
        assert [run.is_closed for run in loaded.runs] == [False, True]
    assert list(tmp_path.iterdir()) == [tmp_path / LEDGER_NAME]  # no temporary file stays
    written = document_in(tmp_path)
    events = [entry["event"] for entry in written["entries"]]
    assert events == ["opened", *["steps"] * 6, "checkpoint", "steps", "resumed", *["steps"] * 3, "closed", "left", "saved"]
    assert written["entries"][0]["versions"].keys() == {
        "doppler_hf", "torch", "transformers", "opacus", "dp-accounting", "numpy", "python",
    }  # fmt: skip
    assert any("training loss" in line for line in written["entries"][0]["not_covered"])


def test_saving_goes_on_from_what_is_there_and_nothing_else(tmp_path):
    ledger = after(PrivacyLedger.open(statement(**NOT_PRIVATE)), 3)
    ledger.save(tmp_path)
    ledger.save(tmp_path)
    after(ledger, 1).save(tmp_path)
    kept = (tmp_path / LEDGER_NAME).read_bytes()
    other = after(PrivacyLedger.open(statement(**NOT_PRIVATE)), 9)
    for unrelated in (other, PrivacyLedger.open(statement(**NOT_PRIVATE))):
        with refused("ledger-of-another-run", match=ledger.head[:8]):
            unrelated.save(tmp_path)
    shorter = PrivacyLedger.load(tmp_path)
    after(ledger, 1).save(tmp_path)
    with refused("ledger-of-another-run"):
        shorter.save(tmp_path)  # what it lacks would be lost
    (tmp_path / LEDGER_NAME).write_bytes(kept[:-9])
    with refused("not-a-ledger"):
        ledger.save(tmp_path)
    assert (tmp_path / LEDGER_NAME).read_bytes() == kept[:-9]


def test_what_is_in_the_file_was_synchronized_before_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        called = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, called=called: (calls.append(name), called(*args)))
    PrivacyLedger.open(statement()).save(tmp_path)
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_no_ledger_is_lost_if_the_power_fails(tmp_path, monkeypatch):
    """Neither a ledger nor its folder, nor the ledger of an earlier run, which was renamed for it."""
    disk, folder = Disk(monkeypatch), tmp_path / "runs" / "out"
    with WriterLock(folder):
        assert not disk.lost
        PrivacyLedger.open(statement()).save(folder)
        assert not disk.lost
        assert set_aside(folder, unless=lambda there: False)
        assert not disk.lost


def test_a_ledger_is_set_aside_under_its_head(tmp_path):
    old, new = PrivacyLedger.open(statement()), PrivacyLedger.open(statement())

    def put(ledger):
        return set_aside(tmp_path, unless=lambda there: there.is_prefix_of(ledger))

    assert put(new) is None
    old.save(tmp_path)
    assert put(after(PrivacyLedger.load(tmp_path).resume(statement(), from_step=0), 1)) is None
    aside = put(new)
    assert aside == tmp_path / f"privacy_ledger.{old.head[:8]}.json"
    assert PrivacyLedger.load(aside).head == old.head
    (tmp_path / LEDGER_NAME).write_text('{"format_version": 1}')
    damaged = put(new)
    assert damaged.read_text() == '{"format_version": 1}'
    new.save(tmp_path)
    assert set(tmp_path.iterdir()) == {aside, damaged, tmp_path / LEDGER_NAME}


# --- what is refused ------------------------------------------------------------------------------------------------------


def test_the_schema_knows_the_statement():
    schema = schema_validator().schema
    Draft202012Validator.check_schema(schema)
    fields = [field.name for field in dataclasses.fields(PrivacyStatement)]
    required = schema["$defs"]["statement"]["required"]
    # Ledgers before 0.3 are of random allocation, and do not say so. Only the ledger of a search says what a search is.
    assert [*required, "sampling", "search"] == list(schema["$defs"]["statement"]["properties"]) == fields


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "column 2"),
        ("[]", r"\$, \[\]"),
        ('{"$schema": "urn:doppler-hf:privacy-ledger:12", "format_version": 12, "entries": []}', r"\$.entries"),
        ('{"format_version": 1, "num_examples": 24, "history": []}', "12"),
        (b"\xff", "0xff"),
    ],
)
def test_what_is_no_ledger_is_refused(tmp_path, text, place):
    (tmp_path / LEDGER_NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused("not-a-ledger", match=place) as refusal:
        PrivacyLedger.load(tmp_path)
    assert str(tmp_path / LEDGER_NAME) in str(refusal.value)


def objects(value, path=()):
    """Yield every object of a JSON document with its path."""
    if isinstance(value, dict):
        yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from objects(inner, (*path, key))


def test_fields_that_are_missing_or_unknown_are_refused_whatever_the_hashes(tmp_path):
    all_events(**NOT_PRIVATE).save(tmp_path)
    original, validator = json.dumps(document_in(tmp_path)), schema_validator()
    assert validator.is_valid(json.loads(original))
    paths = [(path, list(value)) for path, value in objects(json.loads(original))]
    checked = 0
    for path, names in paths:
        for name in [*names, None]:
            document = json.loads(original)
            target = document
            for key in path:
                target = target[key]
            if name is None:
                target["unknown"] = 1
            else:
                del target[name]
            if name in (
                "earlier",
                "continues_rounds",
                "continues_plan",
                "planned_epsilon",
                "sampling",
                "trained",
            ) and not (name == "planned_epsilon" and target["event"] in ("checkpoint", "closed")):
                continue  # which older ledgers do not have
            assert not validator.is_valid(document), (path, name)
            checked += 1
    assert checked > 150


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_units", 0), ("num_units", True), ("sample_rate", 1.5), ("noise_multiplier", -1.0), ("target_delta", 1.0),
        ("accountant", "moments"), ("private", 1), ("per_sample_max_loss", 1.0), ("train_loss", "private"),
    ],
)  # fmt: skip
def test_values_outside_their_range_are_refused_whatever_the_hashes(tmp_path, field, value):
    entries = json.loads(json.dumps(list(PrivacyLedger.open(statement()).entries)))
    entries[0]["statement"][field] = value
    write(tmp_path, rehashed(entries))
    with refused("not-a-ledger", match=r"\$\.entries\[0\]\.statement"):
        PrivacyLedger.load(tmp_path)


@pytest.mark.parametrize(
    ("edit", "code", "place"),
    [
        (lambda e: e.pop(0), "impossible-entry", r"0 of the ledger \('steps'"),
        (lambda e: e.__delitem__(slice(0, 9)), "impossible-entry", r"0 of the ledger \('resumed'"),
        (lambda e: e.insert(3, dict(e[0])), "impossible-entry", r"3 of the ledger \('opened'"),
        (lambda e: e[3].update(steps_reserved=2), "impossible-entry", r"3 of the ledger \('steps'"),
        (lambda e: e[9].update(steps_run=6), "impossible-entry", r"9 of the ledger \('resumed'"),
        (lambda e: e[9].update(from_step=8), "ledger-of-another-checkpoint", "8, .*7 "),
        (lambda e: e[13].update(steps_run=6), "impossible-entry", r"13 of the ledger \('closed'"),
        (lambda e: e[13].update(steps_run=11), "impossible-entry", r"13 of the ledger \('closed'"),
        (lambda e: e.append(dict(e[12], steps_reserved=20)), "impossible-entry", r"16 of the ledger \('steps'"),
        (lambda e: e.insert(0, dict(e[15])), "impossible-entry", r"0 of the ledger \('saved'"),
        (lambda e: e[0]["statement"].update(sample_rate=0.04), "impossible-entry", "sample_rate 0.04"),
    ],
)
def test_entries_that_no_run_could_have_written_are_refused_whatever_the_hashes(tmp_path, edit, code, place):
    entries = json.loads(json.dumps(list(all_events(**NOT_PRIVATE).entries)))
    write(tmp_path, rehashed(entries))
    PrivacyLedger.load(tmp_path)
    edit(entries)
    for index, entry in enumerate(entries):
        entry["index"] = index
    (tmp_path / LEDGER_NAME).unlink()
    write(tmp_path, rehashed(entries))
    with refused(code, match=place):
        PrivacyLedger.load(tmp_path)
