"""Batches as in training, drawn again at will: what is random in data set and collator, and whether it couples examples.

Every batch is made from generators whose state depends on the number of a trial alone. So what is random can be told from
what depends on the other examples of a batch.
"""

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doppler_hf.linalg import same
from doppler_hf.privacy.batching.fetching import fetch, fetch_one
from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.privacy.generators import fill_generators, filled_generators, fresh_seed
from doppler_hf.privacy.own_generators import own_generators
from doppler_hf.privacy.rows import has_rows
from doppler_hf.privacy.shared_coins import numbers_drawn

# A random order of three examples leaves the last in its place so often with probability 2e-8.
_TRIALS = 16
# Rows may be mixed now and then: seconds of further trials, of which text takes 1 ms each.
_SECONDS = 0.5

Inputs = dict[str, Any]


def drawn(loader: PrivateLoader, indices: Sequence[int], *, trial: int = 0) -> Inputs:
    """Return a batch of the examples as in training; what is drawn at random depends on `trial` alone."""
    return drawn_and_counted(loader, indices, trial=trial)[0]


def drawn_and_counted(loader: PrivateLoader, indices: Sequence[int], *, trial: int) -> tuple[Inputs, list[int]]:
    """Return a batch, and how many numbers were drawn for it: by examples that are fetched together, and by the collator."""
    fill, made = functools.partial(fill_generators, trial), []
    with filled_generators(trial):
        of_examples = numbers_drawn(lambda: made.extend(fetch(loader.examples, indices, fill=fill, numbers=loader.numbers)))
        fill()
        examples, batches = list(made), []
        of_collator = numbers_drawn(lambda: batches.append(loader.collator(examples)))
    if not isinstance(batches[0], Mapping):
        raise ValueError(
            f"The collator must return a dictionary of tensors, as models of transformers take them, got a "
            f"{type(batches[0]).__name__}. Return one, such as {{'input_ids': ids, 'labels': labels}}."
        )
    return batches[0], [*of_examples, *of_collator]


def batches_of(loader: PrivateLoader, indices: Sequence[int]) -> Callable[[Sequence[int]], Inputs]:
    """Return a function that makes a batch of some examples, by their places among these, from the global generators."""
    # Filled before each example in training, so that what a data set draws is for that example.
    examples = [fetch_one(loader.examples, index) for index in indices]
    # A collator may write into what it is given.
    return lambda places: loader.collator([copy.deepcopy(examples[place]) for place in places])


def copies_of(loader: PrivateLoader, index: int) -> Callable[[int], Inputs]:
    """Return a function that makes a batch of some copies of an example, from the global generators as they are."""
    make = batches_of(loader, [index])
    return lambda number: make([0] * number)


def no_wider(loader: PrivateLoader, indices: Sequence[int], *, than: int) -> list[int]:
    """Return those examples beside which another is not padded further."""
    return [index for index in indices if alike(drawn(loader, [than, index]), drawn(loader, [than, than]))]


def is_padded_beside(loader: PrivateLoader, index: int, large: int) -> bool:
    """Return whether an example is padded further beside a large one, by a mask that tells its padding."""
    alone, beside = drawn(loader, [index, index]), drawn(loader, [index, large])
    mask, wider = alone.get("attention_mask"), beside.get("attention_mask")
    return isinstance(mask, Tensor) and isinstance(wider, Tensor) and mask.ndim > 1 and mask.shape != wider.shape


def is_random_data(loader: PrivateLoader, indices: Sequence[int], *, is_held: bool = False) -> bool:
    """Return whether random numbers are drawn for the batches of a loader, or show in them, seldom as it may be.

    Args:
        loader: The loader.
        indices: Some examples.
        is_held: Whether an example gets the same numbers whenever it is fetched; then only what the collator draws counts.
    """
    first, counts = drawn_and_counted(loader, indices, trial=fresh_seed())
    return any(counts[3:] if is_held else counts) or not all(
        same_batch(first, drawn(loader, indices, trial=fresh_seed())) for _ in range(_TRIALS)
    )


def refuse_own_generators(loader: PrivateLoader, indices: Sequence[int]) -> None:
    """Refuse data whose coins are not those of the global generators, whose state is secret in training.

    Raises:
        ValueError: If an example is another one at the second look, from generators in the same state, or data set or
            collator hold a generator of their own, which may draw for few examples.
    """
    is_repeated = same_batch(drawn(loader, indices), drawn(loader, indices))
    # Only now: some make their generator when they are first called.
    held = {"train_dataset": own_generators(loader.examples), "data_collator": own_generators(loader.collator)}
    culprit = next((name for name, generators in held.items() if generators), None)
    if is_repeated and culprit is None:
        return
    if culprit is None:
        with filled_generators(0):
            fill = functools.partial(fill_generators, 0)
            examples = fetch(loader.examples, indices, fill=fill, numbers=loader.numbers)
            collated = []
            for _ in range(2):
                fill_generators(0)
                collated.append(loader.collator(list(examples)))
        culprit, found = "train_dataset" if same_batch(*collated) else "data_collator", "other numbers from the same state"
    else:
        found = f"a {type(held[culprit][0]).__name__} of its own"
    # Sensitivity: numbers in the order of the draw are others for all that come after one example more.
    raise ValueError(
        f"{culprit} must draw all random numbers from the global generators of torch, NumPy or Python, which are secret in "
        f"a private run, got {found}. In the order of the draw, one example more would change the others. Draw from the "
        "global ones, and delete a generator that is no longer needed."
    )


def refuse_random_mixing(loader: PrivateLoader, pair: Sequence[int], other: int, *, others: Sequence[int]) -> None:
    """Refuse random data in which the rows of examples change with others.

    Args:
        loader: The loader.
        pair: A small and a large example.
        other: Another one, no larger.
        others: Further ones, of each label if there are.

    Raises:
        ValueError: If they do.
    """
    (small, large), seeds = pair, [fresh_seed() for _ in range(_TRIALS)]
    # What no coin changes must not depend on how many examples there are.
    batches = [
        [drawn(loader, indices, trial=seed) for seed in seeds]
        for indices in ([small, large, other], [small], [small, large])
    ]
    if is_mixed_at_random(loader, [small, other, *others], large) or not same_constants(*batches):
        raise ValueError(
            "data_collator must return a row for each example that depends on that example alone, got others for some "
            "examples when the rest were changed or left out. Use a collator that mixes no examples (no MixUp, CutMix or "
            "packing), and counts nothing over the batch."
        )


def refuse_another_order(loader: PrivateLoader, indices: Sequence[int]) -> None:
    """Refuse data that are not random whose rows come in another order than the examples.

    Raises:
        ValueError: If they do.
    """
    # Sensitivity: whose rows are averaged is told from their places alone. If rows of others stood there, an example would
    # contribute to several clipped gradients. Where data are random, it shows as a row that changes with others.
    batch, reversed_batch = drawn(loader, indices), drawn(loader, indices[::-1])
    if not all(same(value.flip(0), reversed_batch[name]) for name, value in batch.items() if has_rows(value, len(indices))):
        raise ValueError(
            "data_collator must return the rows of a batch in the order of its examples with augmentation_multiplicity > 1 "
            "or clip_unit_mean, got another order. What is clipped together are rows that stand together. Sort nothing in "
            "the collator."
        )


def is_mixed_at_random(loader: PrivateLoader, indices: Sequence[int], large: int) -> bool:
    """Return whether rows of random data change with other rows, in whose place other examples are.

    Each trial has numbers of its own, the same for both batches, and changes rows of its own.

    Args:
        loader: The loader.
        indices: A few examples.
        large: One that is larger, the second and the last row of five.
    """
    number, is_aligned = 5, True
    found: list[tuple[int, list[int]]] = []
    until = time.process_time() + _SECONDS
    while len(found) < _TRIALS or time.process_time() < until:
        seed = fresh_seed()
        coins = np.random.default_rng(seed)
        is_changed = coins.random(number) < 0.5
        is_changed[coins.choice([1, number - 1])] = False  # so that the shapes stay
        before = coins.choice(indices, number)
        before[[1, number - 1]] = large
        after = np.where(is_changed, coins.choice(indices, number), before)
        (one, drawn_for_one), (two, drawn_for_other) = (
            drawn_and_counted(loader, rows.tolist(), trial=seed) for rows in (before, after)
        )
        is_aligned &= drawn_for_one == drawn_for_other
        # The same coins lie in the same places only if the shapes are the same.
        rows = [row for row in np.flatnonzero(~is_changed).tolist() if alike(one, two) and not same_row(one, two, row)]
        found.append((int(np.argmax(is_changed)), rows))
    # Where it depends on an example how many numbers are drawn for it, those behind it have others than before.
    return any(row < first or is_aligned for first, rows in found for row in rows)


def same_constants(*batches: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether what is the same in all trials of the first row is the same for several compositions of a batch."""
    names = [name for name, value in batches[0][0].items() if isinstance(value, Tensor) and value.ndim]
    every = [inputs for trials in batches for inputs in trials]
    shapes = {name: [min(sizes) for sizes in zip(*(inputs[name].shape for inputs in every), strict=True)] for name in names}
    firsts = [[cut_out(inputs, 0, shapes) for inputs in trials] for trials in batches]
    for name in names:
        rows = [torch.stack([inputs[name][0] for inputs in trials]).double() for trials in firsts]
        constant = torch.stack([(row == row[0]).all(dim=0) for row in rows]).all(dim=0)
        if not all(torch.allclose(row[0][constant], rows[0][0][constant], rtol=1e-4) for row in rows):
            return False
    return True


def same_row(first: Mapping[str, Any], second: Mapping[str, Any], row: int) -> bool:
    """Return whether an example has the same numbers in two batches."""
    tensors = {name: value for name, value in first.items() if isinstance(value, Tensor) and value.ndim}
    return all(same(value[row], second[name][row]) for name, value in tensors.items() if row < len(value))


def alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the tensors of two batches have the same shapes."""
    return all(value.shape == second[name].shape for name, value in first.items() if isinstance(value, Tensor))


def same_batch(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the tensors of two batches are equal."""
    return all(same(value, second[name]) for name, value in first.items() if isinstance(value, Tensor))


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor."""
    return {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor)}


def cut_out(inputs: Mapping[str, Any], index: int, shapes: Mapping[str, Sequence[int]]) -> Inputs:
    """Return one example of a batch by itself, cut to these shapes, on the left if its mask begins with padding."""
    mask = inputs.get("attention_mask")
    is_left = isinstance(mask, Tensor) and mask.ndim > 1 and not mask[index].flatten()[0]
    found = dict(inputs)
    for name, shape in shapes.items():
        sizes = zip(inputs[name].shape[1:], shape[1:], strict=True)
        cuts = [slice(old - new, old) if is_left else slice(new) for old, new in sizes]
        found[name] = inputs[name][index : index + 1][(slice(None), *cuts)] if shape else inputs[name]
    return found
