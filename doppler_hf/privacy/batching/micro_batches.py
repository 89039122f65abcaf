"""The private data loader: how a draw is cut and collated.

A draw is sorted by weight and length and comes in `gradient_accumulation_steps` pieces of equal count, one for each item of
the host's loop. A piece is collated as one micro-batch for each weight, or, within a budget of tokens, as several. It is cut
here rather than in the sampler, because a loader's item must be a flat list of indices, and because nothing but memory
depends on the cut.

An example may come in several views, which a random data set or collator makes of it (`augmentation_multiplicity`). They are
rows of the batch that stand together, and no cut parts them.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from doppler_hf.privacy.batching.columns import LENGTH_COLUMN, choices_of, is_stored, length_of
from doppler_hf.privacy.batching.sampling import OfStep, PoissonSampler

Collator = Callable[[Sequence[Any]], dict[str, Any]]


class MicroBatch(NamedTuple):
    """The inputs of one forward pass.

    Attributes:
        inputs: The collated examples.
        size: How many rows were collated, one for each view of an example, which must be the number of losses.
        weight: Each example's share of its unit's contribution; the same for all, so that no order of the collator's rows
            can give one the share of another.
    """

    inputs: dict[str, Any]
    size: int
    weight: float


def fetch(examples: Any, indices: Sequence[int], *, fill: Callable[[], None]) -> list[Any]:
    """Return some examples, each from numbers of its own.

    Args:
        examples: The data set.
        indices: Which of them.
        fill: Fills the global generators; called before each example.

    Raises:
        ValueError: If the data set makes more or fewer rows than one of an example.
    """
    # Sensitivity: in Python's own format each value is converted by itself. Others convert a column at once: with a null in
    # an example's integers, those of all that are fetched with it become floats, and are rounded.
    if is_stored(examples) and examples.format["type"] is None:
        return list(examples.__getitems__(list(indices)))
    found = []
    for index in indices:
        fill()
        found.append(fetch_one(examples, index))
    return found


def fetch_one(examples: Any, index: int) -> Any:
    """Return one example, as torch's loaders fetch it: by the method for lists of them, if there is one.

    Raises:
        ValueError: If the data set makes more or fewer rows than one of it.
    """
    if getattr(examples, "__getitems__", None) is None:
        return examples[index]
    # Sensitivity: alone, since a transform of many could mix them, or make several rows of one, which would contribute more
    # than C, as would those behind it whose places they take.
    rows = list(examples.__getitems__([index]))
    if len(rows) != 1:
        # Not their number: it is about a private example, and messages end in logs.
        raise ValueError(
            "train_dataset must return one row for each example, got more or fewer from its transform. Make a row of each "
            "window or piece before training, as datasets.Dataset.map does, and name what they are pieces of with "
            "privacy_unit_column."
        )
    return rows[0]


def collated(examples: Sequence[Any], *, collator: Collator, fill: Callable[[], None]) -> dict[str, Any]:
    """Return a batch of examples, collated from generators that were filled for it alone."""
    fill()
    return collator(examples)


def of_the_same_columns(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate examples that all have the same columns, and as many choices.

    Sensitivity. The host's collators read off the first example which columns and how many choices there are: one without
    `token_type_ids` would have taken theirs from all others, and one of two choices the third.

    Args:
        examples: The examples.
        collator: One of the host's.

    Raises:
        ValueError: If one lacks a column or a choice of another.
    """
    rows = [example for example in examples if isinstance(example, Mapping)]
    _refuse_other_columns(rows)
    if len({len(choices_of(row.get(LENGTH_COLUMN, ()))) for row in rows}) > 1:
        raise ValueError(
            "Examples of train_dataset must all have the same number of choices, got different ones. Fill up those that "
            "have fewer, or give DopplerTrainer a data_collator of your own."
        )
    return collator(examples)


def made_apart(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate each example by itself, and put the rows together.

    Sensitivity. The host's default collator reads off the first example also whether labels are whole numbers: one with the
    label 3 would have cut 2.5 to 2 for all others.

    Args:
        examples: The examples, of equal sizes.
        collator: The host's default one.

    Raises:
        ValueError: If one lacks a column of another.
    """
    rows = [collator([example]) for example in examples]
    _refuse_other_columns(rows)
    return {name: _joined([row[name] for row in rows]) for name in rows[0]}


def _refuse_other_columns(rows: Iterable[Mapping[str, Any]]) -> None:
    if len({frozenset(row) for row in rows}) > 1:
        raise ValueError(
            "Examples of train_dataset must all have the same columns, got one that lacks a value in some. Give it one, or "
            "give DopplerTrainer a data_collator of your own."
        )


def _joined(rows: Sequence[Tensor]) -> Tensor:
    # Whole numbers beside others stay exactly what they are alone.
    is_mixed = len({row.is_floating_point() for row in rows}) > 1
    return torch.cat([row.double() for row in rows] if is_mixed else list(rows))


class DrawnExamples(Dataset[Any]):
    """A data set whose examples come in views, with their weights, and in lists that know the step of their draw.

    Args:
        examples: The training set.
        weights: One weight per example, shape (num_examples,); None for none.
        fill: Fills the global generators; see `fetch`.
        views: How often each example is fetched.
    """

    def __init__(
        self, examples: Any, weights: Float[np.ndarray, " num_examples"] | None, *, fill: Callable[[], None], views: int = 1
    ) -> None:
        self._examples, self._weights, self._fill, self._views = examples, weights, fill, views

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitems__(self, indices: OfStep) -> OfStep:
        """Return all views of several examples, with their weights."""
        # Sensitivity: here an example's views are made, all of them and side by side, and so they are averaged.
        rows = [index for index in indices for _ in range(self._views)]
        examples = fetch(self._examples, rows, fill=self._fill)
        if self._weights is not None:
            examples = list(zip(examples, self._weights[rows].tolist(), strict=True))
        return OfStep(examples, step=indices.step)


def check_token_budget(lengths: Sequence[int] | np.ndarray | None, *, max_tokens: int, views: int = 1) -> None:
    """Refuse a budget of tokens that cannot be met by all views of an example, before the first step.

    Raises:
        ValueError: If there are no lengths, or an example is longer than the budget.
    """
    if lengths is None:
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} needs a datasets.Dataset with a column {LENGTH_COLUMN!r}. For other "
            "data leave it out, and set the average size of a micro-batch with per_device_train_batch_size."
        )
    if np.max(lengths) * views > max_tokens:
        # Neither which example nor how long it is: messages end in logs, and both are about one private example.
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} is less than the length of a single example"
            + (f" times augmentation_multiplicity={views}" if views > 1 else "")
            + ". Truncate the examples to that length when they are tokenized, or raise the budget."
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
    is_weighted: bool = False,
    views: int = 1,
) -> OfStep:
    """Return the micro-batches of one piece of a draw; none for an empty piece, since collators expect an example.

    Args:
        examples: The piece, in the order of the draw, the views of an example side by side.
        collator: A function that makes a batch of a list of examples.
        max_tokens: The most padded tokens of a micro-batch, or None for a single micro-batch of any size.
        is_weighted: Whether each example comes with its weight, as in `DrawnExamples`.
        views: How many views each example has.
    """
    by_weight = itertools.groupby(examples, key=operator.itemgetter(1)) if is_weighted else [(1.0, examples)]
    micro_batches = (
        MicroBatch(collator(part), len(part), weight)
        for weight, group in by_weight
        for part in parts_of(
            [example for example, _ in group] if is_weighted else list(examples), max_tokens=max_tokens, views=views
        )
    )
    return OfStep(micro_batches, step=examples.step)


def parts_of(examples: Sequence[Any], *, max_tokens: int | None, views: int) -> list[Sequence[Any]]:
    """Return consecutive parts of the examples within a budget of tokens, without a budget one; of no examples, none."""
    if max_tokens is None:
        return [examples] if examples else []
    lengths = [length_of(example[LENGTH_COLUMN]) for example in examples]
    of_all_views = [views * max(lengths[start : start + views]) for start in range(0, len(lengths), views)]
    parts = cut_by_tokens(of_all_views, max_tokens=max_tokens)
    return [examples[part.start * views : part.stop * views] for part in parts]


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
        **options: Further arguments of `DataLoader`, such as `num_workers`.

    Attributes:
        examples: The training set.
        lengths: The sampler's.
        collator: As given.
        views: As given.
        is_cut: Whether a draw may come in several micro-batches, by what is in it. By weight does not count: a unit has the
            same weight in every draw.

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
        **options: Any,
    ) -> None:
        if max_tokens is not None:
            check_token_budget(sampler.lengths, max_tokens=max_tokens, views=views)
        self.examples, self.lengths, self.collator, self.views = dataset, sampler.lengths, collator, views
        self.is_cut = sampler.micro_batches > 1 or max_tokens is not None
        is_weighted = sampler.weights is not None
        filled = functools.partial(collated, collator=collator, fill=fill)
        super().__init__(
            DrawnExamples(dataset, sampler.weights, fill=fill, views=views),
            batch_sampler=sampler,
            collate_fn=functools.partial(
                collate_piece, collator=filled, max_tokens=max_tokens, is_weighted=is_weighted, views=views
            ),
            **options,
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell a data set that wants to know which epoch begins, as the host's loaders do."""
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)
