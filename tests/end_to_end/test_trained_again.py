"""One trainer that trains again after something was changed: each change has its effect, or is refused."""

import pytest
import torch
from transformers import BertForSequenceClassification

from doppler_hf.privacy import PrivacyLedger
from tests.support.ledgers import said
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import head_alone, pad, text_data, tiny_bert
from tests.support.trainers import OF_ORDER, On, Recorder, at, interrupt, trained, trainer_of


def moved_by(trainer):
    """Train, and return which of the trained tensors have moved, and which of the others."""
    before = {name: p.detach().clone().cpu() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p.cpu(), before[name])}
    of_training = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    return moved, of_training


def assert_all_moved_and_are_spoken_for(trainer, tmp_path, *, steps=8):
    moved, of_training = moved_by(trainer)
    assert moved == of_training
    assert trainer.privacy.ledger.steps_run == steps
    trainer.save_model(tmp_path / "saved")
    ledger = PrivacyLedger.load(tmp_path / "saved")
    assert ledger.steps_run == steps
    assert not ledger.unknown_weights(tmp_path / "saved")


@pytest.mark.parametrize(
    ("model", "change"),
    [(head_alone, lambda model: model.requires_grad_(True)), (tiny_bert, lambda model: model.bert.requires_grad_(False))],
    ids=["unfrozen", "frozen"],
)
def test_what_was_unfrozen_is_trained_and_what_was_frozen_stays(tmp_path, model, change):
    trainer = trained(trainer_of(tmp_path, model=model(), weight_decay=0.5))
    change(trainer.model)
    assert_all_moved_and_are_spoken_for(trainer, tmp_path)


def test_another_model_is_trained_in_its_place(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    left, trainer.model = trainer.model, tiny_bert(num_hidden_layers=2, hidden_dropout_prob=0.1)
    trainer.model.eval()
    assert_all_moved_and_are_spoken_for(trainer, tmp_path)
    assert trainer.model.training  # as Transformers leaves it
    assert all(torch.equal(p, first[name]) for name, p in left.named_parameters())


@pytest.mark.parametrize(
    "change",
    [
        *thorough(dict(lr_scheduler_type="constant_with_warmup", warmup_steps=2, learning_rate=3e-2, max_steps=6)),
        dict(adam_bc_floor=0.1, low_pass_filter="momentum:beta=0.5", weight_decay=0.5),
        dict(base_optimizer="sgd", noise_multiplier=0.5, per_sample_max_grad_norm=0.1, gradient_accumulation_steps=1),
    ],
)
def test_a_second_training_is_that_of_a_new_trainer_with_these_arguments(tmp_path, change):
    """From the same weights, of which the first training has left other ones, by the same noise."""
    again = trained(trainer_of(tmp_path / "again", noise_seed=3))
    anew = trainer_of(tmp_path / "anew", noise_seed=3, **change)
    again.model.load_state_dict(anew.model.state_dict())
    for name, value in change.items():
        setattr(again.args, name, value)
    found = []
    for trainer in (again, anew):
        trainer.add_callback(recorder := Recorder())
        trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        found.append((rates, recorder.gradients, [*trainer.model.parameters()]))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=OF_ORDER, atol=OF_ORDER)


def rate_of(trainer):
    return trainer.optimizer.param_groups[0]["initial_lr"]


def test_a_rate_that_was_chosen_is_chosen_again(tmp_path):
    trainer = trained(trainer_of(tmp_path, learning_rate=None))
    first, trainer.args.adam_bc_floor = rate_of(trainer), 0.1
    trainer.train()
    anew = trained(trainer_of(tmp_path / "anew", learning_rate=None, adam_bc_floor=0.1))
    assert rate_of(trainer) == rate_of(anew) != first
    assert trainer.args.learning_rate is None  # arguments stay as they were given


def test_other_data_of_as_many_rows_are_trained_on_and_others_are_refused(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    trainer.train_dataset = text_data(48, seed=3)
    with refused("other-terms-than-resumed", match="from 24 in the earlier run to 48"):
        trainer.train()
    assert trainer.privacy.ledger.steps_run == 4
    seen = []
    trainer.data_collator = lambda rows: seen.append(rows) or pad(rows)
    trainer.train_dataset = text_data(24, seed=3)
    assert_all_moved_and_are_spoken_for(trainer, tmp_path)
    known = {tuple(tokens) for tokens in trainer.train_dataset["input_ids"]}
    assert seen
    assert all(tuple(row["input_ids"]) in known for rows in seen for row in rows)


@pytest.mark.parametrize(
    ("saves", "said_of_checkpoints"),
    [
        (
            dict(),
            "so a new run adds its ε to this ε. Next time, save checkpoints with save_strategy='steps'.",
        ),
        (dict(save_strategy="epoch"), "Next time, save earlier, with a smaller save_steps and save_strategy='steps'."),
        (dict(save_strategy="steps", save_steps=1), "To continue from"),
    ],
    ids=["none", "late", "soon"],
)
def test_an_interrupted_training_says_what_is_spent_and_how_to_go_on(tmp_path, capsys, saves, said_of_checkpoints):
    stop = On(optimizer_step=at(2, interrupt))  # where nothing can be saved
    trainer = trainer_of(tmp_path, callbacks=[stop], low_pass_filter="momentum", **saves)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(stop)
    said = capsys.readouterr().out
    assert f"Interrupted. Privacy spent: ε = {trainer.privacy.epsilon():.4g}, δ = " in said
    assert said_of_checkpoints in said
    if saves:
        return
    assert_all_moved_and_are_spoken_for(trainer, tmp_path, steps=7)
    assert "Interrupted" not in capsys.readouterr().out


@pytest.mark.parametrize(("target_epsilon", "steps"), [(3.0, 3), (6.0, 4)])
def test_an_interrupted_training_ends_as_many_steps_early_or_takes_a_larger_target(tmp_path, capsys, target_epsilon, steps):
    options = dict(noise_multiplier=None, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[On(optimizer_step=at(2, interrupt))], target_epsilon=3.0, **options).train()
    last = tmp_path / "out" / "checkpoint-2"
    again = "The 1 step after it will be repeated and count twice, so the run will end that many steps early."
    words = f"To continue from {last}, call trainer.train(resume_from_checkpoint=True). {again}"
    assert words in " ".join(capsys.readouterr().out.split())
    resumed = trainer_of(tmp_path, target_epsilon=target_epsilon, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == steps
    assert resumed.privacy.epsilon() <= target_epsilon
    # Where the budget ends, the last step is evaluated and saved, as after the last step of a plan.
    assert [log["step"] for log in resumed.state.log_history if "eval_loss" in log][-1] == steps
    assert (tmp_path / "out" / f"checkpoint-{steps}").is_dir()


def test_an_optimizer_made_before_something_was_unfrozen_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, model=head_alone())
    trainer.create_optimizer()
    trainer.model.requires_grad_(True)
    with refused("forgotten-parameters", match=r"'bert\..* 22 other "):
        trainer.train()
    trainer.optimizer = None  # and the fix
    assert_all_moved_and_are_spoken_for(trainer, tmp_path, steps=4)


def test_a_model_that_was_trained_in_another_folder_is_told_of(tmp_path, capsys):
    saved = tmp_path / "saved"
    first = trainer_of(tmp_path / "again", max_steps=1)
    first.train()
    first.save_model(str(saved))
    capsys.readouterr()
    trainer_of(tmp_path / "second", model=BertForSequenceClassification.from_pretrained(saved), max_steps=1).train()
    assert "An earlier private run trained these weights, so its ε is included." in said(capsys)
