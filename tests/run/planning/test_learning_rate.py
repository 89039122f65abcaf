"""A rate that is left out follows from public numbers: it keeps the way that noise takes the weights to what is known."""

import copy
import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import get_scheduler

from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import AllocationSampler, GaussianMechanism
from doppler_hf.run.planning.learning_rate import (
    LARGEST_CHANGE,
    LARGEST_OF_FEW,
    LARGEST_OUTPUT,
    LARGEST_OUTPUT_OF_DATA,
    LARGEST_STEP,
    LARGEST_STEP_OF_ADAPTERS,
    LONGEST_WALK,
    SHORTEST_PATH,
    automatic_learning_rate,
    linear_layers,
    lora_step_limits,
)
from doppler_hf.run.planning.plan import planned_statement
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import arguments, trained, trainer_of
from tests.support.unspent import refusal_unspent

SAMPLER = AllocationSampler(num_examples=1000, expected_batch_size=50)


def rate_of(tmp_path, *, model=None, num_trained=0, shape=WHITE, **overrides):
    args = arguments(tmp_path, **(dict(max_steps=400, learning_rate=None) | overrides))
    statement = planned_statement(args, sampler=SAMPLER, noise_shape=shape)
    model = nn.Linear(1, num_trained, bias=False, device="meta") if model is None else model
    return automatic_learning_rate(args, statement, model=model)


@pytest.mark.parametrize(
    ("shape", "low_pass_filter", "beyond", "base", "within", "schedule"),
    [
        ("white", "none", 0.05, "adam_bc", 0.25, "linear"),
        ("white", "momentum", 0.1, "adam", 0.1, "constant"),
        ("banded:bands=8", "momentum:beta=0.8", 0.3, "adam_bc", 0.25, "linear"),
    ],
)
def test_noise_alone_moves_the_weights_by_the_longest_walk(tmp_path, schedule, shape, low_pass_filter, beyond, base, within):
    """AdamBC's walk is somewhat shorter: its second moment scatters about the noise, and is now and then above its floor.

    A filter makes it longer: the first gradients count for more, since it is corrected for where it begins, and of shaped
    noise they are not taken back in full.
    """
    steps, size = 200, 15_000  # so many that the walk is within 1/√(2·size) = 0.6 % of its expectation
    options = dict(base_optimizer=base, lr_scheduler_type=schedule, max_steps=steps, noise_shape=shape)
    shape = NoiseShape.parse(shape)
    rate = rate_of(tmp_path, num_trained=size * 4000, shape=shape, low_pass_filter=low_pass_filter, **options)
    weights = nn.Parameter(torch.zeros(size))
    mechanism = GaussianMechanism(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1, shape=shape, seed=0)
    optimizer = DopplerOptimizer(
        [weights],
        lr=rate,
        low_pass_filter=LowPassFilter.parse(low_pass_filter),
        base=base,
        noise_std=mechanism.noise_std(steps),
    )
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=steps)
    for step in range(steps):
        weights.grad = mechanism.privatize({"": torch.zeros(size)}, step=step)[""]
        optimizer.step()
        scheduler.step()
    way = weights.detach().norm() * math.sqrt(4000)
    assert LONGEST_WALK * (1 - within) <= way <= LONGEST_WALK * (1 + beyond)


@pytest.mark.parametrize(
    ("layer", "before", "largest"),
    [
        (nn.Linear(20_000, 10), nn.Identity(), LARGEST_OUTPUT_OF_DATA),
        (nn.Conv2d(800, 10, 5), nn.GroupNorm(4, 800, affine=False), LARGEST_OUTPUT),
        (nn.Linear(20_000, 10), nn.Linear(2, 2).requires_grad_(False), LARGEST_OUTPUT),
    ],
    ids=["data", "normalized", "behind a layer"],
)
def test_what_a_layer_makes_of_many_inputs_is_bounded(tmp_path, layer, before, largest):
    model = nn.Sequential(before, copy.deepcopy(layer))
    rate = rate_of(tmp_path, model=model)
    walk = rate / math.sqrt(0.3) * math.sqrt(sum((step / 400) ** 2 for step in range(401)))
    assert walk * math.sqrt(20_000) == pytest.approx(largest)
    model[1].weight.requires_grad_(False)
    assert rate_of(tmp_path, model=model) > 1.5 * rate


def test_few_weights_get_the_largest_step_or_in_a_short_run_the_shortest_path(tmp_path):
    shortest, short, *rates = [rate_of(tmp_path, num_trained=10, max_steps=steps) for steps in (10, 80, 400, 1000)]
    assert shortest == pytest.approx(LARGEST_OF_FEW * math.sqrt(0.3))
    assert short * 40.5 == pytest.approx(SHORTEST_PATH * math.sqrt(0.3))  # (1 + … + 80) / 80 is 40.5
    assert rates == pytest.approx([LARGEST_STEP * math.sqrt(0.3)] * 2)
    shape = NoiseShape.banded(4)
    shaped = rate_of(tmp_path, num_trained=10, shape=shape, noise_shape=str(shape))
    assert shaped == pytest.approx(rates[0] * shape.std(400))


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_gradients_that_are_all_the_same_change_a_hidden_layer_by_no_more_than_the_largest_change(tmp_path, sigma):
    layers = nn.Linear(2, 3), nn.Conv1d(3, 1, 500, bias=False)
    model = nn.Sequential(layers[0].requires_grad_(False), layers[1])
    options = dict(max_steps=10, noise_multiplier=sigma)
    rate = rate_of(tmp_path, model=model, **options)
    # 50 gradients of norm C, C/√1500 in each weight, over the root of a second moment: their own, or the floor under noise.
    step = min(1.0, 50 / math.sqrt(1500) / (math.sqrt(0.3) * sigma))
    assert (step < 1) == (sigma == 4.0)
    assert rate * step * 1500 == pytest.approx(LARGEST_CHANGE)
    assert rate_of(tmp_path, model=layers[1], **options) == pytest.approx(LARGEST_OF_FEW * math.sqrt(0.3))


def test_lora_is_walked_as_far_as_its_layers_own_weights_are_large(tmp_path):
    config = LoraConfig(r=4, lora_alpha=24, target_modules=["query", "dense"])
    model = get_peft_model(tiny_bert(), config)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    walks = list(lora_step_limits(model))
    assert len(walks) == len(layers) > 2
    for layer, walk in zip(layers, walks, strict=True):
        torch.manual_seed(0)
        for factor in (layer.lora_A["default"], layer.lora_B["default"]):
            nn.init.normal_(factor.weight, std=walk)
        added, own = layer.get_delta_weight("default"), layer.get_base_layer().weight
        assert float(added.detach().norm()) == pytest.approx(float(own.detach().norm()), rel=0.25)
    # Of many adapters each may add less, so that all of them together, of independent noise, add what two would.
    walk = min(walks) * (2 / len(walks)) ** 0.25
    assert math.sqrt(len(walks)) * walk**2 == pytest.approx(math.sqrt(2) * min(walks) ** 2)
    rate = rate_of(tmp_path, model=model, lr_scheduler_type="constant")
    assert rate == pytest.approx(math.sqrt(0.3) * walk / 20)
    short = rate_of(tmp_path, model=model, lr_scheduler_type="constant", max_steps=1)
    assert short == pytest.approx(math.sqrt(0.3) * LARGEST_STEP_OF_ADAPTERS)
    assert short < math.sqrt(0.3) * walk
    assert not list(linear_layers(model))
    model.requires_grad_(False).classifier.requires_grad_(True)
    assert not list(lora_step_limits(model))


@pytest.mark.thorough
def test_a_run_without_noise_learns_at_the_rate_that_it_takes(tmp_path):
    """The diagnosis of the documentation: what does not learn without noise is not hindered by it."""
    options = dict(noise_multiplier=0.0, learning_rate=None, per_device_train_batch_size=16, max_steps=60)
    trainer = trained(trainer_of(tmp_path, data=text_data(200), **options))
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    assert sum(losses[-5:]) / 5 < 0.1 < 0.5 < sum(losses[:5]) / 5  # each varies with the size of its batch


def told(tmp_path, capsys, **options):
    trained(trainer_of(tmp_path, max_steps=2, **options)).create_model_card()
    assert "times smaller" not in (tmp_path / "out" / "README.md").read_text("utf-8")
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_rate_a_hundredfold_off_is_refused_before_anything_is_spent(tmp_path, capsys):
    trainer = trainer_of(tmp_path, max_steps=2, learning_rate=2e-5)
    with refused("rate-far-off") as refusal:
        trainer.train()
    assert trainer.privacy.ledger is None
    assert not list((tmp_path / "out").rglob("privacy_ledger.json"))
    pattern = r"learning_rate=2e-05 is (\S+) times smaller than the automatic value \((\S+)\)"
    factor, rule = (float(each.replace(",", "")) for each in re.match(pattern, str(refusal.value)).groups())
    assert factor == pytest.approx(rule / 2e-5, rel=0.01)
    for each in (rule / 101, 101 * rule):
        with refused("rate-far-off"):
            trained(trainer_of(tmp_path, max_steps=2, learning_rate=each))
    # The fixes: left out, it is that rate, of which nothing is told; and if any is allowed the given one.
    output = told(tmp_path / "again", capsys, learning_rate=None)
    words = f"{rule:.3g} (auto: from noise, steps and model size)"
    assert f"learning rate {words}; optimizer: adam_bc" in output
    assert f"- learning_rate: {words}\n" in (tmp_path / "again" / "out" / "README.md").read_text("utf-8")
    assert str(refusal.value).partition(",")[0] in told(tmp_path, capsys, learning_rate=2e-5, rehearse=False)
    assert str(refusal.value).partition(",")[0] in told(tmp_path, capsys, learning_rate=2e-5, allow_any_learning_rate=True)
    assert "allow_any_learning_rate=True" in str(refusal.value)
    assert "bf16" not in output
    for share, is_told in ((1 / 9, False), (1 / 11, True)):
        assert ("times smaller" in told(tmp_path / str(share), capsys, learning_rate=share * rule)) == is_told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(learning_rate=1.0), " times larger than the "),
        (dict(learning_rate=0.0, rehearse=False), "learning_rate=0 trains nothing: leave it out"),
        (
            dict(warmup_steps=2),
            "the warmup covers all 2 steps, so the learning rate never reaches its peak: shorten warmup_steps",
        ),
        (dict(bf16=True), "ε does not cover rounding in bf16: the data_collator pads each row to the longest row of its"),
        (dict(target_epsilon=1e6, noise_multiplier=None), "ε above 10 protects little; usual values are 1 to 8"),
    ],
    ids=str,
)
def test_what_learns_or_protects_little_is_told_of(options, words, tmp_path, capsys):
    assert words in told(tmp_path, capsys, **options)


@pytest.mark.parametrize("options", [{}, dict(base_optimizer="sgd"), dict(learning_rate=-0.0)], ids=str)
def test_a_rate_of_0_is_refused_as_one_that_is_far(options, tmp_path, capsys):
    options = dict(learning_rate=0.0) | options
    message = refusal_unspent(trainer_of(tmp_path, **options), "rate-far-off")
    assert "learning_rate=0 trains nothing, so the run would spend its ε without learning." in message
    # The fixes.
    assert ("Set a learning_rate above 0" in message) == ("base_optimizer" in options)
    trained(trainer_of(tmp_path / "again", **options | dict(learning_rate=0.01 if "base_optimizer" in options else None)))
    assert "learning_rate=0 trains nothing" in told(tmp_path / "allowed", capsys, allow_any_learning_rate=True, **options)


def test_where_there_is_no_rule_nothing_is_told(tmp_path, capsys):
    assert "times smaller" not in told(tmp_path, capsys, learning_rate=1e-9, base_optimizer="sgd")


def never_arriving(trainer):
    """Let a trainer have a schedule of its own, which the arguments do not know."""

    def create_scheduler(num_training_steps, optimizer=None):
        schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: step / 500)
        trainer.lr_scheduler = schedule
        return schedule

    trainer.create_scheduler = create_scheduler
    return trainer


@pytest.mark.parametrize("warmup", [100, 1000, "of its own"])
@pytest.mark.parametrize("rate", [None, *thorough(1e-2)])
def test_a_rate_that_never_arrives_is_refused_as_one_that_is_far(tmp_path, warmup, rate):
    def made(**options):
        if warmup == "of its own":
            return never_arriving(trainer_of(tmp_path, learning_rate=rate, max_steps=12, **options))
        return trainer_of(tmp_path, learning_rate=rate, max_steps=12, **{"warmup_steps": warmup} | options)

    message = refusal_unspent(made(), "rate-never-arrives")
    assert "In this run of 12 steps" in message
    # The fixes.
    trained(made(allow_any_learning_rate=True))
    trained(trainer_of(tmp_path / "again", learning_rate=rate, max_steps=12, warmup_steps=0.1))


@pytest.mark.parametrize(
    "schedule",
    [
        dict(lr_scheduler_type="constant_with_warmup", warmup_steps=3),
        dict(warmup_steps=12),
        dict(lr_scheduler_type="cosine", warmup_steps=0.5),
        dict(lr_scheduler_type="inverse_sqrt", warmup_steps=3),
    ],
    ids=str,
)
def test_a_rate_that_arrives_trains(tmp_path, schedule):
    assert trained(trainer_of(tmp_path, max_steps=12, **schedule)).state.global_step == 12


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)
    assert "a different optimizer" in refusal_unspent(trainer, "another-schedule")
    mine = trainer_of(tmp_path)
    mine.create_optimizer()
    mine.lr_scheduler = torch.optim.lr_scheduler.StepLR(mine.optimizer, 1)
    trained(mine)
