"""Whether a loss is a function of its example and of the global generators alone.

These are filled with secret words before each forward pass. A generator with a seed of its own follows the order of the
draw instead, and so does what is remembered of earlier batches.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.linalg import same
from doppler_hf.privacy.clipping.memory import Memory
from doppler_hf.privacy.clipping.plain_autograd import Losses
from doppler_hf.privacy.clipping.writes import nothing_written, of_other_content
from doppler_hf.privacy.generators import filled_generators
from doppler_hf.privacy.own_generators import own_generators, state_of

# Dropout in a model of a few thousand numbers that changes no loss in so many trials has a probability that is none.
_TRIALS = 16
# Stochastic depth leaves out a layer of an example with a probability of a few hundredths, and scales it otherwise.
_MANY_TRIALS = 256


def losses_under(trial: int, losses_of: Losses, inputs: Mapping[str, Any]) -> Float[Tensor, " batch"]:
    """Return the losses of a batch; what is drawn at random depends on `trial` alone."""
    with filled_generators(trial):
        return losses_of(dict(inputs)).detach()


def is_random(losses_of: Losses, inputs: Mapping[str, Any], *, trials: int = _TRIALS) -> bool:
    """Return whether random numbers show in the losses of a batch."""
    first = losses_under(0, losses_of, inputs)
    return any(not same(losses_under(trial, losses_of, inputs), first) for trial in range(1, trials))


def refuse_own_coins(
    model: nn.Module,
    losses_of: Losses,
    *,
    inputs: Mapping[str, Any],
    others: Mapping[str, Any],
    without_coins: Float[Tensor, " batch"],
    tolerance: float,
) -> None:
    """Refuse a loss that depends on what was computed before, or on random numbers that are the same each time.

    Args:
        model: The model, in training mode.
        losses_of: A function that calls the model with inputs and returns one loss per example.
        inputs: A batch.
        others: Another one.
        without_coins: The losses of the first one without dropout.
        tolerance: The difference allowed, relative to the losses.

    Raises:
        ValueError: If it does, or a forward pass writes statistics of the data.
    """
    memory = Memory(losses_of, model)
    with nothing_written(model, again=lambda: losses_of(of_other_content(inputs))):
        first = losses_under(0, losses_of, inputs)
        # Only now: some are made in the first pass.
        generators = own_generators(losses_of, model)
        before = [state_of(generator) for generator in generators]
        losses_under(1, losses_of, others)
        again = losses_under(0, losses_of, inputs)
    # Sensitivity: one that has moved may act on few examples only, so that no loss has changed here.
    has_own = [state_of(generator) for generator in generators] != before
    is_read = memory.is_read(
        lambda: losses_under(0, losses_of, inputs),
        lambda: losses_under(0, losses_of, of_other_content(inputs)),
        tolerance=tolerance,
    )
    if has_own or is_read or not torch.allclose(again, first, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True):
        raise ValueError(
            "A loss must depend on its example and on the global generators of torch, NumPy and Python alone, got another "
            "one after another batch: something of earlier batches is remembered (a bank, a queue, a running mean in an "
            "attribute), or random numbers come from a generator of its own. Remember nothing, and draw from the global "
            "ones."
        )
    is_untouched = torch.allclose(first, without_coins, rtol=1e-5, equal_nan=True)
    if not is_untouched and not is_random(losses_of, inputs) and not is_random(losses_of, others, trials=_MANY_TRIALS):
        raise ValueError(
            "Dropout must follow the secret global generators in a private run, got the same in every forward pass: the "
            "model or compute_per_sample_loss seeds them (torch.manual_seed, set_seed), and one example more would change "
            "the masks of the others. Seed nothing there."
        )


def refuse_neighbours(losses_of: Losses, inputs: Mapping[str, Any], *, tolerance: float) -> None:
    """Refuse random losses of two examples that change with a third one, whose place another takes.

    Args:
        losses_of: As in `refuse_own_coins`.
        inputs: A batch of three examples.
        tolerance: The difference allowed, relative to the losses.

    Raises:
        ValueError: If they do.
    """
    rows = torch.tensor([0, 1, 1])
    changed = {
        name: value[rows.to(value.device)] if isinstance(value, Tensor) and value.ndim and len(value) == 3 else value
        for name, value in inputs.items()
    }
    for trial in range(_TRIALS):
        first, second = (losses_under(trial, losses_of, batch)[:2] for batch in (inputs, changed))
        if not torch.allclose(first, second, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True):
            raise ValueError(
                "The losses of two examples change with a third one in training mode, for the same random numbers, so that "
                "one example more would change all others, and no noise covers that. Let each loss depend on its example "
                "alone (no MixUp in the loss)."
            )
