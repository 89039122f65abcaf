"""The private data loader: how the examples of a random batch are fetched and collated.

A batch comes in `gradient_accumulation_steps` pieces, one for each item of the Trainer's loop, and each piece in
micro-batches, which the model is called with (`cutting`).

A random data set or collator may make several views of an example (`augmentation_multiplicity`). The mean over all examples
of a unit may be clipped once (`clip_unit_mean`). Rows that are clipped together are neighbours, and no cut separates them.
"""

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from doppler_hf.errors import Refusal
from doppler_hf.privacy.batching.collators import Collator, copied
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN, choices_of, columns_of_numbers, other_lengths_of
from doppler_hf.privacy.batching.cutting import Cut, PaddedLengths, extremes_in, neighbours_in, padding_multiple, padding_to
from doppler_hf.privacy.batching.sampling import AllocationSampler, Piece, example_weight
from doppler_hf.privacy.randomness import filled_generators


def fetch(examples: Any, indices: Sequence[int], *, numbers: Set[str] | None = None) -> list[Any]:
    """Return some examples, none of which depends on the others; `numbers` are the `columns_of_numbers` of their table."""
    if is_read_together(examples, numbers):
        rows = examples.__getitems__(list(indices))
        return [{name: _copied_value(value) for name, value in row.items()} for row in rows]
    return [fetch_one(examples, index) for index in indices]


def is_read_together(examples: Any, numbers: Set[str] | None) -> bool:
    """Return whether rows may be read together without depending on each other or on the user's code; see `fetch`."""
    if numbers is None or "__getitems__" in getattr(examples, "__dict__", {}):
        return False
    # Sensitivity: Python's own format converts each value by itself. Other formats convert a whole column: one missing value
    # turns the integers of all rows fetched with it into floats. Without missing values, no row depends on the others.
    form = examples.format
    if form["type"] is None:
        return True
    columns = examples.column_names if form["output_all_columns"] else form["columns"]
    # These two formats convert number by number, and without the user's code.
    return form["type"] in ("numpy", "torch") and not form["format_kwargs"] and numbers >= {*columns}


def _copied_value(value: Any) -> Any:
    # Sensitivity: rows that are read together share memory. A collator that writes into one row must not change another.
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def fetch_one(examples: Any, index: int) -> Any:
    """Return one example, as torch's loaders fetch it: with `__getitems__` if the data set has this method."""
    if getattr(examples, "__getitems__", None) is None:
        return examples[index]
    # Sensitivity: the example is fetched alone, since a transform of many could mix them, or make several rows of one.
    rows = list(examples.__getitems__([index]))
    if len(rows) != 1:
        # The message does not have the number of rows, which is about a private example, because messages end up in logs.
        raise Refusal(
            "rows-not-examples",
            "The transform of train_dataset returns more or fewer rows than it is asked for, but each record must be one "
            "row. If you split long records into windows, do it before training, for example with datasets.Dataset.map, "
            "and set privacy_unit_column to a column that names the original record.",
        )
    return rows[0]


class DrawnExamples(Dataset[Any]):
    """A data set of examples with all their views and unit sizes, in lists that know the step of their draw."""

    def __init__(
        self, examples: Any, counts: Int[np.ndarray, " num_examples"] | None, *, numbers: Set[str] | None, views: int = 1
    ) -> None:
        self._examples, self._counts, self._views, self._numbers = examples, counts, views, numbers

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitems__(self, indices: Piece) -> Piece:
        """Return all views of several examples, each with the number of examples that are drawn with its unit."""
        # Sensitivity: all views of an example are made here, and are neighbours, so that they are averaged.
        rows = [index for index in indices for _ in range(self._views)]
        examples = fetch(self._examples, rows, numbers=self._numbers)
        counts = [1] * len(rows) if self._counts is None else self._counts[rows].tolist()
        passes = [each._replace(stop=each.stop * self._views) for each in indices.passes]
        return Piece(zip(examples, counts, strict=True), step=indices.step, passes=passes)


class MicroBatch(NamedTuple):
    """The inputs of one forward pass."""

    inputs: dict[str, Any]
    size: int  # the number of collated rows (one for each view of an example), and so of losses
    # The share of a clipped gradient in its unit's contribution. It is the same for all, since a collator may reorder rows.
    weight: float = 1.0
    # The number of consecutive rows that are clipped together: the views of an example, or of all examples of a unit.
    rows_each: int = 1


def collate_piece(examples: Piece, *, collator: Collator, cut: Cut) -> Piece:
    """Return the micro-batches of a piece of `DrawnExamples`; an empty piece has none, as collators need an example."""
    micro_batches, start = [], 0
    for stop, multiple in examples.passes:
        rows, count = [example for example, _ in examples[start:stop]], examples[start][1]
        # Sensitivity: all units of a pass have `count` examples. A unit contributes the mean of `count` clipped gradients.
        # With clip_unit_mean it is whole in one pass, and contributes one clipped gradient: that of all its rows, each once.
        assert all(other == count for _, other in examples[start:stop])
        weight, rows_each = (1.0, cut.views * count) if cut.clip_unit_mean else (example_weight(count), cut.views)
        padding = None if multiple is None else padding_to(collator, multiple)
        micro_batches.append(MicroBatch((padding or collator)(rows), len(rows), weight, rows_each))
        start = stop
    return Piece(micro_batches, step=examples.step)


class PrivateLoader(DataLoader[Any]):
    """A loader of the sampler's draws, with `sampler.pieces` items per draw, each a list of `MicroBatch`.

    It must not pass through `accelerator.prepare`, which repeats examples to make the shards of a batch sampler equal, so
    that an example could count twice. `options` are further options of `DataLoader`.
    """

    def __init__(self, dataset: Any, *, sampler: AllocationSampler, collator: Collator, cut: Cut, **options: Any) -> None:
        # Sensitivity: if a unit were divided, each of its parts would contribute up to C.
        cut = replace(cut, clip_unit_mean=sampler.keeps_units_whole)
        self._draws, sampler.cut = sampler, cut
        if cut.max_tokens is not None:
            counts = sampler.counts if cut.clip_unit_mean else None
            check_token_budget(sampler.lengths, max_tokens=cut.max_tokens, views=cut.views, counts=counts)
        self.examples, self.lengths, self.collator = dataset, sampler.lengths, collator
        self.numbers = columns_of_numbers(dataset)
        drawn = DrawnExamples(dataset, sampler.counts, numbers=self.numbers, views=cut.views)
        collate = functools.partial(collate_piece, collator=collator, cut=cut)
        super().__init__(drawn, batch_sampler=sampler, collate_fn=collate, **options)

    def learn_padding(self) -> None:
        """Find out how the collator pads, for the cut of the batches to come."""
        sampler = self._draws
        if sampler.lengths is not None:
            (row,), (batch,) = self._collated([int(np.argmin(sampler.lengths))])
            texts, ids = len(choices_of(row[LENGTH_COLUMN])), batch.get(LENGTH_COLUMN)
            least = texts * ids.shape[-1] if isinstance(ids, Tensor) and ids.ndim > 1 else 0
            sampler.cut = replace(
                sampler.cut, texts=texts, least=least, padding_multiple=padding_multiple(self.collator) or 1
            )

    def pad_each_row_alone(self, grid: PaddedLengths) -> bool:
        """Pad every row to a length of its own in the passes to come, and return whether the collator lets that happen.

        Sensitivity. In bfloat16 a row's gradient depends on how far it is padded. If the rows of a pass share one padded
        length, it is a function of the row alone, or of its unit where that is clipped as one.
        """
        sampler = self._draws
        if sampler.lengths is None:
            return False
        lengths, others, cut = sampler.lengths, other_lengths_of(self.examples), replace(sampler.cut, padded=grid)
        ends = [lengths, *(() if others is None else others.T)]
        rows = [int(end) for values in ends for end in (np.argmin(values), np.argmax(values))]
        _, alone = self._collated(*([row] for row in rows))
        if len({repr(_shapes_of(batch)) for batch in alone}) == 1:
            return True  # every row has the same size alone, and so beside any other
        # Columns such as the labels of a summary may be padded to the longest row beside them, or like the inputs, or not at
        # all.
        if others is not None and all(
            self._are_padded_alike(pair, multiple) for pair, multiple in extremes_in(cut, lengths, others)
        ):
            others = None
        pairs = neighbours_in(cut, lengths, others)
        # A collator without the setting is not told to pad, and pads to the longest row of a pass.
        follows = padding_to(self.collator, 1) is not None
        if follows and all(self._are_padded_alike(pair, multiple) for pair, multiple in pairs):
            sampler.cut, sampler.other_lengths = cut, others
            return True
        return False

    def _are_padded_alike(self, pair: Sequence[int], multiple: int) -> bool:
        """Return whether two rows are padded alone to what they are padded to beside each other."""
        if (collator := padding_to(self.collator, multiple)) is None:
            return False
        _, batches = self._collated(pair, [*pair[:1]], [*pair[1:]], collator=collator)
        return all(_shapes_of(batch) == _shapes_of(batches[0]) for batch in batches)

    def _collated(
        self, *groups: Sequence[int], collator: Collator | None = None
    ) -> tuple[list[Any], list[Mapping[str, Any]]]:
        """Return the rows of the first group, and a batch of each group."""
        batches = []
        for group in groups:
            with filled_generators(0):
                rows = fetch(self.examples, group, numbers=self.numbers)
                batches.append((rows, (collator or self.collator)(copied(rows))))
        return batches[0][0], [dict(batch) if isinstance(batch, Mapping) else {} for _, batch in batches]

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch begins if it has `set_epoch`, as Transformers' loaders do."""
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)


def _shapes_of(batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[1:]) for name, value in batch.items() if isinstance(value, Tensor)}


def check_token_budget(
    lengths: Sequence[int] | np.ndarray | None,
    *,
    max_tokens: int,
    views: int = 1,
    counts: Int[np.ndarray, " num_examples"] | None = None,
) -> None:
    """Refuse a budget of tokens into which the rows of one clipped gradient may not fit, before the first step."""
    if lengths is None:
        raise Refusal(
            "no-lengths",
            f"max_tokens_per_micro_batch={max_tokens} needs a datasets.Dataset with a column {LENGTH_COLUMN!r}, whose "
            "lengths it counts. For other data leave max_tokens_per_micro_batch out, and set the average size of a "
            "micro-batch with per_device_train_batch_size.",
        )
    if np.max(np.asarray(lengths) * (1 if counts is None else counts)) * views > max_tokens:
        # The message names neither the example nor its length, because messages end up in logs and examples are private.
        raise Refusal(
            "micro-batch-too-small",
            f"max_tokens_per_micro_batch={max_tokens} is too small for "
            + (f"all augmented versions (augmentation_multiplicity={views}) of " if views > 1 else "")
            + ("all records of a user" if counts is not None else "the longest record")
            + ", which must be in one micro-batch"
            + (" because of clip_unit_mean=True" if counts is not None else "")
            + ". Raise max_tokens_per_micro_batch, or truncate the records when they are tokenized."
            + (" A lower max_examples_per_unit helps, too." if counts is not None else ""),
        )
