"""A few real examples for the checks before the first step, each alone and all together in one batch."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from doppler_hf.errors import Refusal
from doppler_hf.linalg import same
from doppler_hf.privacy.batching.collators import copied, is_dense, tried
from doppler_hf.privacy.batching.columns import LABELS, is_stored, labels_of
from doppler_hf.privacy.batching.micro_batches import PrivateLoader, fetch
from doppler_hf.privacy.clipping.other_layers import has_rows
from doppler_hf.privacy.known_numbers import refuse_known_numbers_in_collator
from doppler_hf.privacy.losses import ANSWER, TOKENS_OF_AN_ANSWER, is_inside
from doppler_hf.privacy.randomness import filled_generators, next_numbers
from doppler_hf.privacy.token_losses import IGNORED_LABEL

SHORT: Final = 8
_LOOKED_AT, _FURTHER, _FOR_A_LABEL = 16, 64, 1 << 14
# With this many trials, a collator that mixes one batch in ten goes unnoticed in one of 350 starts.
_TRIALS: Final = 64
# So many views of so few examples are all equal by chance in one of millions, if every second view is changed.
_VIEWS: Final = 4
# At most so many lengths are sorted, because more would take long.
_SORTED: Final = 1 << 17
_MIXED_ROWS: Final = (
    "data_collator returns a different row for a record in a batch than for the record alone, or changes the order of "
    "rows. Then one record would change the rows of others. Use a collator that makes each row from its own record alone: "
    "no MixUp, CutMix or packing, no shuffling, and no numbers that are computed from the whole batch."
)

Inputs = dict[str, Any]


@final
class Probe:
    """Eight short examples (of two labels if possible) and the longest one, fetched once and collated on demand.

    Every process of a run chooses the same examples. If lengths are unknown, only some examples are looked at.

    Args:
        loader: The loader of the run.
        checks_numbers: Whether to refuse a collator with random numbers that an attacker may know.

    Attributes:
        short: The short examples.
        longest: The longest example (of those looked at).
        longest_length: Its length, or None if lengths are unknown.
        are_of_one_length: Whether all examples (looked at) have the same length.

    Raises:
        ValueError: If the collator returns no dictionary, has random numbers that an attacker may know, or makes a row that
            depends on other rows of the batch.
    """

    def __init__(self, loader: PrivateLoader, *, checks_numbers: bool = True) -> None:
        self._loader, self._collator = loader, loader.collator
        self._candidates = candidates(loader)
        with filled_generators(0):
            found = fetch(loader.examples, self._candidates, numbers=loader.numbers)
        if loader.lengths is None:
            found.sort(
                key=lambda row: sum(value.numel() for value in self.collated([row]).values() if isinstance(value, Tensor))
            )
        self.longest, self.short = found[-1], rows_with_two_labels(found[:-1] or found)
        shapes = [
            {name: value.shape for name, value in self.collated([row]).items() if isinstance(value, Tensor)}
            for row in (found[0], found[-1])
        ]
        self.longest_length = None if loader.lengths is None else int(loader.lengths.max())
        self.are_of_one_length = (
            shapes[0] == shapes[1] if loader.lengths is None else int(loader.lengths.min()) == self.longest_length
        )
        rows = [*self.short[: SHORT // 2], self.longest, *self.short[SHORT // 2 :]]
        if checks_numbers:
            refuse_known_numbers_in_collator(self._collator, rows)
        first, second = self.collated(rows), self.collated(rows, seed=1)
        stable = [name for name in first if isinstance(first[name], Tensor) and same(first[name], second[name])]
        self._is_random = not all(name in stable for name in first if isinstance(first[name], Tensor))
        parts = [self.collated([row]) for row in rows]

        def is_at(place: int, alone: Inputs) -> bool:
            of_batch = cut_out(first, place, alone, number=len(rows))
            return all(same(of_batch[name], alone[name]) for name in stable if has_rows(first[name], len(rows)))

        # Sensitivity: a row must be the same as for the example alone, and at the place of its example.
        if not all(is_at(place, alone) for place, alone in enumerate(parts)):
            if all(any(is_at(place, alone) for place in range(len(rows))) for alone in parts):
                raise Refusal(
                    "rows-reordered",
                    "data_collator changes the order of rows, for example by sorting them by length, so the gradient of one "
                    "record would be taken for that of another. Return the rows in the order of the list. If the model "
                    "calls torch's pack_padded_sequence, set enforce_sorted=False there.",
                )
            raise Refusal("rows-mixed", _MIXED_ROWS)
        if self._is_random or self._draws():
            self._refuse_mixing()

    @property
    def examples(self) -> Any:
        """Return the data set as the loader has it, with the columns that the collator gets."""
        return self._loader.examples

    def collated(self, rows: Sequence[Any], *, seed: int = 0) -> Inputs:
        """Return a batch of rows; the collator's random numbers depend on the seed only."""
        batch = tried(self._collator, rows, seed=seed)
        if not isinstance(batch, Mapping):
            raise Refusal(
                "batch-not-tensors",
                "data_collator must return a dictionary of tensors, because models of Transformers take their inputs by "
                f"name; got a {type(batch).__name__}. Return a dictionary such as {{'input_ids': ids, 'labels': labels}}.",
            )
        sparse = [name for name, value in batch.items() if isinstance(value, Tensor) and not is_dense(value)]
        if sparse:
            raise Refusal(
                "batch-not-dense",
                f"data_collator must return dense tensors, of which each record has one row; {sparse[0]!r} is a sparse or "
                "nested tensor. Return value.to_dense() of a sparse tensor, and value.to_padded_tensor(0) with a mask of a "
                "nested one.",
            )
        return dict(batch)

    def distinct(self, number: int) -> list[Any]:
        """Return `number` examples: the short ones and further ones, repeated if the data set has fewer."""
        loader = self._loader
        known, more = {*self._candidates}, max(0, number - len(self.short))
        others = [index for index in candidates(loader, count=more + len(known))[:-1] if index not in known]
        with filled_generators(0):
            found = fetch(loader.examples, others[:more], numbers=loader.numbers) if more else []
        return [*itertools.islice(itertools.cycle([*self.short, *found]), number)]

    def further(self) -> Iterator[Inputs]:
        """Return batches of 64 further examples in total, spread evenly over the data set."""
        return map(self.collated, self._rows(_FURTHER))

    def in_batches(self, size: int, *, most_seconds: float) -> Iterator[list[Any]]:
        """Return all examples in lists of `size`; one example of each label comes first, and the others in random order.

        In a data set that makes its rows, labels are looked for in as many rows as are fetched in `most_seconds`.
        """
        places = np.random.default_rng(2).permutation(len(self._loader.examples))
        loader = self._loader
        first = one_of_each_label(loader.examples, places, numbers=loader.numbers, most_seconds=most_seconds)
        places = np.concatenate([first, places[~np.isin(places, first)]])
        return self._fetched(places[start : start + size].tolist() for start in range(0, len(places), size))

    def _rows(self, count: int) -> Iterator[list[Any]]:
        chosen = evenly(np.arange(len(self._loader.examples)), count=count)
        return self._fetched(chosen[start : start + SHORT] for start in range(0, len(chosen), SHORT))

    def _fetched(self, places: Iterable[list[int]]) -> Iterator[list[Any]]:
        for chosen in places:
            with filled_generators(0):
                rows = fetch(self._loader.examples, chosen, numbers=self._loader.numbers)
            yield rows

    def refuse_ignored_labels(self) -> None:
        """Refuse labels that the loss ignores everywhere; if only the chosen examples have such labels, replace one."""
        if not _are_ignored(self.collated([*self.short, self.longest])):
            return
        for rows in self._rows(_FOR_A_LABEL):
            if not _are_ignored(self.collated(rows)):
                self.short[0] = next((row for row in rows if not _are_ignored(self.collated([row]))), rows[0])
                return
        if {*ANSWER} <= self.collated(self.short[:1]).keys():
            raise Refusal(
                "no-labels-count",
                "All start_positions and end_positions of train_dataset are outside of the row's tokens, where the loss "
                f"ignores them, so only noise would change the weights. {TOKENS_OF_AN_ANSWER}.",
            )
        raise Refusal(
            "no-labels-count",
            f"All labels of train_dataset are {IGNORED_LABEL}, which the loss ignores, so only noise would change the "
            "weights. For classification, give each record the number of its class. To train a language model, use the "
            "tokens as labels: train_dataset.map(lambda row: {'labels': row['input_ids']}).",
        )

    def in_parts(self, rows: Sequence[Any]) -> tuple[Inputs, list[Inputs]]:
        """Return a batch of rows, and each row as a batch of one."""
        whole, parts = self.collated(rows), [self.collated([row]) for row in rows]
        if self._is_random:  # Collated alone, the rows would get different random numbers.
            parts = [cut_out(whole, place, part, number=len(rows)) for place, part in enumerate(parts)]
        return whole, parts

    def has_equal_views(self) -> bool:
        """Return whether several views of the same example are equal, for some examples, as the loader would make them."""
        for seed, index in enumerate(self._candidates[:SHORT]):
            with filled_generators(seed):
                rows = fetch(self._loader.examples, [index] * _VIEWS, numbers=self._loader.numbers)
            for value in self.collated(rows, seed=seed).values():
                if has_rows(value, _VIEWS) and not all(same(view, value[0]) for view in value[1:]):
                    return False
        return True

    def _draws(self) -> bool:
        """Return whether the collator draws from the global generators, so that their next numbers change."""
        with filled_generators(0):
            before = next_numbers()
        with filled_generators(0):
            self._collator(copied(self.short))
            return next_numbers() != before

    def _refuse_mixing(self) -> None:
        others = self.short[1:]
        for seed in range(_TRIALS):
            first, second = (
                self.collated([self.short[0], *rest], seed=seed) for rest in (others, [*others[1:], *others[:1]])
            )
            rows = [name for name, value in first.items() if has_rows(value, len(self.short))]
            # Sensitivity: the random numbers at each place are the same, so the row of the first example must be the same.
            if any(first[name].shape == second[name].shape and not same(first[name][0], second[name][0]) for name in rows):
                raise Refusal("rows-mixed", _MIXED_ROWS)


def _are_ignored(batch: Inputs) -> bool:
    labels, own = batch.get("labels"), batch.get("attention_mask", batch.get("input_ids"))
    if {*ANSWER} <= batch.keys() and isinstance(own, Tensor) and own.ndim == 2:
        mask = own if "attention_mask" in batch else torch.ones_like(own)
        return not any(bool(is_inside(batch[name].reshape(-1, 1), mask != 0).any()) for name in ANSWER)
    return isinstance(labels, Tensor) and bool((labels == IGNORED_LABEL).all())


def candidates(loader: PrivateLoader, *, count: int = _LOOKED_AT) -> list[int]:
    """Return some indices: one of the rarest label, short examples, and last the longest.

    If lengths are unknown, the indices are evenly spaced.
    """
    number = len(loader.examples)
    if loader.lengths is None:
        return evenly(np.arange(number), count=count)
    indices = np.array(evenly(np.arange(number), count=_SORTED))
    ascending = indices[np.argsort(loader.lengths[indices], kind="stable")]
    shorter = ascending[loader.lengths[ascending] < loader.lengths.max()]
    shorter = shorter if len(shorter) else ascending
    # The shortest examples are left out, because a text of one token may have no loss.
    short = shorter[len(shorter) // 20 :][: max(count, len(shorter) // 20)]
    chosen = [*evenly(short, count=count), int(np.argmax(loader.lengths))]
    if (labels := labels_of(loader.examples)) is None:
        return chosen
    values, first, counts = np.unique(labels[ascending], return_index=True, return_counts=True)
    return [*([int(ascending[first[np.argmin(counts)]])] if len(values) > 1 else []), *chosen]


def evenly(values: np.ndarray, *, count: int) -> list[int]:
    """Return at most `count` of the values, evenly spaced."""
    return values[np.unique(np.linspace(0, len(values) - 1, min(count, len(values)), dtype=int))].tolist()


def one_of_each_label(examples: Any, places: np.ndarray, *, numbers: Any = None, most_seconds: float) -> np.ndarray:
    """Return the place, among `places`, of one example of each label that is a single number.

    In a data set that makes its rows, labels are looked for in as many rows as are fetched in `most_seconds`.
    """
    if is_stored(examples):
        labels = labels_of(examples)
        return places[:0] if labels is None else places[np.unique(labels[places], return_index=True)[1]]
    found, end = dict[Any, int](), time.monotonic() + most_seconds
    with filled_generators(0):
        for place in places.tolist():
            if time.monotonic() >= end:
                break
            found.setdefault(label_of(fetch(examples, [place], numbers=numbers)[0]), place)
    return np.array([*found.values()], dtype=int)


def rows_with_two_labels(rows: Sequence[Any]) -> list[Any]:
    """Return eight rows, beginning with one of the rarest label; rows are repeated if there are fewer than eight."""
    labels = [label_of(row) for row in rows]
    first = min(range(len(rows)), key=lambda place: labels.count(labels[place]))
    others = [row for place, row in enumerate(rows) if place != first]
    chosen = [rows[first], *others[::2], *others[1::2]]  # This order mixes short and long rows.
    return [chosen[place % len(chosen)] for place in range(SHORT)]


def label_of(row: Any) -> Any:
    """Return the label of an example if it is a single number, else None."""
    found = [np.asarray(row[name]) for name in LABELS if isinstance(row, Mapping) and name in row]
    # Object detection has dictionaries as labels, which cannot be counted.
    return found[0].item() if found and found[0].size == 1 and found[0].dtype != object else None


def cut_out(batch: Inputs, start: int, like: Inputs, *, number: int) -> Inputs:
    """Return rows of a batch of `number` rows in the shapes of `like`; padding is removed on its side of the mask."""
    found, is_left = dict(batch), _is_padded_on_the_left(batch, start, like, number=number)
    for name, value in batch.items():
        if has_rows(value, number):
            found[name] = _cut(value, start, like[name], is_left=is_left)
    return found


def _cut(value: Tensor, start: int, like: Tensor, *, is_left: bool) -> Tensor:
    sizes = zip(value.shape[1:], like.shape[1:], strict=True)
    cuts = [slice(old - new, old) if is_left else slice(new) for old, new in sizes]
    return value[(slice(start, start + like.shape[0]), *cuts)]


def _is_padded_on_the_left(batch: Inputs, start: int, like: Inputs, *, number: int) -> bool:
    mask, alone = batch.get("attention_mask"), like.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim < 2 or not has_rows(mask, number):
        return False
    if mask.ndim == 2:
        return not mask[start].flatten()[0]
    # A mask of pairs of tokens has one of two forms: numbers that are added to the scores, where 0 means that a token is
    # read, or truth values. The row's own part of the mask is the part that is the same as for the row alone.
    if not isinstance(alone, Tensor) or alone.ndim != mask.ndim:
        return False
    sides = [same(_cut(mask, start, alone, is_left=is_left), alone) for is_left in (False, True)]
    return sides == [False, True]
