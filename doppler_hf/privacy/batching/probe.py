"""A few real examples for the checks before the first step: alone, and together in one batch."""

import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor

from doppler_hf.privacy.batching.columns import LABELS, labels_of
from doppler_hf.privacy.batching.fetching import fetch
from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.privacy.batching.random_data import (
    Inputs,
    alike,
    batches_of,
    copies_of,
    cut_out,
    drawn,
    is_padded_beside,
    is_random_data,
    no_wider,
    refuse_another_order,
    refuse_own_generators,
    refuse_random_mixing,
    shapes_of,
)
from doppler_hf.privacy.batching.same_distribution import refuse_other_distribution
from doppler_hf.privacy.generators import fill_generators, filled_generators, fresh_seed
from doppler_hf.privacy.rows import some_rows
from doppler_hf.privacy.shared_coins import refuse_order_in_collation, refuse_shared_in_collation

# Of at least so many examples, evenly spaced, sizes are taken if they are not known of all; and so many small and large ones
# are tried until one of each has a gradient.
_LOOKED_AT = 16
# How often those that are random are tried again.
_AGAIN = 4
# The most of which sizes are sorted: more would take long, and not be looked at.
_SORTED = 1 << 17
# So long sizes of further examples are taken, in a random order: all of some thousands that are tokenized on the fly.
_SECONDS_OF_SIZES = 0.2
# Enough for a tenth of them to be one example, while it is none in either part; and seven is a prime, so that of no number
# of classes can each have its share.
CROWD, PART = 16, 7
_LABELS_READ, _SECONDS_OF_LABELS = 2048, 0.1


class Probe(NamedTuple):
    """A small and a large example, collated.

    Attributes:
        alone: Each as a batch of one.
        together: Small twice, and large: three, a number that no other dimension is likely to equal.
        rows: For each row of these, its place in `alone`.
        crowd: Sixteen short examples, different ones and of every label, if there are.
        of_crowd: The first seven of these, and the others.
    """

    alone: list[Inputs]
    together: Inputs
    rows: tuple[int, ...]
    crowd: Inputs
    of_crowd: list[Inputs]


@final
class Probes:
    """Small and large examples of the training set, collated as in training.

    Args:
        loader: The private loader.

    Attributes:
        is_cut: The loader's.
        views: The loader's.
        is_random: Whether data set or collator draw random numbers.

    Raises:
        ValueError: If data set or collator draw random numbers from generators of their own, or are random and mix examples
            or follow their places. If they are not random, it shows in the gradients.
    """

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader, self.is_cut, self.views, self._seed = loader, loader.is_cut, loader.views, fresh_seed()
        indices, sizes = sizes_of(loader)
        smaller, larger = halves(indices, sizes)
        self._knows_all_sizes = loader.lengths is not None or len(indices) == len(loader.examples)
        # Not the smallest first: the loss of a single token may be none at all.
        candidates = [
            [*evenly(smaller[len(smaller) // 5 :]), *evenly(larger)],
            [*evenly(larger[::-1]), *evenly(smaller[::-1])],
        ]
        self._candidates = [itertools.chain(each) for each in candidates]
        self._pair = [next(candidates) for candidates in self._candidates]
        self._middling = int(smaller[-1])
        # Short ones cost less; where only a few were looked at, any.
        is_known = loader.lengths is not None
        short = (
            evenly(smaller[: max(CROWD, len(smaller) // 5)])
            if is_known
            else evenly_of(len(loader.examples), count=_LOOKED_AT).tolist()
        )
        # Each once, if there are enough: an example that outweighs all others in both parts would make them alike.
        different = dict.fromkeys([*of_each_label(loader, most=CROWD // 2), *short])
        self._crowd = list(itertools.islice(itertools.cycle(different), CROWD))
        refuse_own_generators(loader, self._pair)
        if self.is_cut:
            refuse_shared_in_collation(copies_of(loader, self._pair[0]))
        self.is_random = is_random_data(loader, self._pair)
        if self.is_random:
            # One that was masked nowhere may be masked when it comes again.
            self._candidates = [
                itertools.chain(left, *itertools.repeat(again, _AGAIN))
                for left, again in zip(self._candidates, candidates, strict=True)
            ]
            refuse_random_mixing(loader, self._pair, self._middling, others=self._crowd)
            refuse_order_in_collation(copies_of(loader, self._middling))
            rows = [self._middling, *no_wider(loader, self._crowd, than=self._middling)]
            refuse_other_distribution(batches_of(loader, rows), others=len(rows) - 1)
            if is_padded_beside(loader, self._middling, self._pair[1]):
                rows = [self._middling, self._pair[1]]
                refuse_other_distribution(batches_of(loader, rows), others=1, is_wider=True)
        elif loader.is_ordered:
            # The examples of a unit are of several lengths, by which a collator may sort.
            refuse_another_order(loader, [*self._pair, *self._crowd])

    @property
    def knows_largest_batch(self) -> bool:
        """Whether no batch is padded further than those that were looked at: of all sizes known, or all batches alike."""
        small, large = (drawn(self._loader, [index]) for index in self._pair)
        return self._knows_all_sizes or alike(small, large)

    def replace(self, *, small: bool, large: bool) -> None:
        """Take another small or large example.

        Raises:
            StopIteration: If enough of them were tried.
        """
        for place in np.flatnonzero([small, large]):
            self._pair[place] = next(self._candidates[place])
        self._seed = fresh_seed()  # with the same one a collator masks the same places of another example

    def probe(self) -> Probe:
        """Return the examples, collated."""
        small, large = self._pair
        # An example that is masked at random is another one when it comes again.
        rows, places = ((0, 1, 2), (0, 1, 2)) if self.is_random else ((0, 2), (0, 0, 1))
        together, alone = self._with_rows([small, small, large], rows=rows)
        return Probe(alone, together, places, *self._crowd_in_parts())

    def _crowd_in_parts(self) -> tuple[Inputs, list[Inputs]]:
        """Return the crowd, and its two parts."""
        crowd, parts = drawn(self._loader, self._crowd, trial=self._seed), (slice(0, PART), slice(PART, CROWD))
        if self.is_random:  # By themselves they would be masked otherwise.
            of_crowd = [some_rows(crowd, part, number=CROWD) for part in parts]
        else:
            of_crowd = [drawn(self._loader, self._crowd[part], trial=self._seed) for part in parts]
        return crowd, of_crowd

    def larger_crowd(self, rows: int) -> tuple[Inputs, list[Inputs]]:
        """Return a batch of so many rows, which are those of the crowd again and again, and batches of few of them."""
        indices = list(itertools.islice(itertools.cycle(self._crowd), rows))
        parts = [slice(start, start + CROWD) for start in range(0, rows, CROWD)]
        whole = drawn(self._loader, indices, trial=self._seed)
        if self.is_random:
            return whole, [some_rows(whole, part, number=rows) for part in parts]
        return whole, [drawn(self._loader, indices[part], trial=self._seed) for part in parts]

    def crowd_in_batches(self, rows: int) -> Iterator[Inputs]:
        """Return the crowd in batches of so many rows, one after another, and in none of them sorted by length."""
        crowd = self._crowd[::-1]
        for start in range(0, CROWD, rows):
            yield drawn(self._loader, crowd[start : start + rows], trial=self._seed)

    def copies(self, number: int) -> Inputs:
        """Return a batch of that many copies of a small example, as many numbers to each row."""
        return copies_of(self._loader, self._pair[0])(number)

    def _with_rows(self, indices: list[int], *, rows: tuple[int, ...]) -> tuple[Inputs, list[Inputs]]:
        """Return a batch, and some of its examples alone."""
        batch = drawn(self._loader, indices, trial=self._seed)
        alone = [drawn(self._loader, [indices[row]], trial=self._seed) for row in rows]
        if self.is_random:
            # Alone they would be masked otherwise, so they are cut out of the batch, without their padding.
            alone = [cut_out(batch, row, shapes_of(inputs)) for row, inputs in zip(rows, alone, strict=True)]
        return batch, alone


def sizes_of(loader: PrivateLoader) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of examples, all or some, and how many numbers each holds; of lengths the extremes are there."""
    number, until = len(loader.examples), time.monotonic() + _SECONDS_OF_SIZES
    if loader.lengths is not None:
        extremes = [np.argmin(loader.lengths), np.argmax(loader.lengths)]
        indices = np.union1d(evenly_of(number, count=_SORTED), extremes)
        return indices, loader.lengths[indices]
    first = evenly_of(number, count=_LOOKED_AT).tolist()
    others = np.random.default_rng().choice(number, min(number, _SORTED), replace=False)
    sizes: dict[int, int] = {}
    for part in (first, *(others[start : start + _LOOKED_AT].tolist() for start in range(0, len(others), _LOOKED_AT))):
        if sizes and time.monotonic() > until:
            break
        with filled_generators(0):
            fill = functools.partial(fill_generators, 0)
            examples = fetch(loader.examples, part, fill=fill, numbers=loader.numbers)
        sizes.update(zip(part, map(size_of, examples), strict=True))
    known = sorted(sizes)
    return np.array(known), np.array([sizes[index] for index in known])


def size_of(example: Any) -> int:
    """Return how many numbers an example holds; what is no array counts as one."""
    values = example.values() if isinstance(example, Mapping) else example
    return sum(map(_size, values))


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    # The choices of an example are lists of unequal lengths, and so may its arrays and images be.
    if isinstance(value, list) and value and not isinstance(value[0], int | float | str):
        return sum(map(_size, value))
    size = np.size(value)
    # That of a PIL image, which a transform has left beside its features, is its width and height.
    return math.prod(size) if isinstance(size, tuple) else size


def halves(indices: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smaller and the larger examples, ascending; the largest smaller one is smaller, if sizes differ."""
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    limit = ascending[len(order) // 2]
    count = int(np.searchsorted(ascending, limit, side="right" if limit < ascending[-1] else "left"))
    count = count or (len(order) + 1) // 2
    return indices[order[:count]], indices[order[count:] if count < len(order) else order]


def evenly(indices: np.ndarray) -> list[int]:
    """Return some of the indices, evenly spaced."""
    return indices[evenly_of(len(indices), count=_LOOKED_AT)].tolist()


def evenly_of(number: int, *, count: int) -> np.ndarray:
    """Return at most `count` of the numbers below `number`, evenly spaced, ascending."""
    return np.unique(np.linspace(0, number - 1, min(count, number), dtype=int))


def of_each_label(loader: PrivateLoader, *, most: int) -> list[int]:
    """Return a short example of each label that there is among the training set or many of it, of the rarest first."""
    whole = labels_of(loader.examples)
    indices, labels = some_labels(loader.examples) if whole is None else (None, whole)
    counts: Counter[Any] = Counter()
    for start in range(0, len(labels), _SORTED):
        values, numbers = np.unique(labels[start : start + _SORTED], return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    rarest = sorted(counts, key=lambda value: (counts[value], value))[:most]
    places = [np.flatnonzero(labels == value) for value in rarest]
    of_label = [found if indices is None else indices[found] for found in places]
    return [int(found[0] if loader.lengths is None else found[np.argmin(loader.lengths[found])]) for found in of_label]


def some_labels(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of examples and their classes, of as many as can be read in a moment; none of another form."""
    found: dict[int, int] = {}
    number, until = len(dataset), time.process_time() + _SECONDS_OF_LABELS
    with filled_generators(None):
        for index in np.random.default_rng(0).choice(number, min(number, _LABELS_READ), replace=False).tolist():
            example = dataset[index]
            labels = [np.asarray(example[name]) for name in LABELS if isinstance(example, Mapping) and name in example]
            if not labels or labels[0].size != 1 or labels[0].dtype.kind not in "iub" or time.process_time() > until:
                break
            found[index] = int(labels[0].item())
    return np.array([*found], dtype=int), np.array([*found.values()], dtype=int)
