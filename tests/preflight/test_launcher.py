"""What comes from the launcher, or from an Accelerator of the script's own, is refused or noticed as an argument is."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from doppler_hf.errors import Refusal
from doppler_hf.run.precision import ROUNDING_BF16, computes_in_bf16, rounding_of
from tests.support.refusals import refused
from tests.support.trainers import arguments, checked_trainer_of, trained, trainer_of
from tests.support.unspent import assert_unspent, refusal_unspent


@pytest.fixture(autouse=True)
def another_accelerator():
    """Let each test make its own, and leave none behind."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("precision", ["fp16", "fp8", "FP16"])
def test_a_launcher_with_imprecise_numbers_is_refused_as_the_argument_is(tmp_path, monkeypatch, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    with pytest.raises(
        ValueError, match=f"mixed precision '{precision.lower()}' cannot be used .* Set it to 'bf16' or 'no' there"
    ):
        arguments(tmp_path)
    if precision == "fp16":  # an argument comes before the launcher
        assert trained(trainer_of(tmp_path, max_steps=1, bf16=True)).accelerator.mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    trained(trainer_of(tmp_path, max_steps=1))


@pytest.mark.parametrize("when", ["after the arguments", "a scaler"])
def test_fp16_that_the_arguments_cannot_know_is_refused_of_the_accelerator(tmp_path, monkeypatch, when):
    trainer = trainer_of(tmp_path, max_steps=1)
    if when == "a scaler":
        monkeypatch.setattr(trainer.accelerator, "scaler", torch.amp.GradScaler("cpu"))
    else:
        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    assert "Mixed precision 'fp16'" in refusal_unspent(trainer, "launcher-precision")


@pytest.mark.parametrize("how", ["launcher", "argument"])
def test_bf16_is_noticed_wherever_it_was_set(tmp_path, monkeypatch, capsys, how):
    if how == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = trained(checked_trainer_of(tmp_path, max_steps=1, **({"bf16": True} if how == "argument" else {})))
    assert trainer.accelerator.mixed_precision == "bf16"
    assert "ε does not cover rounding in bf16" in " ".join(capsys.readouterr().out.split())
    assert computes_in_bf16(trainer.model, trainer.accelerator.mixed_precision)
    assert rounding_of(trainer.model, "bf16") == ROUNDING_BF16 > rounding_of(trainer.model, "no")


def test_bf16_that_was_set_too_late_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.args.bf16 = True
    assert "bf16=True has no effect" in refusal_unspent(trainer, "launcher-precision")


@pytest.mark.parametrize("name", ["ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_TP"])
def test_a_launcher_that_cuts_models_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=f"the launcher asks for it .{name}"):
        arguments(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "eager", "launcher-compiles"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "launcher-compiles"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", "launcher-accumulation"),
    ],
)
def test_other_settings_of_the_launcher_are_refused_when_the_trainer_is_made(tmp_path, monkeypatch, name, value, code):
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        with pytest.raises(Refusal) as refused:
            trainer_of(tmp_path)
        assert refused.value.code == code
    monkeypatch.setenv(name, "no" if "DYNAMO" in name else "2")  # the arguments' own
    assert_unspent(trained_once := trainer_of(tmp_path, max_steps=1))
    trained(trained_once)


def test_an_accelerator_with_parts_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, max_steps=1)
    monkeypatch.setitem(AcceleratorState._shared_state, "torch_tp_plugin", object())
    assert "parallelism_config" in refusal_unspent(trainer, "launcher-parallelism")


def test_without_privacy_the_launcher_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    trainer = trained(trainer_of(tmp_path, noise_multiplier=None, disable_dp=True, max_steps=1))
    assert trainer.state.global_step == 1


def test_autocast_around_a_training_is_refused_and_bf16_does_what_it_was_for(tmp_path):
    trainer = checked_trainer_of(tmp_path, max_steps=1)
    with torch.autocast(trainer.args.device.type, dtype=torch.bfloat16), refused("autocast-around-training"):
        trainer.train()
    assert trainer.privacy.ledger is None
    assert trained(checked_trainer_of(tmp_path, max_steps=1, bf16=True)).state.global_step == 1
