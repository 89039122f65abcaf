"""The definition that an engine is checked against: each example alone, with ordinary autograd, then clipped and summed.

Everything here works on a function `losses(index)`, which runs the model on these rows of a batch and returns their
losses, so that the engine and the loop see the same model, data and loss.
"""

import math

import torch

from doppler_hf.preflight.autograd_check.compared_examples import ComparedExamples
from doppler_hf.preflight.autograd_check.comparison import compare
from doppler_hf.preflight.autograd_check.coupling import random_half
from doppler_hf.preflight.autograd_check.without_randomness import away_from_zero, without_dropout
from doppler_hf.privacy import ClippedGradients
from tests.support.refusals import refused

TOLERANCE = dict(atol=1e-10, rtol=1e-10)
NORM_RULES = ["auto", "ghost", "direct"]
CLIPPINGS = ["vanilla", "automatic"]
GRANULARITIES = ["flat", "per_layer"]


def book_keeping(model, *, on_accelerator=False, **options):
    """Return the context of the engine under test."""
    clipped = ClippedGradients(model, engine="book_keeping", **options)
    clipped.on_accelerator = on_accelerator
    return clipped


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients_of_each(model, losses, batch):
    """Return a dictionary for each example: parameter name → gradient of its loss, run as a batch of one."""
    parameters = trainable(model)
    gradients = []
    for index in range(batch):
        loss = losses(slice(index, index + 1)).sum()
        of_example = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients.append(
            {
                name: torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                for (name, parameter), gradient in zip(parameters.items(), of_example, strict=True)
            }
        )
    return gradients


def norm_of(tensors):
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def norms_of(gradients):
    return torch.tensor([norm_of(of_example.values()) for of_example in gradients], dtype=torch.float64)


def median_norm(gradients):
    """A clip norm that clips some of the examples and not the others."""
    return norms_of(gradients).median().item()


def clip_factor(norm, *, bound, clipping):
    if clipping == "automatic":
        return bound / max(norm, 0.01)
    return bound / norm if norm > bound else 1.0


def clip_and_sum(gradients, *, max_grad_norm, clipping="vanilla", granularity="flat"):
    """Return parameter name → Σ clip(gᵢ)."""
    layer = {name: "all" if granularity == "flat" else name.rpartition(".")[0] for name in gradients[0]}
    bound = max_grad_norm / math.sqrt(len(set(layer.values())))
    sums = {name: torch.zeros_like(gradient) for name, gradient in gradients[0].items()}
    for of_example in gradients:
        norms = {group: norm_of(of_example[name] for name in layer if layer[name] == group) for group in set(layer.values())}
        for name, gradient in of_example.items():
            sums[name] += clip_factor(norms[layer[name]], bound=bound, clipping=clipping) * gradient
    return sums


def assert_same_sums(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(
            actual[name], total, **(tolerance or TOLERANCE), msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_matches(
    model, losses, gradients, *, max_grad_norm=None, clipping="vanilla", granularity="flat", tolerance=None, **options
):
    """Assert that the engine's norms and clipped sums are those of `gradients`; by default, half of these are clipped.

    Returns:
        What the engine named as layers without a rule of their own.
    """
    chosen = dict(max_grad_norm=max_grad_norm or median_norm(gradients), clipping=clipping, granularity=granularity)
    with book_keeping(model, **chosen, **options) as clipped:
        for examined in (random_half(len(gradients)), ~random_half(len(gradients))):
            if coupled := clipped.coupled(losses(slice(0, len(gradients))), examined=examined):
                raise ValueError(f"coupled, as the start check finds it: {coupled}")
        norms = clipped.backward(losses(slice(0, len(gradients))))
        torch.testing.assert_close(norms, norms_of(gradients), **(tolerance or TOLERANCE))
        assert_same_sums(clipped.sums, clip_and_sum(gradients, **chosen), **(tolerance or {}))
        assert clipped.num_non_finite == 0
        return clipped.fallbacks


def assert_equals_loop(model, losses, batch, **options):
    return assert_matches(model, losses, gradients_of_each(model, losses, batch), **options)


def assert_equals_loop_or_is_refused(model, losses, batch, *, naming, **options):
    """Assert that the engine is right, or that it says no and whose fault it is; anything else would be silent."""
    gradients = gradients_of_each(model, losses, batch)
    refusal = None
    try:
        assert_matches(model, losses, gradients, **options)
    except ValueError as error:
        refusal = str(error)
    assert refusal is None or naming in refusal


def assert_refused(code, model, losses, batch, *, match=None):
    with refused(code, match=match), book_keeping(model) as clipped:
        clipped.backward(losses(slice(0, batch)))


def compare_with_autograd(model, losses_of, *, alone, together, tolerance=1e-3, **options):
    """Compare the engine's gradients of a batch with autograd's of each example alone, as before a training."""
    with away_from_zero(model), without_dropout(model), ClippedGradients(model, **options) as clipped:
        return compare(clipped, ComparedExamples(model, losses_of, alone, together), tolerance=tolerance)
