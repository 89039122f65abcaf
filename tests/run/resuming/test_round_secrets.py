"""The secret of a round is the user's alone, serves the same rows alone, and does not stay for ever."""

import os
import re
import stat
import time

import pytest

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.ledger.ledger import set_aside
from doppler_hf.run.resuming.round_secrets import RoundSecret
from tests.support.ledgers import statement
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import text_data
from tests.support.trainers import On, at, interrupt, interrupted, trainer_of

ROWS, OTHERS = (DataDigest("24 rows", {"": {1: first, 2: "b"}}) for first in "ab")
OTHERS.fields[""][2] = "c"
SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def states(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "doppler_hf"


def secret(number=1, *, rank=0, world_size=1, data=ROWS):
    return RoundSecret(f"{number:016x}", rank, world_size, data)


def test_it_is_read_back_for_the_same_rows_alone():
    assert secret().secret() is None
    secret().keep(SECRET, output_dir="nowhere")
    assert secret().secret() == SECRET
    assert not secret().is_of_other_data()
    assert secret(data=OTHERS).secret() is None
    assert secret(data=OTHERS).is_of_other_data()
    for other in (secret(2), secret(rank=1, world_size=2), secret(world_size=2)):
        assert other.secret() is None
        assert not other.is_of_other_data()


def test_a_secret_of_the_same_run_under_another_number_of_processes_is_found(states):
    assert secret().secret_for_other_world_size() is None
    secret().keep(SECRET, output_dir="nowhere")
    secret(2, rank=1, world_size=12).keep(SECRET, output_dir="nowhere")
    (states / f"{1:016x}-0-of-3-89abcdef").write_bytes(SECRET)  # as version 0.3 named it
    assert secret().secret_for_other_world_size() is None
    assert secret(world_size=2).secret_for_other_world_size() == secret()
    assert secret(2).secret_for_other_world_size() == secret(2, rank=1, world_size=12)


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such permissions")
@pytest.mark.parametrize("umask", [0o000, 0o022])
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "made for all to see"])
def test_nobody_else_can_read_it_or_see_its_name(states, umask, is_there):
    before = os.umask(umask)
    try:
        if is_there:
            states.mkdir(parents=True)
        secret().keep(SECRET, output_dir="nowhere")
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret().path.stat().st_mode) == 0o600
    assert stat.S_IMODE(states.stat().st_mode) == 0o700
    # The digest is as private as the data: it is in the file, and not in its name.
    assert re.fullmatch(r"[0-9a-f]{16}-0-of-1", secret().path.name)


def test_all_processes_of_a_run_are_forgotten_and_no_other_run(states):
    for each in (secret(), secret(rank=0, world_size=2), secret(rank=1, world_size=2), secret(2)):
        each.keep(SECRET, output_dir="nowhere")
    (states / f"{1:016x}-0-of-1-89abcdef").write_bytes(SECRET)  # as version 0.3 named it
    secret(data=OTHERS).forget()
    assert [path.name for path in states.iterdir()] == [secret(2).path.name]
    secret().forget()


def test_those_that_nobody_has_resumed_for_half_a_year_are_removed(tmp_path, states):
    for number in (1, 2):
        folder = tmp_path / str(number)
        PrivacyLedger.open(statement(), run_id=f"{number:016x}").save(folder)
        secret(number).keep(SECRET, output_dir=folder)
    (states / f"{3:016x}-0-of-1-89abcdef").write_bytes(SECRET)
    (states / "something-else").write_text("not ours to remove")
    now = time.time()
    for path in states.iterdir():
        days = 100 if path == secret(2).path else 200
        os.utime(path, (now, now - days * 24 * 3600))
    secret(4).keep(SECRET, output_dir="nowhere")
    assert {path.name for path in states.iterdir()} == {secret(2).path.name, secret(4).path.name, "something-else"}


@pytest.mark.parametrize("left", ["its ledger", "its ledger, set aside", "another ledger", "nothing", "no folder"])
def test_those_of_runs_whose_ledger_is_gone_are_removed_after_a_month(tmp_path, states, monkeypatch, left):
    """Without the ledger nothing can be resumed. A younger one may be of a folder that was moved for a while."""
    folder = tmp_path / "out"
    old, young, elsewhere = secret(1), secret(2), secret(3)
    old.keep(SECRET, output_dir=folder)
    young.keep(SECRET, output_dir=folder)
    monkeypatch.setattr("platform.node", lambda: "another machine")
    elsewhere.keep(SECRET, output_dir=folder)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(states.parent))
    (states / f"{5:016x}-0-of-1").write_text('{"secret": "as it was before a folder was kept"}')
    if left != "no folder":
        folder.mkdir()
    if left not in ("nothing", "no folder"):
        run_id = f"{9 if left == 'another ledger' else 1:016x}"
        ledger = PrivacyLedger.open(statement(), run_id=run_id)
        ledger.save(folder)
        if left == "its ledger, set aside":
            assert set_aside(folder, unless=lambda there: False)
    now = time.time()
    for path in states.iterdir():
        days = 20 if path == young.path else 40
        os.utime(path, (now, now - days * 24 * 3600))
    secret(4).keep(SECRET, output_dir=folder)
    stays = {young.path.name, elsewhere.path.name, secret(4).path.name, f"{5:016x}-0-of-1"}
    stays |= {old.path.name} if left.startswith("its ledger") else set()
    assert {path.name for path in states.iterdir()} == stays


def test_what_is_damaged_or_cannot_be_written_costs_a_round_at_most(states, monkeypatch):
    secret().keep(SECRET, output_dir="nowhere")
    for content in ("", "[]", "{}", '{"secret": "00", "data": {}}', '{"secret": 1, "data": 2}', '{"secret": "zz"}'):
        secret().path.write_text(content)
        assert secret().secret() is None
        assert not secret().is_of_other_data()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    secret().keep(SECRET, output_dir="nowhere")
    assert secret().secret() is None
    secret().forget()


# --- of a run -------------------------------------------------------------------------------------------------------------


def stop(control, **_):
    control.should_training_stop = True


def kept(states):
    return [path for path in states.iterdir() if path.is_file()] if states.exists() else []


@pytest.mark.parametrize("terms", [dict(), *thorough(dict(noise_multiplier=None, target_epsilon=6.0))])
def test_a_run_that_has_made_all_its_steps_keeps_nothing(tmp_path, states, terms):
    found = []
    trainer_of(tmp_path, callbacks=[On(step_end=lambda **_: found.append(len(kept(states))))], **terms).train()
    assert found == [1] * 4
    assert kept(states) == []


@pytest.mark.parametrize(("callback", "error"), [(stop, None), *thorough((interrupt, KeyboardInterrupt))])
def test_a_run_that_can_go_on_keeps_its_secret_until_it_has(tmp_path, states, callback, error):
    saving = dict(save_strategy="steps", save_steps=2)
    # 48 rows and batches of 8: a round has 6 steps.
    first = trainer_of(tmp_path, data=text_data(48), callbacks=[On(step_end=at(2, callback))], **saving)
    if error is None:
        first.train()
    else:
        with pytest.raises(error):
            first.train()
    (file,) = kept(states)
    assert file.name.startswith(first.privacy.ledger.run_id)
    second = trainer_of(tmp_path, data=text_data(48), **saving)
    second.train(resume_from_checkpoint=True)
    assert second.privacy.ledger.runs[-1].continues_rounds
    assert [[each.steps for each in plan] for plan in second.privacy.ledger.plans] == [[4]]
    assert kept(states) == []


def test_a_run_that_begins_another_plan_forgets_the_round_of_the_one_before(tmp_path, states):
    saving = dict(save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, data=text_data(48), callbacks=[On(step_end=at(3, stop))], **saving).train()
    (before,) = kept(states)
    second = trainer_of(tmp_path, data=text_data(48), callbacks=[On(step_end=at(3, stop))], **saving)
    second.train(resume_from_checkpoint=True)  # from step 2: a step after a clean end is made again
    assert [[each.steps for each in plan] for plan in second.privacy.ledger.plans] == [[4], [2]]
    (after,) = kept(states)
    assert after != before


@pytest.mark.parametrize("event", ["step_begin", "epoch_begin"])
def test_a_run_that_ends_before_its_first_step_keeps_nothing(tmp_path, states, capsys, event):
    trainer = trainer_of(tmp_path, callbacks=[On(**{event: interrupt})])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.privacy.ledger.steps_run == 0
    assert kept(states) == []
    assert "Interrupted before the first step. No ε was spent." in capsys.readouterr().out


def test_a_round_goes_on_after_a_resumed_run_has_ended_before_its_first_step(tmp_path, states):
    _, second = interrupted(tmp_path)
    second.add_callback(On(step_begin=interrupt))
    with pytest.raises(KeyboardInterrupt):
        second.train(resume_from_checkpoint=True)
    assert len(kept(states)) == 1
    terms = dict(max_steps=6, save_strategy="steps", save_steps=2, noise_multiplier=None, target_epsilon=8.0)
    assert from_there(trainer_of(tmp_path, data=text_data(48), **terms), 6).continues_rounds
    assert kept(states) == []


def test_a_run_whose_ledger_cannot_be_saved_leaves_the_round_to_the_next(tmp_path, states, monkeypatch):
    """A full disk, as an example: the earlier run can then still be finished within its target."""
    _, second = interrupted(tmp_path)
    before = kept(states)

    def full(self, folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PrivacyLedger, "save", full)
        with pytest.raises(OSError, match="No space left"):
            second.train(resume_from_checkpoint=True)
    assert kept(states) == before
    terms = dict(max_steps=6, save_strategy="steps", save_steps=2, noise_multiplier=None, target_epsilon=8.0)
    assert from_there(trainer_of(tmp_path, data=text_data(48), **terms), 6).continues_rounds
    assert kept(states) == []


# --- with another number of processes -----------------------------------------------------------------------------------


def left_by(processes, states):
    """Rename the secret of a run of one process to that of a run of more."""
    (file,) = kept(states)
    return file.rename(states / re.sub(r"1$", f"{processes}", file.name))


def from_there(trainer, last):
    """Resume, and return the run as its ledger has it."""
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == last
    return trainer.privacy.ledger.runs[-1]


def test_a_round_is_not_begun_again_within_target_epsilon_because_of_another_number_of_processes(tmp_path, states):
    _, second = interrupted(tmp_path)
    file, ledger = left_by(4, states), (tmp_path / "out" / LEDGER_NAME).read_bytes()
    with refused("another-number-of-processes", match=r"had 4 processes, and this run has 1\b") as refusal:
        second.train(resume_from_checkpoint=True)
    # Each mend with its price.
    prices = (
        "Resume with 4 processes, which needs no higher target.",
        "a small raise leaves",
        "the ε of both runs then add up.",
    )
    assert [price for price in prices if price not in str(refusal.value)] == []
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == ledger
    # The mend that the message names: with the earlier number the round goes on, and all its steps are affordable.
    file.rename(states / file.name.replace("-of-4", "-of-1"))
    assert from_there(second, 6).continues_rounds


def test_a_higher_target_is_a_further_plan_with_any_number_of_processes(tmp_path, states):
    interrupted(tmp_path)
    left_by(4, states)
    more = dict(max_steps=6, save_strategy="steps", save_steps=2, noise_multiplier=None, target_epsilon=12.0)
    assert not from_there(trainer_of(tmp_path, data=text_data(48), **more), 6).continues_rounds


def test_another_number_of_processes_costs_more_with_a_noise_multiplier_and_is_said(tmp_path, states):
    _, second = interrupted(tmp_path, noise_multiplier=1.0, target_epsilon=None)
    left_by(2, states)
    with pytest.warns(UserWarning, match=r"had 2 processes, and this run has 1\b.*costs more ε"):
        assert not from_there(second, 6).continues_rounds


@pytest.mark.parametrize(
    "terms",
    [dict(sampling="poisson"), dict(report_train_loss="none"), *thorough(dict(sampling="poisson", noise_multiplier=1.0))],
)
def test_the_number_of_processes_may_change_where_no_round_is_cut_short(tmp_path, states, terms):
    """Poisson sampling has no rounds; after a clean end between two of them a new one would have followed anyway."""
    terms = dict(noise_multiplier=None, target_epsilon=8.0, noise_shape="white", save_strategy="steps", save_steps=6) | terms
    if terms["noise_multiplier"] is not None:
        del terms["target_epsilon"]
    trainer_of(tmp_path, data=text_data(48), callbacks=[On(step_end=at(6, stop))], max_steps=12, **terms).train()
    if "sampling" not in terms:
        left_by(2, states)
    second = trainer_of(tmp_path, data=text_data(48), max_steps=12, **terms)
    assert not from_there(second, 12).continues_rounds
    assert [sum(each.steps for each in plan) for plan in second.privacy.ledger.plans] == [12]


def test_other_rows_are_what_is_said_where_the_number_of_processes_is_another_too(tmp_path, states):
    interrupted(tmp_path, noise_multiplier=1.0, target_epsilon=None)
    left_by(2, states)
    more = dict(max_steps=6, save_strategy="steps", save_steps=2, noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="train_dataset changed since the checkpoint"):
        from_there(trainer_of(tmp_path, data=text_data(48, seed=5), **more), 6)
