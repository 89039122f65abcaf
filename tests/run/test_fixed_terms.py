"""Arguments that change after they were made: before a run they are checked again, in it they change nothing."""

import dataclasses
import warnings

import pytest
import torch

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.errors import Refusal
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, arguments, assert_trained_alike, at, trained, trainer_of
from tests.support.unspent import assert_unspent

# What is refused of an argument → the value that is set later.
REFUSED = {
    "max_grad_norm": 0.01,
    "optim": "sgd",
    "adam_beta1": 0.5,
    "fp16": True,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "dataloader_drop_last": True,
    "per_sample_max_grad_norm": -1.0,
    "noise_multiplier": None,
    "target_epsilon": 3.0,
    "learning_rate": "1e-3",
    "base_optimizer": "adamw",
    "max_examples_per_unit": 3,
    "full_determinism": True,
    "skip_memory_metrics": False,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("when", ["before the trainer is made", "before it trains"])
def test_a_value_that_is_refused_of_an_argument_is_refused_when_it_is_set_later(tmp_path, name, when):
    args = arguments(tmp_path)
    options = dict(model=tiny_bert(), args=args, train_dataset=text_data(), data_collator=pad)
    before = getattr(args, name)
    trainer = DopplerTrainer(**options) if when == "before it trains" else None
    setattr(args, name, REFUSED[name])
    with pytest.raises(ValueError, match=name):
        DopplerTrainer(**options) if trainer is None else trainer.train()
    if trainer is not None:
        setattr(args, name, before)
        assert_unspent(trainer)
        trained(trainer)


def test_values_that_are_fine_may_be_set_later_and_left_out_again(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.args.max_grad_norm = None
    trainer.args.low_pass_filter = "momentum"
    trainer.args.per_device_train_batch_size = 3
    trained(trainer)
    assert trainer.privacy.statement.expected_batch_size == 6
    assert trainer.args.max_grad_norm == 0.0


@pytest.mark.parametrize("rate", [None, 1e-3])
def test_a_copy_without_privacy_has_transformers_defaults_and_one_with_it_ours(tmp_path, rate):
    private = arguments(tmp_path, learning_rate=rate)
    baseline = dataclasses.replace(private, disable_dp=True, noise_multiplier=None, grad_sample_self_check=True)
    assert (baseline.max_grad_norm, baseline.learning_rate) == (1.0, rate or 5e-5)
    again = dataclasses.replace(baseline, disable_dp=False, noise_multiplier=1.0)
    assert (again.max_grad_norm, again.learning_rate) == (0.0, rate)
    given = arguments(tmp_path, disable_dp=True, noise_multiplier=None, max_grad_norm=0.0)
    assert dataclasses.replace(given, seed=3).max_grad_norm == 0.0
    assert {type(value) for value in baseline.to_dict().values()} <= {bool, int, float, str, dict, list, type(None)}
    later = DopplerTrainingArguments(output_dir=str(tmp_path), target_epsilon=3.0, report_to="none", use_cpu=True)
    later.disable_dp, later.target_epsilon = True, None
    trainer = DopplerTrainer(tiny_bert(), later, pad, text_data())
    assert (trainer.args.max_grad_norm, trainer.args.learning_rate) == (1.0, 5e-5)


def setting(name, value):
    return lambda args, **_: setattr(args, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_grad_norm", 0.01), ("max_grad_norm", None), ("per_sample_max_grad_norm", 0.5), ("noise_multiplier", 0.5),
        ("max_steps", 2), ("per_device_train_batch_size", 1), ("learning_rate", 1.0), ("report_train_loss", "raw"),
    ],
)  # fmt: skip
def test_a_change_during_the_training_is_said_to_have_no_effect_and_has_none(tmp_path, name, value):
    as_planned = trained(trainer_of(tmp_path / "a", noise_seed=1))
    for event in ("step_end", "step_begin"):
        changed = trainer_of(tmp_path / event, noise_seed=1, callbacks=[On(**{event: at(1, setting(name, value))})])
        with pytest.warns(UserWarning, match=rf"^{name} was changed from \S+ to {value} during the run\. This has no"):
            changed.train()
        assert_trained_alike(changed, as_planned)
        assert changed.privacy.ledger.steps_run == 4


def test_no_value_that_is_set_within_a_step_scales_the_private_gradient(tmp_path):
    as_planned = trained(trainer_of(tmp_path / "a", noise_seed=1))
    set_it = On(substep_end=setting("max_grad_norm", 0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_trained_alike(trained(trainer_of(tmp_path / "b", noise_seed=1, callbacks=[set_it])), as_planned)


def test_without_privacy_transformers_clips(tmp_path):
    options = dict(noise_multiplier=None, disable_dp=True, max_steps=1, optim="sgd", learning_rate=1.0)
    norms = []
    for clip in (1e-3, 0.0):
        trainer = trainer_of(tmp_path, max_grad_norm=clip, **options)
        before = torch.cat([each.detach().flatten().clone() for each in trainer.model.parameters()])
        trained(trainer)
        norms.append(float((torch.cat([each.detach().flatten() for each in trainer.model.parameters()]) - before).norm()))
    assert norms[0] == pytest.approx(1e-3, rel=0.01)
    assert norms[1] > 0.01


# Events at which a callback may change an argument that is read in every step.
EVENTS = ("epoch_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log", "save",
          "evaluate", "epoch_end")  # fmt: skip
SEEN_BY_STEPS = [
    {"disable_dp": True, "noise_seed": 3, "gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 4, "max_grad_norm": 0.01},
]


ANSWERED = dict(noise_seed=1, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """A run that nothing changes, and the names of the files that it writes."""
    folder = tmp_path_factory.mktemp("unchanged")
    trainer = trained(trainer_of(folder, **ANSWERED))
    return trainer, {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("changes", SEEN_BY_STEPS, ids=", ".join)
@pytest.mark.parametrize("is_late", [False, *thorough(True)])
def test_a_change_that_a_step_would_see_is_undone_and_the_run_goes_on(tmp_path, unchanged, changes, event, is_late):
    """A callback that another one adds during the run is called after ours at first."""
    as_planned, files = unchanged
    trainer = trainer_of(tmp_path, **ANSWERED)
    own = On(**{event: lambda args, **_: [setattr(args, *change) for change in changes.items()]})
    trainer.add_callback(On(step_begin=at(0, lambda **_: trainer.add_callback(own))) if is_late else own)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    is_reached = not (is_late and event == "epoch_begin" and trainer.state.num_train_epochs == 1)
    for name, value in changes.items():
        said = [str(each.message) for each in warned if str(each.message).startswith(f"{name} was changed from ")]
        assert len(said) == is_reached  # once, whatever number of steps it is in
        assert all(f" to {value} during the run. This has no effect" in each for each in said)
    assert trainer.state.global_step == trainer.privacy.ledger.steps_run == 4
    assert trainer.privacy.ledger.runs[-1].is_closed
    assert trainer.privacy.epsilon() == as_planned.privacy.epsilon()
    assert_trained_alike(trainer, as_planned)
    assert {path.name for path in tmp_path.rglob("*")} == files


def test_several_changes_at_once_are_each_said(tmp_path):
    def change(args, **_):
        args.noise_seed, args.gradient_accumulation_steps, args.noise_multiplier = 7, 1, 9.0

    trainer = trainer_of(tmp_path, callbacks=[On(step_end=at(2, change))])
    with pytest.warns(UserWarning, match="during the run") as warned:
        trainer.train()
    changed = {str(each.message).split(" was ")[0] for each in warned}
    assert changed == {"noise_seed", "gradient_accumulation_steps", "noise_multiplier"}
    assert trainer.args.noise_seed is None
    assert trainer.args.gradient_accumulation_steps == 2
    assert trainer.privacy.ledger.private


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 0.01), ("noise_multiplier", 0.1), ("disable_dp", True)])
def test_a_change_after_the_run_was_planned_is_refused(tmp_path, name, value):
    trainer = trainer_of(tmp_path, callbacks=[On(train_begin=setting(name, value))])
    with pytest.raises(Refusal, match=f"{name} was changed"):
        trainer.train()
    setattr(trainer.args, name, getattr(arguments(tmp_path), name))
    assert_unspent(trainer)
