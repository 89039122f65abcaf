"""The context around the book-keeping engine: what goes in and comes out of it, and that it leaves no trace on the model."""

import copy
import gc
import inspect
import io
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint

from doppler_hf.privacy import ClippedGradients
from tests.support.models import BATCH, batch_for, build, losses_of, rows
from tests.support.pairwise import pairwise
from tests.support.per_example import assert_refused, assert_same_sums, book_keeping
from tests.support.refusals import refused

# Whole models, which pass the same arrays again and again; test_clipped_gradients.py and test_layers.py check shapes.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

CHECKPOINTING = ["off", "non-reentrant", "reentrant"]
FUNCTIONS = ["linear", "embedding", "layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "conv3d"]


def snapshot(model):
    """All that an engine could leave behind: on modules, parameters and classes, and in torch."""
    modules = {
        name: (
            id(module),
            type(module),
            sorted(vars(module)),
            type(module).forward,
            [(key, id(value)) for key, value in vars(module).items() if callable(value)],
            [(key, list(value)) for key, value in vars(module).items() if "hooks" in key and value is not None],
            [(key, id(value)) for key, value in module._parameters.items()],
            [(key, id(value)) for key, value in module._buffers.items()],
            module.training,
        )
        for name, module in model.named_modules(remove_duplicate=False)
    }
    parameters = {
        name: (id(p), type(p), p.requires_grad, p.grad is None, dict(vars(p)), list(p._backward_hooks or ()), p._version)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    process = [getattr(F, name) for name in FUNCTIONS]
    process += [nn.Module.__call__, checkpoint.checkpoint, checkpoint._enable_checkpoint_early_stop, torch.is_grad_enabled()]
    return modules, parameters, process, list(model.state_dict())


def assert_unchanged(model, before, values):
    for ours, theirs in zip(snapshot(model), before, strict=True):
        assert ours == theirs
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, values[name], atol=0.0, rtol=0.0)


def of_model(model):
    """Return the function from rows of the model's batch to their losses."""
    inputs, labels = batch_for(model)
    return lambda index=slice(None): losses_of(model, *rows(inputs, labels, index))


class Interrupted(Exception):
    """What goes wrong in the user's code."""


def interrupt(*args):
    raise Interrupted


def raise_after_the_forward_pass(model, clipped):
    of_model(model)()
    interrupt()


def raise_in_the_forward_pass(model, clipped):
    last = list(model.modules())[-1]
    handle = last.register_forward_hook(interrupt)
    try:
        of_model(model)()
    finally:
        handle.remove()


def raise_in_the_backward_pass(model, clipped):
    def plant(module, args, output):
        if output.requires_grad:  # re-entrant checkpointing comes here without, first
            output.register_hook(interrupt)

    last = [module for module in model.modules() if isinstance(module, nn.LayerNorm)][-1]
    handle = last.register_forward_hook(plant)
    try:
        clipped.backward(of_model(model)())
    finally:
        handle.remove()


def give_too_few_losses(model, clipped):
    clipped.backward(of_model(model)()[:4])


WRONG = [raise_after_the_forward_pass, raise_in_the_forward_pass, raise_in_the_backward_pass, give_too_few_losses]


@pytest.mark.parametrize(
    ("name", "go_wrong", "checkpointing"), pairwise(["roberta", "gpt2-lm", "vit-lora"], WRONG, CHECKPOINTING)
)
def test_an_error_leaves_nothing_for_the_next_batch_and_the_model_as_it_was(name, go_wrong, checkpointing):
    model = build(name, checkpointing=checkpointing)
    of_model(model)()
    before, values = snapshot(model), copy.deepcopy(model.state_dict())
    with book_keeping(model) as clipped:
        clipped.backward(of_model(model)())
        expected = {key: total.clone() for key, total in clipped.sums.items()}
        clipped.reset()
        with pytest.raises((Interrupted, ValueError)):
            go_wrong(model, clipped)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(not total.any() for total in clipped.sums.values())
        clipped.backward(of_model(model)())
        assert_same_sums(clipped.sums, expected, atol=1e-12, rtol=1e-12)
    assert_unchanged(model, before, values)
    with pytest.raises((Interrupted, ValueError)), book_keeping(model) as clipped:
        go_wrong(model, clipped)
    assert_unchanged(model, before, values)


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_is_refused_even_frozen_and_the_model_is_left_as_it_was(frozen):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].requires_grad_(not frozen).train(not frozen)  # a training puts it back into training mode
    before, values = snapshot(model), copy.deepcopy(model.state_dict())
    with refused("layer-mixes-examples", match=r"'1' \(BatchNorm1d\)"), book_keeping(model):
        pass
    assert_unchanged(model, before, values)


# --- other calls in between ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["roberta", "gpt2-lm", "t5-lm", "vit-lora"])
def test_no_losses_change_nothing(name):
    with book_keeping(build(name)) as clipped:
        assert clipped.backward(torch.zeros(0)).shape == (0,)
        assert all(not total.any() for total in clipped.sums.values())
        assert clipped.num_non_finite == 0


def test_losses_must_be_one_per_example():
    model = build("vit")
    losses = of_model(model)
    assert_refused("wrong-shape", model, lambda index: losses(index)[:, None], BATCH)
    assert_refused("wrong-shape", model, lambda index: losses(index).mean(), BATCH)
    assert_refused("other-number-of-losses", model, lambda index: losses(index)[:2], BATCH)


def pickled(model):
    with io.BytesIO() as file:
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, averaged, lambda model: copy.deepcopy(copy.deepcopy(model))])
@pytest.mark.parametrize("name", ["roberta", "t5-lm", "vit-lora", "llama-dora"])
def test_a_copy_computes_with_its_own_weights_and_is_not_watched(name, copied):
    model = build(name)
    losses = of_model(model)
    expected = losses().detach()
    with book_keeping(model) as clipped:
        clipped.backward(losses())
        sums = {key: total.clone() for key, total in clipped.sums.items()}
        clipped.reset()
        other = copied(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
            torch.testing.assert_close(of_model(other)(), expected, atol=1e-12, rtol=1e-12)
        # Its own training, between two steps of the run, leaves nothing for the run.
        of_model(other)().sum().backward()
        assert all(value.grad is not None for value in other.parameters() if value.requires_grad)
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), other.parameters(), strict=True):
                parameter.copy_(first)
        clipped.backward(losses())
        assert_same_sums(clipped.sums, sums, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, averaged, lambda model: copy.deepcopy(copy.deepcopy(model))])
def test_a_copy_is_freed_with_its_last_reference(copied):
    """Without the cyclic collector, which no allocator of a GPU runs."""
    model = build("vit-lora")
    with book_keeping(model):
        gc.collect()
        gc.disable()
        try:
            other = copied(model)
            weights = [weakref.ref(parameter) for parameter in other.parameters()]
            assert inspect.signature(other.forward) == inspect.signature(type(other).forward.__get__(other))
            del other
            assert all(weight() is None for weight in weights)
        finally:
            gc.enable()


@torch.no_grad()
def test_prompts_that_are_padded_on_the_left_are_continued_as_without_the_engine():
    model = build("gpt2-lm").eval()
    model.transformer.wpe.weight.mul_(20.0)  # so that a token follows from its position
    prompts = dict(
        input_ids=torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]]), attention_mask=torch.tensor([[1] * 4, [0, 0, 1, 1]])
    )
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    expected = model.generate(**prompts, **options)
    with ClippedGradients(model, max_grad_norm=1.0):
        found = model.generate(**prompts, **options)
    torch.testing.assert_close(found.logits, expected.logits)
    assert torch.equal(found.sequences, expected.sequences)
