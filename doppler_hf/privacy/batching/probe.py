"""A few real examples for the checks before the first step: alone, and together in one batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.privacy.generators import filled_generators

# Of so many examples, evenly spaced, the smallest and the largest are taken if the lengths of all are not known.
_LOOKED_AT = 16
# Masks of one token in seven of a line of ten are the same so often with probability 1e-19, and a random order of three
# examples leaves the last in its place so often with probability 2e-8.
_TRIALS = 16

Inputs = dict[str, Any]
Collator = Callable[[Sequence[Any]], Inputs]


class Probe(NamedTuple):
    """Examples of different sizes, collated.

    Attributes:
        alone: Each of two examples as a batch of one.
        together: Both in one batch, in the same order.
        three: A batch of three, in which no other dimension is likely to equal the batch size.
    """

    alone: list[Inputs]
    together: Inputs
    three: Inputs


def probe_of(loader: PrivateLoader, *, prepare: Callable[[Inputs], Inputs]) -> Probe:
    """Return a small and a large example of the training set, collated as in training.

    Args:
        loader: The private loader.
        prepare: A function that puts a collated batch on the model's device.

    Raises:
        ValueError: If a random collator mixes examples. One that is not random shows in the gradients.
    """
    small, medium, large = (loader.examples[index] for index in chosen(loader))

    def collate(*examples: Any, trial: int = 0) -> Inputs:
        return collated(loader.collator, examples, trial=trial)

    together, alone = collate(small, large), [collate(small), collate(large)]
    if is_random(loader.collator, [small, large]):
        for trial in range(_TRIALS):
            found = collate(small, large, medium, trial=trial), collate(small, large, altered(medium), trial=trial)
            if not same(*(first_rows(inputs, 2) for inputs in found)):
                raise ValueError(
                    "data_collator must return a row for each example that depends on that example alone, got others for "
                    "the first two of three examples when the third was changed. Use a collator that mixes no examples "
                    "(no MixUp, CutMix or packing)."
                )
        # Alone they would be masked otherwise, so they are cut out of the batch, without their padding.
        alone = [cut_out(together, index, like=inputs) for index, inputs in enumerate(alone)]
    return Probe([prepare(inputs) for inputs in alone], prepare(together), prepare(collate(small, large, medium)))


def collated(collator: Collator, examples: Sequence[Any], *, trial: int = 0) -> Inputs:
    """Return a batch of the examples; what the collator draws depends on `trial` alone."""
    with filled_generators(trial):
        return collator(list(examples))


def is_random(collator: Collator, examples: Sequence[Any]) -> bool:
    """Return whether a collator draws random numbers that show in its batches."""
    first = collated(collator, examples)
    return not all(same(first, collated(collator, examples, trial=trial)) for trial in range(1, _TRIALS))


def chosen(loader: PrivateLoader) -> list[int]:
    """Return the indices of a small, a medium and a large example."""
    lengths, number = loader.lengths, len(loader.examples)
    looked_at = np.unique(np.linspace(0, number - 1, number if lengths is not None else _LOOKED_AT, dtype=int))
    sizes = [size_of(loader.examples[index]) for index in looked_at.tolist()] if lengths is None else lengths
    order = looked_at[np.argsort(sizes, kind="stable")]
    # Not the smallest: the loss of a single token may be none at all.
    return [int(order[int(share * (len(order) - 1))]) for share in (0.1, 0.5, 1.0)]


def size_of(example: Any) -> int:
    """Return how many numbers an example holds; what is no array counts as one."""
    values = example.values() if isinstance(example, Mapping) else example
    return sum(value.numel() if isinstance(value, Tensor) else np.size(value) for value in values)


def altered(example: Any) -> Any:
    """Return an example of the same size with other content: every sequence of numbers in reverse."""

    def backwards(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.flip(tuple(range(value.ndim)))
        return value[::-1] if isinstance(value, list | tuple | np.ndarray) else value

    if isinstance(example, Mapping):
        return {name: backwards(value) for name, value in example.items()}
    return type(example)(backwards(value) for value in example)


def first_rows(inputs: Mapping[str, Any], number: int) -> Inputs:
    """Return the first rows of the tensors of a batch."""
    return {name: value[:number] for name, value in inputs.items() if isinstance(value, Tensor)}


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the tensors of two batches are equal."""
    return all(torch.equal(value, second[name]) for name, value in first.items() if isinstance(value, Tensor))


def cut_out(inputs: Mapping[str, Any], index: int, *, like: Mapping[str, Any]) -> Inputs:
    """Return one example of a batch by itself, cut on the right to the shapes of `like`."""
    return {
        name: value[index : index + 1][tuple(map(slice, like[name].shape))] if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
