"""What a step asks of its device, without one: it waits for nothing, and calls few kernels more than a plain one."""

import itertools
import types
from unittest import mock

import pytest
import torch
import transformers as hf
from torch._subclasses.fake_tensor import unset_fake_temporarily

from doppler_hf import DopplerTrainer
from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.filters.noise_shape import NoiseShape
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import ClippedGradients, GaussianMechanism
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.batching.sampling import Piece
from tests.support.devices import FAR, Asked, far_away
from tests.support.models import batch_for, build, decoder_options, encoder_options, losses_of, vit, with_adapters
from tests.support.optimizers import doppler_optimizer
from tests.support.tiers import further
from tests.support.trainers import On, trainer_of

pytestmark = pytest.mark.usefixtures("unchecked_arrays")
# It has a class of its own from torch 2.12 on.
OF_TWO_DEVICES = "found (at least )?two (different )?devices"


def test_a_tensor_that_was_left_on_the_cpu_is_named_as_by_torch_though_a_row_was_repeated():
    model = build("bert", dtype=torch.float32)
    model.bert.pooler.register_forward_hook(lambda module, args, output: output * torch.ones(output.shape))
    with far_away() as move, ClippedGradients(move(model)), pytest.raises(RuntimeError, match=OF_TWO_DEVICES):
        model(**move(batch_for(model)[0]))


@pytest.mark.parametrize("options", [dict(), dict(floating_point_safe=True), dict(shape=NoiseShape((1.0, -0.5)))])
def test_noise_is_added_without_waiting(options):
    common = dict(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4, device=torch.device(FAR))
    with far_away() as move:
        mechanism = GaussianMechanism(**common, **options)
        for step in range(3):
            with Asked() as asked:
                released = mechanism.privatize({"a": move(torch.zeros(3, 5)), "b": move(torch.zeros(()))}, step=step)
            assert [(each.device.type, each.shape) for each in released.values()] == [(FAR, (3, 5)), (FAR, ())]
            assert asked.waits == []


@pytest.mark.parametrize(
    "options",
    [
        dict(base="adam_bc", noise_std=1e-3, weight_decay=0.1),
        dict(low_pass_filter=PAPER_FILTERS["second-order"], base="adam"),
        dict(rank=2, update_proj_gap=1),
    ],
    ids=["adam_bc", "adam", "galore"],
)
def test_an_optimizer_steps_without_waiting(options):
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((7, 5), (5,), ())]
    with far_away() as move, Asked() as asked:
        weights = move(weights)
        optimizer = doppler_optimizer(weights, lr=0.1, **options)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert asked.waits == []


def test_a_step_of_many_weights_is_one_kernel_after_two_copies():
    """Of the shapes of an encoder, in two groups, as with weight decay on matrices alone."""
    shapes = [*[(32, 32), (32,)] * 4, (32,), (32,), (128, 32), (128,), (32, 128), (32,), (32,), (32,)] * 12
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with far_away() as move:
        weights = move(weights)
        groups = [dict(params=weights[::2], weight_decay=0.1), dict(params=weights[1::2])]
        optimizer = DopplerOptimizer(groups, 0.1, low_pass_filter=PAPER_FILTERS["momentum"], base="adam_bc", noise_std=1e-3)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        with Asked() as asked:
            optimizer.step()
    assert (len(weights), asked.kernels) == (192, 1)


STEPS = {
    "roberta": dict(),
    "gpt2-lm": dict(low_pass_filter="second-order"),
    "vit": dict(report_train_loss="private", floating_point_safe=True),
    "llama-lora": dict(report_train_loss="none"),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    further([*itertools.product(STEPS, ["float32", "bf16"])], quick=[("gpt2-lm", "bf16"), ("vit", "float32")]),
)
def test_a_step_of_the_trainer_waits_for_nothing(name, precision, tmp_path):
    # torch casts nothing for devices that it does not know.
    device = FAR if precision == "float32" else "cpu"
    model = build(name, torch.float32, attention="eager")
    inputs, labels = batch_for(model, torch.float32)
    trainer = trainer_of(tmp_path, model=model, bf16=precision == "bf16", **STEPS[name])
    trainer.current_gradient_accumulation_steps = 2
    clipped = ClippedGradients(model)
    clipped.on_accelerator = clipped.in_kernels = True
    with clipped, far_away(device) as move, mock.patch.object(type(trainer.args), "device", torch.device(device)):
        with unset_fake_temporarily(), Asked():  # as in the start check: which way fits a layer without a rule is seen once
            clipped.backward(losses_of(model, inputs, labels))
        clipped.parameters = {name: weight for name, weight in move(model).named_parameters() if weight.requires_grad}
        run, batch = trainer.privacy, dict(inputs, labels=labels)
        batches = [MicroBatch(move(batch, device="cpu"), len(labels), weight) for weight in (1.0, 0.5)]
        run._engine, run._losses_of, run._sharding = clipped, trainer._losses, trainer._sharding
        run._may_compute = True  # as once a step is reserved
        trainer.optimizer = types.SimpleNamespace(optimizer=trainer.create_optimizer())
        with Asked() as asked:
            run.start_batch(pieces := [Piece(batches, step=0), Piece([], step=0)], step=0)
            losses = [trainer.training_step(model, piece) for piece in pieces]
            trainer.optimizer.optimizer.step()
    assert {loss.device.type for loss in losses} == {parameter.grad.device.type for parameter in clipped.parameters.values()}
    assert losses[0].device.type == device
    assert asked.waits == []


def test_the_loop_of_transformers_waits_for_nothing_beside_the_model(tmp_path):
    """Its models read, once in each forward pass, whether a token is padding."""
    asked, passes = Asked(), []

    def begin(state, **_):
        trainer.privacy.engine.on_accelerator = True  # on a CPU it reads whether all gradients are finite, to save a copy
        if state.global_step == 1:
            asked.__enter__()
            passes.clear()

    def end(state, **_):
        if state.global_step == 1:
            asked.__exit__(None, None, None)

    model = roberta()
    model.register_forward_hook(lambda *_: passes.append(1))
    trainer = trainer_of(
        tmp_path, model=model, max_steps=2, callbacks=[On(step_begin=begin, pre_optimizer_step=end)],
        gradient_accumulation_steps=4, per_device_train_batch_size=4, logging_strategy="no",
    )  # fmt: skip
    trainer.train()
    assert passes
    assert len(asked.waits) <= len(passes)
    assert asked.kernels > 0


class Watched(DopplerTrainer):
    """From the second step on torch raises an error where a step waits, except in the model's own forward pass."""

    def compute_per_sample_loss(self, model, inputs):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return super().compute_per_sample_loss(model, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def training_step(self, *args):
        torch.cuda.set_sync_debug_mode("error" if self.state.global_step else "default")
        try:
            return super().training_step(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_waits_for_no_gpu(tmp_path):
    trainer_of(tmp_path, cls=Watched, use_cpu=False, bf16=True).train()


LARGE = dict(hidden_size=128, num_hidden_layers=12, intermediate_size=256)
TEXT = LARGE | dict(vocab_size=1000, max_position_embeddings=64)
GPT2 = dict(n_embd=128, n_layer=12, n_head=2, vocab_size=1000, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def roberta():
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**encoder_options("sdpa") | TEXT))


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder_options("sdpa") | TEXT, tie_word_embeddings=False))


COUNTED = {
    "roberta": roberta,
    "roberta-lora": lambda: with_adapters(roberta()),
    "llama": llama,
    "llama-lora": lambda: with_adapters(llama()),
    "vit": lambda: vit(**LARGE, image_size=112, patch_size=16),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),  # the head is the embedding table
}


def passes(model, losses, *, on_accelerator, **options):
    """Return what a plain pass asks, and what a private one does after a first one."""
    losses().sum().backward()
    with Asked() as plain:
        model.zero_grad(set_to_none=True)
        losses().sum().backward()
    clipped = ClippedGradients(model, **options)
    clipped.on_accelerator = clipped.in_kernels = on_accelerator
    with clipped:
        with Asked():
            clipped.backward(losses())
        clipped.reset()
        with Asked() as private:
            clipped.backward(losses())
    return plain, private


@pytest.mark.parametrize(
    ("name", "on_accelerator"),
    further(
        [*itertools.product(COUNTED, [False, True])],
        quick=[("roberta", False), ("llama-lora", False), ("roberta-lora", True), ("llama", True), ("vit", True)],
    ),
)
def test_kernels_and_waits(name, on_accelerator):
    torch.manual_seed(0)
    model = COUNTED[name]().train()
    if name == "vit":
        inputs, labels = {"pixel_values": torch.randn(8, 3, 112, 112)}, torch.zeros(8, dtype=torch.long)
    else:
        inputs = {"input_ids": torch.randint(5, 990, (8, 32)), "attention_mask": torch.ones(8, 32, dtype=torch.long)}
        labels = torch.zeros(8, dtype=torch.long) if "roberta" in name else inputs["input_ids"]
    plain, private = passes(model, lambda: losses_of(model, inputs, labels), on_accelerator=on_accelerator)
    most = {False: (2.3, 1.1), True: (1.35, 1.05)}[on_accelerator]["lora" in name]
    ratio = private.kernels / plain.kernels
    waits = len(private.waits) - len(plain.waits)  # a CPU looks once whether all examples are finite
    assert (waits, ratio <= most) == (int(not on_accelerator), True), (plain.kernels, private.kernels, ratio)


DECODER = decoder_options("sdpa") | dict(head_dim=8)
CONVNEXT = dict(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, patch_size=2, num_labels=3)
WITHOUT_WAITS = {
    **{name: lambda name=name: build(name, torch.float32) for name in ("bert", "t5-lm", "roberta-dora", "llama-dora")},
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER)),
    "convnext": lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(**CONVNEXT)),
    "pairs": lambda: build("llama-lora", torch.float32),
}


@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_nothing_waits(name):
    model = WITHOUT_WAITS[name]().train()
    inputs, labels = batch_for(model, torch.float32)
    rows = 2 if name == "pairs" else 1

    def losses():
        return losses_of(model, inputs, labels).unflatten(0, (-1, rows)).sum(dim=1)

    plain, private = passes(model, losses, rows_per_loss=rows, on_accelerator=True)
    assert private.waits == plain.waits
