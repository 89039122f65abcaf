"""A few real examples for the checks before the first step: alone, and together in one batch.

They are fetched and collated as in training, from generators whose state depends on the number of a trial alone. So what is
random can be told from what depends on the other examples of a batch.
"""

import copy
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from doppler_hf.linalg import same
from doppler_hf.privacy.batching.micro_batches import PrivateLoader, fetch, fetch_one
from doppler_hf.privacy.batching.same_distribution import refuse_other_distribution
from doppler_hf.privacy.generators import fill_generators, filled_generators, fresh_seed
from doppler_hf.privacy.own_generators import own_generators
from doppler_hf.privacy.shared_coins import numbers_drawn, refuse_order_in_collation, refuse_shared_in_collation

# Of at least so many examples, evenly spaced, sizes are taken if they are not known of all; and so many small and large ones
# are tried until one of each has a gradient.
_LOOKED_AT = 16
# So long sizes of further examples are taken, in a random order: all of some thousands that are tokenized on the fly.
_SECONDS_OF_SIZES = 0.2
# A random order of three examples leaves the last in its place so often with probability 2e-8.
_TRIALS = 16
# Rows may be mixed now and then: seconds of further trials, of which text takes 1 ms each.
_SECONDS = 0.5
# Enough for a tenth of them to be one example, while it is none in either part; and seven is a prime, so that of no number
# of classes can each have its share.
CROWD, PART = 16, 7
_LABELS_READ, _SECONDS_OF_LABELS = 2048, 0.1
LABELS = ("labels", "label", "label_ids")  # as the host's collators know them

Inputs = dict[str, Any]


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
        prepare: A function that puts a collated batch on the model's device.

    Attributes:
        is_cut: The loader's.
        views: The loader's.
        is_random: Whether data set or collator draw random numbers.

    Raises:
        ValueError: If data set or collator draw random numbers from generators of their own, or are random and mix examples
            or follow their places. If they are not random, it shows in the gradients.
    """

    def __init__(self, loader: PrivateLoader, *, prepare: Callable[[Inputs], Inputs]) -> None:
        self._loader, self._prepare = loader, prepare
        self.is_cut, self.views, self._seed = loader.is_cut, loader.views, fresh_seed()
        indices, sizes = sizes_of(loader)
        smaller, larger = halves(indices, sizes)
        self._knows_all_sizes = len(indices) == len(loader.examples)
        # Not the smallest first: the loss of a single token may be none at all.
        self._candidates = [
            iter([*evenly(smaller[len(smaller) // 5 :]), *evenly(larger)]),
            iter([*evenly(larger[::-1]), *evenly(smaller[::-1])]),
        ]
        self._pair = [next(candidates) for candidates in self._candidates]
        self._middling = int(smaller[-1])
        # Short ones cost less; where only a few were looked at, any.
        is_known = loader.lengths is not None
        short = evenly(smaller[: max(CROWD, len(smaller) // 5)] if is_known else np.arange(len(loader.examples)))
        # Each once, if there are enough: an example that outweighs all others in both parts would make them alike.
        different = dict.fromkeys([*of_each_label(loader)[: CROWD // 2], *short])
        self._crowd = list(itertools.islice(itertools.cycle(different), CROWD))
        refuse_own_generators(loader, self._pair)
        if self.is_cut:
            refuse_shared_in_collation(copies_of(loader, self._pair[0]))
        self.is_random = is_random_data(loader, self._pair)
        if self.is_random:
            refuse_random_mixing(loader, self._pair, self._middling, others=self._crowd)
            refuse_order_in_collation(copies_of(loader, self._middling))
            rows = [self._middling, *no_wider(loader, self._crowd, than=self._middling)]
            refuse_other_distribution(batches_of(loader, rows), others=len(rows) - 1)
            if is_padded_beside(loader, self._middling, self._pair[1]):
                rows = [self._middling, self._pair[1]]
                refuse_other_distribution(batches_of(loader, rows), others=1, is_wider=True)
        elif self.views > 1:
            refuse_another_order(loader, self._crowd)

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
            of_crowd = [rows_of(crowd, part) for part in parts]
        else:
            of_crowd = [drawn(self._loader, self._crowd[part], trial=self._seed) for part in parts]
        return self._prepare(crowd), [self._prepare(inputs) for inputs in of_crowd]

    def copies(self, number: int) -> Inputs:
        """Return a batch of that many copies of a small example, as many numbers to each row."""
        return self._prepare(copies_of(self._loader, self._pair[0])(number))

    def _with_rows(self, indices: list[int], *, rows: tuple[int, ...]) -> tuple[Inputs, list[Inputs]]:
        """Return a batch, and some of its examples alone."""
        batch = drawn(self._loader, indices, trial=self._seed)
        alone = [drawn(self._loader, [indices[row]], trial=self._seed) for row in rows]
        if self.is_random:
            # Alone they would be masked otherwise, so they are cut out of the batch, without their padding.
            alone = [cut_out(batch, row, shapes_of(inputs)) for row, inputs in zip(rows, alone, strict=True)]
        return self._prepare(batch), [self._prepare(inputs) for inputs in alone]


# --- which examples -------------------------------------------------------------------------------------------------------


def sizes_of(loader: PrivateLoader) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of examples, all or some, and how many numbers each holds."""
    if loader.lengths is not None:
        return np.arange(len(loader.lengths)), np.asarray(loader.lengths)
    number, until = len(loader.examples), time.monotonic() + _SECONDS_OF_SIZES
    first = evenly(np.arange(number))
    others = np.random.default_rng().permutation(np.setdiff1d(np.arange(number), first))
    sizes: dict[int, int] = {}
    for part in (first, *(others[start : start + _LOOKED_AT].tolist() for start in range(0, len(others), _LOOKED_AT))):
        if sizes and time.monotonic() > until:
            break
        with filled_generators(0):
            examples = fetch(loader.examples, part, fill=functools.partial(fill_generators, 0))
        sizes.update(zip(part, map(size_of, examples), strict=True))
    indices = sorted(sizes)
    return np.array(indices), np.array([sizes[index] for index in indices])


def size_of(example: Any) -> int:
    """Return how many numbers an example holds; what is no array counts as one."""
    values = example.values() if isinstance(example, Mapping) else example
    return sum(value.numel() if isinstance(value, Tensor) else _size(value) for value in values)


def _size(value: Any) -> int:
    # The choices of an example are lists of unequal lengths.
    return sum(map(len, value)) if isinstance(value, list) and value and isinstance(value[0], list) else np.size(value)


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
    return indices[np.unique(np.linspace(0, len(indices) - 1, _LOOKED_AT, dtype=int))].tolist()


def of_each_label(loader: PrivateLoader) -> list[int]:
    """Return a short example of each label that there is among the training set or many of it, of the rarest first."""
    whole = labels_of(loader.examples)
    indices, labels = some_labels(loader.examples) if whole is None else (np.arange(len(whole)), whole)
    values, counts = np.unique(labels, return_counts=True)
    of_label = [indices[labels == value] for value in values[np.argsort(counts, kind="stable")]]
    return [int(found[0] if loader.lengths is None else found[np.argmin(loader.lengths[found])]) for found in of_label]


def some_labels(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of examples and their classes, of as many as can be read in a moment; none of another form."""
    found: dict[int, int] = {}
    until = time.process_time() + _SECONDS_OF_LABELS
    with filled_generators(None):
        for index in np.random.default_rng(0).permutation(len(dataset))[:_LABELS_READ].tolist():
            example = dataset[index]
            labels = [np.asarray(example[name]) for name in LABELS if isinstance(example, Mapping) and name in example]
            if not labels or labels[0].size != 1 or labels[0].dtype.kind not in "iub" or time.process_time() > until:
                break
            found[index] = int(labels[0].item())
    return np.array([*found], dtype=int), np.array([*found.values()], dtype=int)


def labels_of(dataset: Any) -> np.ndarray | None:
    """Return the class of every example, shape (num_examples,), or None if a data set has no column of classes."""
    features = getattr(dataset, "features", None) or {}
    kinds = {name: str(getattr(features[name], "dtype", "")) for name in LABELS if name in features}
    whole = [name for name, kind in kinds.items() if kind.startswith(("int", "uint", "bool"))]
    return np.asarray(dataset.with_format(None)[whole[0]][:]) if whole else None


# --- random data ----------------------------------------------------------------------------------------------------------


def drawn(loader: PrivateLoader, indices: Sequence[int], *, trial: int = 0) -> Inputs:
    """Return a batch of the examples as in training; what is drawn at random depends on `trial` alone."""
    return drawn_and_counted(loader, indices, trial=trial)[0]


def drawn_and_counted(loader: PrivateLoader, indices: Sequence[int], *, trial: int) -> tuple[Inputs, list[int]]:
    """Return a batch, and how many numbers were drawn for it: by examples that are fetched together, and by the collator."""
    fill, made = functools.partial(fill_generators, trial), []
    with filled_generators(trial):
        of_examples = numbers_drawn(lambda: made.extend(fetch(loader.examples, indices, fill=fill)))
        fill()
        examples, batches = list(made), []
        of_collator = numbers_drawn(lambda: batches.append(loader.collator(examples)))
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
            examples = fetch(loader.examples, indices, fill=functools.partial(fill_generators, 0))
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
    number = len(indices)
    of_rows = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    if not all(same(value.flip(0), reversed_batch[name]) for name, value in of_rows.items() if len(value) == number):
        raise ValueError(
            "data_collator must return the rows of a batch in the order of its examples with augmentation_multiplicity > 1, "
            "got another order. The views of an example are the rows that stand together. Sort nothing in the collator."
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


def rows_of(inputs: Mapping[str, Any], rows: slice) -> Inputs:
    """Return some rows of the crowd."""
    return {
        name: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == CROWD else value
        for name, value in inputs.items()
    }


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
