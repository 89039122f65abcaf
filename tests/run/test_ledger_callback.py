"""The trainer's ledger: ahead of every step on disk, never another run's, and open about what a run costs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from transformers import BertForSequenceClassification, TrainerCallback, TrainerControl, TrainerState

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger import ledger as ledger_module
from doppler_hf.run import replicas
from doppler_hf.run.earlier_ledgers import ledgers_of
from doppler_hf.run.ledger_callback import PrivacyCallback
from doppler_hf.run.private_run import PrivateRun
from tests.support.ledgers import after, said, statement
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import arguments, trained, trainer_of


class Stop(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def interrupt():
    raise KeyboardInterrupt


def events(folder):
    return [entry["event"] for entry in json.loads((folder / LEDGER_NAME).read_text())["entries"]]


def earlier(trainer, checkpoint=None):
    return trainer.privacy.earlier_ledger(checkpoint, folder=trainer.args.output_dir, model=trainer.model)


# --- ahead of the steps ---------------------------------------------------------------------------------------------------


class Watchful(DopplerTrainer):
    """Reads the file while the gradients of a step are computed, and may then be killed."""

    killed_in_step = math.inf

    def set_initial_training_values(self, args, dataloader):
        values = super().set_initial_training_values(args, dataloader)
        self.on_disk = []
        return values

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        if hasattr(self, "on_disk"):
            self.on_disk.append((self.state.global_step, PrivacyLedger.load(self.args.output_dir).steps_run))
            if self.state.global_step == self.killed_in_step:
                raise KeyboardInterrupt
        return losses


def test_steps_are_on_disk_before_they_are_computed(tmp_path):
    trainer = trained(trainer_of(tmp_path, cls=Watchful, max_steps=7, noise_multiplier=50.0))
    assert {step for step, _ in trainer.on_disk} == set(range(7))
    assert all(counted == step + 1 for step, counted in trainer.on_disk)


def test_a_kill_within_a_step_counts_it(tmp_path):
    trainer = trainer_of(tmp_path, cls=Watchful, max_steps=300)
    trainer.killed_in_step = 4
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 6  # portions of 3
    assert events(tmp_path / "out") == ["opened", "steps", "steps", "left"]


def callback_of_a_run(tmp_path, ledger, *, affordable_steps):
    """The callback of a run that has begun."""
    run = PrivateRun(arguments(tmp_path), text_data(), expected_batch_size=8, num_trained=1)
    callback = PrivacyCallback(lambda: run)
    run.ledger = callback.ledger = ledger
    run.affordable_steps = affordable_steps
    return callback


def test_no_more_is_counted_ahead_than_the_budget_allows(tmp_path):
    callback = callback_of_a_run(tmp_path, PrivacyLedger.open(statement(steps_planned=1000)), affordable_steps=13)
    state = TrainerState(is_world_process_zero=True)
    for _ in range(13):
        callback.on_step_begin(arguments(tmp_path), state, TrainerControl())
        callback._current_run()._is_released = True  # as its mechanism says
        callback.on_pre_optimizer_step(arguments(tmp_path), state, TrainerControl())
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 13
    assert [entry.get("steps_reserved") for entry in callback.ledger.entries] == [None, 10, 13]


def test_an_interrupted_run_of_the_same_trainer_counts_what_it_had_reserved(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=300, callbacks=[Stop(4, interrupt)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.privacy.ledger.steps_run == 4
    assert earlier(trainer).steps_run == 6
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.privacy.ledger.steps_run == 8
    assert PrivacyLedger.load(tmp_path / "out").runs[1].steps_before == 6


def test_only_process_0_writes(tmp_path):
    callback = callback_of_a_run(tmp_path, PrivacyLedger.open(statement()), affordable_steps=5)
    args, state, control = arguments(tmp_path), TrainerState(is_world_process_zero=False), TrainerControl()
    callback.on_step_begin(args, state, control)
    callback._current_run()._is_released = True
    callback.on_pre_optimizer_step(args, state, control)
    callback.on_train_end(args, state, control, model=tiny_bert())
    callback.end_run(args, state, model=tiny_bert())
    assert callback.ledger.steps_run == 1
    assert not (tmp_path / "out").exists()


def test_every_process_goes_on_from_what_process_0_has_read(tmp_path, monkeypatch):
    mine, theirs = after(PrivacyLedger.open(statement()), 3), after(PrivacyLedger.open(statement()), 5)
    callback = PrivacyCallback(lambda: None)
    callback.ledger = mine
    PartialState()
    monkeypatch.setattr(PartialState, "is_main_process", property(lambda self: False))
    monkeypatch.setattr(replicas, "broadcast_object_list", lambda objects: [theirs])
    assert callback.earlier_ledger(None, folder="", model=tiny_bert()) is theirs
    monkeypatch.setattr(replicas, "broadcast_object_list", lambda objects: [ValueError("refused on process 0")])
    with pytest.raises(ValueError, match="refused on process 0"):
        callback.earlier_ledger(None, folder="", model=tiny_bert())


# --- whose ledger it is ---------------------------------------------------------------------------------------------------


def test_a_fresh_run_sets_the_earlier_ledger_aside_and_says_that_both_add_up(tmp_path, capsys):
    options = dict(save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, **options).train()
    old = PrivacyLedger.load(tmp_path / "out")
    assert "add up" not in said(capsys)
    trainer_of(tmp_path, max_steps=3, **options).train()
    new = PrivacyLedger.load(tmp_path / "out")
    aside = tmp_path / "out" / f"privacy_ledger.{old.head[:8]}.json"
    assert f"is now {aside.name}. If it used the same data, its ε and that of this run add up." in said(capsys)
    assert PrivacyLedger.load(aside).head == old.head
    assert (new.steps_run, new.restarts) == (3, [])
    # Checkpoint 2 is the new run's, checkpoint 4 still the old one's.
    assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-2").is_prefix_of(new)
    assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-4").is_prefix_of(old)
    assert main(["verify", str(tmp_path / "out")]) == 0


def of_file(name):
    return lambda trainer: BertForSequenceClassification.from_pretrained(Path(trainer.args.output_dir) / name)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *thorough((lambda trainer: trainer.model, {})),
        *thorough((lambda trainer: trainer.model, dict(weight_filter="momentum:beta=0.9"))),
        (lambda trainer: trainer.model, dict(callbacks=[Stop(3, interrupt)])),
        *thorough((of_file("."), {}), (of_file("checkpoint-2"), {})),
        (of_file("checkpoint-2"), dict(weight_filter="momentum:beta=0.9")),
    ],
)
def test_a_new_trainer_of_a_trained_model_continues_its_ledger(tmp_path, capsys, model, options):
    first = trainer_of(tmp_path, save_strategy="steps", save_steps=2, **options)
    try:
        first.train()
        first.save_model()
    except KeyboardInterrupt:
        pass
    before = PrivacyLedger.load(tmp_path / "out")
    capsys.readouterr()
    second = trained(trainer_of(tmp_path, model=model(first)))
    assert f"earlier training is continued: its {before.steps_run} steps count" in said(capsys)
    second.save_model()
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert before.is_prefix_of(ledger)
    assert ledger.steps_run == before.steps_run + 4
    assert not list((tmp_path / "out").glob("privacy_ledger.*.json"))
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_what_something_else_has_trained_between_two_trainings_gets_no_ledger(tmp_path, capsys):
    trainer = trained(trainer_of(tmp_path))
    with torch.no_grad():
        trainer.model.classifier.weight.add_(1.0)
    trainer.train()
    assert trainer.privacy.ledger.steps_run == 8
    trainer.save_model(tmp_path / "saved")
    assert "are not those that the private training left" in said(capsys)
    assert not (tmp_path / "saved" / LEDGER_NAME).exists()


def test_a_model_that_is_made_anew_for_a_second_training_is_spoken_for(tmp_path):
    trainer = DopplerTrainer(
        model_init=lambda: tiny_bert(), args=arguments(tmp_path), train_dataset=text_data(), data_collator=pad
    )
    for steps in (4, 8):
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        assert PrivacyLedger.load(tmp_path / "saved").steps_run == steps


def test_a_notebook_cell_run_again_does_not_overrun_the_budget(tmp_path):
    options = dict(noise_multiplier=None, target_epsilon=3.0, accountant="rdp")
    first = trained(trainer_of(tmp_path, **options))
    before = (tmp_path / "out" / LEDGER_NAME).read_bytes()
    with pytest.raises(ValueError, match=r"budget is spent.* or begin anew with an untrained model and a new trainer\."):
        trainer_of(tmp_path, model=first.model, **options).train()
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before
    trainer_of(tmp_path, **options).train()
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 4


def test_a_ledger_that_was_set_aside_is_continued_with_its_model(tmp_path):
    first = trained(trainer_of(tmp_path))
    trainer_of(tmp_path, max_steps=3).train()
    again = trained(trainer_of(tmp_path, model=first.model))
    assert first.privacy.ledger.is_prefix_of(again.privacy.ledger)
    assert again.privacy.ledger.steps_run == 8
    # From the same weights once more: what has gone on from them counts too.
    assert earlier(first).steps_run == 4
    once_more = trainer_of(tmp_path, model=first.model)
    assert earlier(once_more).steps_run == 8


def test_a_model_whose_training_was_stopped_before_its_first_step_is_as_new(tmp_path):
    trainer = trainer_of(tmp_path, cls=Watchful)
    trainer.killed_in_step = 0
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert events(tmp_path / "out") == ["opened", "steps"]
    assert earlier(trainer_of(tmp_path, model=trainer.model)) is None


@pytest.mark.parametrize("max_steps", [*thorough(3), 4])
def test_the_ledger_of_a_finished_run_that_is_resumed_counts_no_step(tmp_path, max_steps):
    """As by a job that is started again: at the end of an epoch, of three steps, and inside one."""
    options = dict(max_steps=max_steps, save_strategy="steps", save_steps=1)
    first = trained(trainer_of(tmp_path, **options))
    first.save_model()
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert first.privacy.ledger.is_prefix_of(ledger)
    assert ledger.steps_run == max_steps
    assert all(run.is_closed for run in ledger.runs)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_finished_run_is_not_resumed_under_a_target_that_it_has_overrun(tmp_path, capsys):
    options = dict(noise_multiplier=None, save_strategy="steps", save_steps=4, accountant="rdp")
    trainer_of(tmp_path, target_epsilon=3.0, **options).train()
    before = (tmp_path / "out" / LEDGER_NAME).read_text()
    with pytest.raises(ValueError, match=r"^The privacy budget is spent: ε = 2\.99"):
        trainer_of(tmp_path, target_epsilon=2.0, **options).train(resume_from_checkpoint=True)
    assert (tmp_path / "out" / LEDGER_NAME).read_text() == before
    capsys.readouterr()
    trainer_of(tmp_path, target_epsilon=4.0, **options).train(resume_from_checkpoint=True)
    assert "All 4 steps are done, and none is trained. To go on set a larger max_steps" in said(capsys)


def test_who_saves_a_model_that_another_trainer_has_trained_is_told_that_it_gets_no_ledger(tmp_path, capsys):
    trainer = trained(trainer_of(tmp_path))
    capsys.readouterr()
    trainer.save_model()
    assert "without a privacy ledger" not in said(capsys)
    trainer_of(tmp_path, model=trainer.model).save_model(str(tmp_path / "elsewhere"))
    assert "without a privacy ledger: this trainer has not trained it" in said(capsys)
    assert not (tmp_path / "elsewhere" / LEDGER_NAME).exists()


def test_a_damaged_ledger_does_not_stop_a_fresh_run(tmp_path):
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        (folder / LEDGER_NAME).write_text('{"format_version": 1}')
    trainer_of(tmp_path, save_strategy="steps", save_steps=2).train()
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        assert [path.read_text() for path in folder.glob("privacy_ledger.*.json")] == ['{"format_version": 1}']


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(tmp_path):
    options = dict(save_strategy="steps", save_steps=1)
    finished = trained(trainer_of(tmp_path, max_steps=1, **options))
    others = [
        trainer_of(tmp_path, max_steps=2).train,
        lambda: trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1")),
        finished.save_model,
        lambda: trainer_of(tmp_path, disable_dp=True, noise_multiplier=None, **options).train(),
    ]

    def refuse():
        for other in others:
            before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
            with pytest.raises(ValueError, match=r"another private run, which is still going on\. Use another output_dir"):
                other()
            assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    first = trained(trainer_of(tmp_path, max_steps=5, callbacks=[Stop(2, refuse)], **options))
    assert PrivacyLedger.load(tmp_path / "out").head == first.privacy.ledger.head
    assert first.privacy.ledger.steps_run == 5
    first.save_model(str((tmp_path / "out").absolute()))
    assert main(["verify", str(tmp_path / "out")]) == 0
    others[0]()  # its turn now


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    options = dict(save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, **options).train()
    trainer_of(tmp_path, max_steps=3, **options).train()
    before = (tmp_path / "out" / LEDGER_NAME).read_bytes()
    with pytest.raises(ValueError, match="are of different runs"):
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before
    own, above, aside = ledgers_of(tmp_path / "out" / "checkpoint-4")
    assert own.is_prefix_of(aside)
    assert not own.is_prefix_of(above)


def test_a_damaged_ledger_is_not_resumed(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2).train()
    path = tmp_path / "out" / LEDGER_NAME
    path.write_text(path.read_text().replace('"steps_run": 4', '"steps_run": 3'))
    with pytest.raises(ValueError, match=r"Entry \d \('checkpoint'\) was changed or moved"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


# --- the budget -----------------------------------------------------------------------------------------------------------


def test_a_refusal_loses_nothing(tmp_path):
    options = dict(noise_multiplier=None, target_epsilon=3.0, accountant="rdp", save_strategy="steps", save_steps=4)
    trainer = trained(trainer_of(tmp_path, **options))
    ledger, before = trainer.privacy.ledger, (tmp_path / "out" / LEDGER_NAME).read_bytes()
    with pytest.raises(ValueError, match="budget is spent"):
        trainer.train()
    assert trainer.privacy.ledger is ledger
    extended = trainer_of(tmp_path, max_steps=6, **options)
    with pytest.raises(ValueError, match=r"budget is spent.*Raise target_epsilon"):
        extended.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before


def test_the_callback_itself_refuses_a_spent_budget(tmp_path, monkeypatch):
    """As when the plan has not looked back: nothing is written, and the ledger in memory stays."""
    options = dict(noise_multiplier=None, target_epsilon=3.0, accountant="rdp", save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, **options).train()
    before = (tmp_path / "out" / LEDGER_NAME).read_bytes()
    spent = PrivacyLedger.load(tmp_path / "out").statement
    trainer = trainer_of(tmp_path, **options)
    run = trainer.private_run
    assert run.statement == spent
    run._earlier = earlier(trainer, str(tmp_path / "out" / "checkpoint-2"))
    with pytest.raises(ValueError, match=r"budget is spent: ε = .* of target_epsilon = 3.0. Raise target_epsilon"):
        trainer.privacy.on_train_begin(trainer.args, TrainerState(global_step=2), TrainerControl(), model=trainer.model)
    assert trainer.privacy.ledger is None
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before


def test_the_summary_of_a_run_that_must_stop_early_says_what_it_will_cost(tmp_path, capsys):
    options = dict(noise_multiplier=None, target_epsilon=3.0, accountant="rdp", save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[Stop(3, interrupt)], **options).train()
    capsys.readouterr()
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    output = said(capsys)
    assert "steps T 4, resumed at 2" in output
    assert "The budget allows 1 of the 2 steps left" in output
    assert resumed.privacy.ledger.steps_run == 4
    assert f"at the end ε = {resumed.privacy.epsilon():.4g} by rdp" in output


def test_a_finished_run_is_extended_under_a_larger_target(tmp_path):
    options = dict(noise_multiplier=None, save_strategy="steps", save_steps=4, accountant="rdp")
    trainer_of(tmp_path, target_epsilon=2.0, **options).train()
    first = PrivacyLedger.load(tmp_path / "out")
    extended = trainer_of(tmp_path, target_epsilon=3.0, max_steps=6, **options)
    extended.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert first.is_prefix_of(ledger)
    assert [entry.steps for entry in ledger.history] == [4, 2]
    assert ledger.restarts == [4]
    assert [run.statement.target_epsilon for run in ledger.runs] == [2.0, 3.0]
    # The noise is that of the two steps left: for all six it would be larger, and budget would be left over.
    assert 0.999 * 3.0 <= ledger.epsilon() <= 3.0
    assert extended.state.global_step == 6
    assert main(["verify", str(tmp_path / "out")]) == 0


# --- what the user is told ------------------------------------------------------------------------------------------------


def test_summary_and_last_line_name_what_the_guarantee_rests_on(tmp_path, capsys):
    trainer = trained(trainer_of(tmp_path))
    ledger, output = trainer.privacy.ledger, said(capsys)
    spent = f"ε = {ledger.epsilon():.4g} by prv"
    for row in (
        "unit of privacy one example", "units N 24", f"noise source {ledger.statement.noise_source}",
        f"at the end {spent} δ",
        "training loss logged as it is, NOT PRIVATE (report_train_loss='private' adds noise, 'none' leaves it out)",
    ):  # fmt: skip
        assert row in output, row
    assert f"Privacy spent: {spent} at δ = {24**-1.1:.3g} after 4 steps." in output
    assert f"{tmp_path / 'out' / LEDGER_NAME}, whose last hash is {PrivacyLedger.load(tmp_path / 'out').head}." in output


def test_the_summary_tells_the_gradients_noise_from_what_is_accounted(tmp_path, capsys):
    trainer = trained(trainer_of(tmp_path, max_steps=1, report_train_loss="private", noise_multiplier=1.0))
    words = trainer.privacy.ledger.statement.noise_multiplier_in_words
    assert words == "1 of the gradient; with the loss σ₀ = 0.995, which is accounted"
    assert f"noise multiplier σ {words}" in said(capsys)


def test_the_chosen_accountant_is_shown_with_its_target(tmp_path, capsys):
    trainer_of(tmp_path, noise_multiplier=None, target_epsilon=3.0, accountant="rdp", report_train_loss="none").train()
    output = said(capsys)
    (epsilon,) = re.findall(r"at the end ε = (\S+) by rdp", output)
    assert 3.0 * 0.999 <= float(epsilon) <= 3.0
    assert "(target 3)" in output
    assert "training loss not reported optimizer adam_bc learning rate 0.01 filter" in output


def test_without_privacy_both_say_so(tmp_path, capsys):
    trainer_of(tmp_path, noise_seed=1).train()
    output = said(capsys)
    assert "at the end ε = ∞: NOT PRIVATE, no noise" in output
    assert "Privacy spent: ε = ∞: NOT PRIVATE, no noise" in output
    assert main(["verify", str(tmp_path / "out")]) == 1


def test_no_other_accountant_runs(tmp_path, monkeypatch):
    asked, get_total_epsilon = set(), ledger_module.get_total_epsilon

    def asking(*args, accountant, **kwargs):
        asked.add(accountant)
        return get_total_epsilon(*args, accountant=accountant, **kwargs)

    monkeypatch.setattr(ledger_module, "get_total_epsilon", asking)
    trainer_of(tmp_path, accountant="rdp", save_strategy="steps", save_steps=1).train()
    assert asked == {"rdp"}
