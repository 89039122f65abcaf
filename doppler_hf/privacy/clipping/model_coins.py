"""Whether a loss is a function of its example and of the global generators alone.

These are filled with secret words before each forward pass. A generator with a seed of its own follows the order of the
draw instead, and so does what is remembered of earlier batches.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.linalg import same
from doppler_hf.privacy.clipping.held_coins import HeldCoins
from doppler_hf.privacy.clipping.memory import Memory
from doppler_hf.privacy.clipping.plain_autograd import Losses
from doppler_hf.privacy.clipping.writes import nothing_written, of_other_content
from doppler_hf.privacy.generators import filled_generators, fresh_seed
from doppler_hf.privacy.own_generators import own_generators, state_of
from doppler_hf.privacy.rows import some_rows
from doppler_hf.privacy.shared_coins import numbers_drawn

# Dropout in a model of a few thousand numbers that changes no loss in so many trials has a probability that is none.
_TRIALS = 16
# Stochastic depth leaves out a layer of an example with a probability of a few hundredths, and scales it otherwise.
_MANY_TRIALS = 256
# Examples that are compared, a prime, so that what is drawn for each is a multiple of them; and seconds for all trials.
_COMPARED, _SECONDS = 5, 1.5


def losses_under(trial: int, losses_of: Losses, inputs: Mapping[str, Any]) -> Float[Tensor, " batch"]:
    """Return the losses of a batch; what is drawn at random depends on `trial` alone."""
    with filled_generators(trial):
        return losses_of(dict(inputs)).detach()


def is_random(losses_of: Losses, inputs: Mapping[str, Any], *, trials: int = _TRIALS) -> bool:
    """Return whether random numbers show in the losses of a batch."""
    first = losses_under(fresh_seed(), losses_of, inputs)
    return any(not same(losses_under(fresh_seed(), losses_of, inputs), first) for _ in range(1, trials))


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


def refuse_neighbours(losses_of: Losses, inputs: Mapping[str, Any], *, number: int, tolerance: float) -> None:
    """Refuse random losses of some examples that change with others, in whose place other examples are.

    What is drawn for each row is held, and what rows share is drawn anew in each trial: behind a coin that seldom falls may
    lie a mixing of rows.

    Args:
        losses_of: As in `refuse_own_coins`.
        inputs: A batch.
        number: Of how many examples; the first ones are compared, and the rest take their places.
        tolerance: The difference allowed, relative to the losses.

    Raises:
        ValueError: If they do.
    """
    is_aligned = True
    found: list[tuple[int, list[int]]] = []
    until = time.process_time() + _SECONDS
    while len(found) < _TRIALS // 2 or (len(found) < _MANY_TRIALS and time.process_time() < until):
        seed = fresh_seed()
        coins = np.random.default_rng(seed)
        is_changed = coins.random(_COMPARED) < 0.5
        is_changed[coins.integers(_COMPARED)] = False
        rows = np.arange(_COMPARED)
        others = np.where(is_changed, coins.permutation(np.arange(_COMPARED, number))[:_COMPARED], rows)
        (one, drawn_for_one), (two, drawn_for_other) = (
            _held_losses(seed, losses_of, some_rows(inputs, which.tolist(), number=number)) for which in (rows, others)
        )
        is_aligned &= drawn_for_one == drawn_for_other
        close = torch.isclose(one, two, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True).cpu().numpy()
        found.append((int(np.argmax(is_changed)), np.flatnonzero(~is_changed & ~close).tolist()))
    # Where it depends on an example how many numbers are drawn for it, those behind it have others than before.
    if any(row < first or is_aligned for first, rows in found for row in rows):
        raise ValueError(
            "The losses of some examples change with others in training mode, for the same random numbers, so that one "
            "example more would change all others, and no noise covers that. Let each loss depend on its example alone (no "
            "MixUp in the loss)."
        )


def _held_losses(seed: int, losses_of: Losses, inputs: Mapping[str, Any]) -> tuple[Tensor, tuple[int, int, int]]:
    """Return losses for the numbers of a seed, those of single rows held, and how many were drawn."""
    losses: list[Tensor] = []
    with filled_generators(seed), torch.no_grad(), HeldCoins(_COMPARED):
        drawn = numbers_drawn(lambda: losses.append(losses_of(dict(inputs))))
    return losses[0], drawn
