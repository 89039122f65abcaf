"""The private data loader: how a draw is cut and collated.

A draw is sorted by the size of the units and by length, and comes in `gradient_accumulation_steps` pieces of equal count,
one for each item of the host's loop. A piece is collated as one micro-batch for each size, or, within a budget of tokens, as
several. It is cut here rather than in the sampler, because a loader's item must be a flat list of indices, and because
nothing but memory depends on the cut.

An example may come in several views, which a random data set or collator makes of it (`augmentation_multiplicity`), and the
mean over all examples of a unit may be clipped once (`clip_unit_mean`). What is clipped together are rows of the batch that
stand together, and no cut parts them.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader

from doppler_hf.privacy.batching.collators import Collator, collated
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN, length_of
from doppler_hf.privacy.batching.fetching import DrawnExamples
from doppler_hf.privacy.batching.sampling import OfStep, PoissonSampler, share_of


class MicroBatch(NamedTuple):
    """The inputs of one forward pass.

    Attributes:
        inputs: The collated examples.
        size: How many rows were collated, one for each view of an example, which must be the number of losses.
        weight: The share of each clipped gradient in its unit's contribution; the same for all, so that no order of the
            collator's rows can give one the share of another.
        rows_each: How many rows, one after another, a clipped gradient is the mean of: the views of an example, or of all
            examples of a unit.
    """

    inputs: dict[str, Any]
    size: int
    weight: float = 1.0
    rows_each: int = 1


@final
class AsDrawn:
    """Tells whether micro-batches are what they were: the same, in their order, each once, and none written into.

    Args:
        piece: The micro-batches of a piece of a draw.
    """

    def __init__(self, piece: Iterable[MicroBatch]) -> None:
        # With the values, so that no other tensor can take the place of one in memory.
        self._found = [(micro_batch, self._values_of(micro_batch)) for micro_batch in piece]

    def are(self, piece: Sequence[MicroBatch]) -> bool:
        """Return whether these are they."""
        return len(piece) == len(self._found) and all(
            micro_batch is before and self._are_same(self._values_of(micro_batch), values)
            for micro_batch, (before, values) in zip(piece, self._found, strict=True)
        )

    @staticmethod
    def _values_of(micro_batch: MicroBatch) -> list[tuple[str, Any, int | None]]:
        return [
            (name, value, value._version if isinstance(value, Tensor) and not value.is_inference() else None)
            for name, value in micro_batch.inputs.items()
        ]

    @staticmethod
    def _are_same(values: list[tuple[str, Any, int | None]], before: list[tuple[str, Any, int | None]]) -> bool:
        return len(values) == len(before) and all(
            now[1] is then[1] and (now[0], now[2]) == (then[0], then[2]) for now, then in zip(values, before, strict=True)
        )


def check_token_budget(
    lengths: Sequence[int] | np.ndarray | None,
    *,
    max_tokens: int,
    views: int = 1,
    counts: Int[np.ndarray, " num_examples"] | None = None,
) -> None:
    """Refuse a budget of tokens that cannot be met by all rows of a clipped gradient, before the first step.

    Args:
        lengths: Lengths of the examples.
        max_tokens: The budget.
        views: How many views an example has.
        counts: How many examples are clipped together with each; None if each is clipped by itself.

    Raises:
        ValueError: If there are no lengths, or an example is longer than the budget.
    """
    if lengths is None:
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} needs a datasets.Dataset with a column {LENGTH_COLUMN!r}. For other "
            "data leave it out, and set the average size of a micro-batch with per_device_train_batch_size."
        )
    if np.max(np.asarray(lengths) * (1 if counts is None else counts)) * views > max_tokens:
        # Neither which example nor how long it is: messages end in logs, and both are about one private example.
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} is less than the length of a single example"
            + (f" times augmentation_multiplicity={views}" if views > 1 else "")
            + (" times the examples of its unit, with clip_unit_mean=True" if counts is not None else "")
            + ". Truncate the examples to that length when they are tokenized, "
            + ("lower max_examples_per_unit, " if counts is not None else "")
            + "or raise the budget."
        )


def cut_by_tokens(lengths: Sequence[int], *, max_tokens: int) -> list[slice]:
    """Cut consecutive examples so that each part, padded to its longest example, has at most `max_tokens` tokens.

    Each part takes as many examples as fit. In ascending order of length this makes the fewest parts possible.

    Args:
        lengths: Lengths of the examples, in their order.
        max_tokens: The budget; an example longer than that makes a part of its own.

    Returns:
        The parts, in order, none of them empty.

    Example:
        >>> cut_by_tokens([2, 2, 3, 7], max_tokens=8)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    parts, start, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and (index + 1 - start) * longest > max_tokens:
            parts.append(slice(start, index))
            start, longest = index, length
    if len(lengths) > start:
        parts.append(slice(start, len(lengths)))
    return parts


def collate_piece(
    examples: OfStep,
    *,
    collator: Collator,
    max_tokens: int | None,
    is_counted: bool = False,
    views: int = 1,
    clip_unit_mean: bool = False,
) -> OfStep:
    """Return the micro-batches of one piece of a draw; none for an empty piece, since collators expect an example.

    Args:
        examples: The piece, in the order of the draw, the views of an example side by side.
        collator: A function that makes a batch of a list of examples.
        max_tokens: The most padded tokens of a micro-batch, or None for a single micro-batch of any size.
        is_counted: Whether each example comes with the size of its unit, as in `DrawnExamples`.
        views: How many views each example has.
        clip_unit_mean: Whether the mean over a unit is clipped, whose examples stand side by side, rather than each.
    """
    by_count = itertools.groupby(examples, key=operator.itemgetter(1)) if is_counted else [(1, examples)]
    micro_batches = []
    for count, group in by_count:
        # Sensitivity: a unit contributes the mean of so many clipped gradients, or, whole in one micro-batch, among units of
        # the same size, one: that of all its rows, each once.
        weight, rows_each = (1.0, views * count) if clip_unit_mean else (share_of(count), views)
        rows = [example for example, _ in group] if is_counted else list(group)
        for part in parts_of(rows, max_tokens=max_tokens, rows_each=rows_each):
            micro_batches.append(MicroBatch(collator(part), len(part), weight, rows_each))
    return OfStep(micro_batches, step=examples.step)


def parts_of(examples: Sequence[Any], *, max_tokens: int | None, rows_each: int) -> list[Sequence[Any]]:
    """Return consecutive parts of the examples within a budget of tokens, without a budget one; of no examples, none."""
    if max_tokens is None:
        return [examples] if examples else []
    lengths = [length_of(example[LENGTH_COLUMN]) for example in examples]
    of_all_rows = [rows_each * max(lengths[start : start + rows_each]) for start in range(0, len(lengths), rows_each)]
    parts = cut_by_tokens(of_all_rows, max_tokens=max_tokens)
    return [examples[part.start * rows_each : part.stop * rows_each] for part in parts]


class PrivateLoader(DataLoader[Any]):
    """A loader of the sampler's draws: `sampler.micro_batches` items a draw, each a list of `MicroBatch`.

    It must not pass through `accelerator.prepare`, which shards any batch sampler and repeats examples to make the shards
    equal: an example could then count twice.

    Args:
        dataset: The training set, in the sampler's order.
        sampler: The sampler.
        collator: A function that makes a batch of a list of examples.
        max_tokens: The most padded tokens of a micro-batch, or None for no limit.
        fill: Fills the global generators; called before each example is fetched, and before each batch is collated.
        views: How many views each example has.
        clip_unit_mean: Whether the mean over a unit is clipped, rather than each example.
        **options: Further arguments of `DataLoader`, such as `num_workers`.

    Attributes:
        examples: The training set.
        lengths: The sampler's.
        collator: As given.
        views: As given.
        is_ordered: Whether what is clipped together is told by the places of the rows.
        is_cut: Whether a draw may come in several micro-batches, by what is in it. By the size of units does not count: that
            is the same in every draw.

    Raises:
        ValueError: If the budget of tokens cannot be met.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: PoissonSampler,
        collator: Collator,
        max_tokens: int | None,
        fill: Callable[[], None],
        views: int = 1,
        clip_unit_mean: bool = False,
        **options: Any,
    ) -> None:
        # Sensitivity: parts of a unit would each contribute up to C.
        assert sampler.keeps_units_whole or not clip_unit_mean
        if max_tokens is not None:
            counts = sampler.counts if clip_unit_mean else None
            check_token_budget(sampler.lengths, max_tokens=max_tokens, views=views, counts=counts)
        self.is_ordered = views > 1 or clip_unit_mean
        self.examples, self.lengths, self.collator, self.views = dataset, sampler.lengths, collator, views
        self.is_cut = sampler.micro_batches > 1 or max_tokens is not None
        is_counted = sampler.counts is not None
        filled = functools.partial(collated, collator=collator, fill=fill)
        super().__init__(
            DrawnExamples(dataset, sampler.counts, fill=fill, views=views),
            batch_sampler=sampler,
            collate_fn=functools.partial(
                collate_piece,
                collator=filled,
                max_tokens=max_tokens,
                is_counted=is_counted,
                views=views,
                clip_unit_mean=clip_unit_mean,
            ),
            **options,
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell a data set that wants to know which epoch begins, as the host's loaders do."""
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)
