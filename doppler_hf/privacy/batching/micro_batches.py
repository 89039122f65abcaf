"""The private data loader: how a batch (a *draw*) is cut and collated.

A draw is sorted by the size of the units and by length, and comes in `gradient_accumulation_steps` pieces, one for each item
of the Trainer's loop. A piece is cut into micro-batches of at most `per_device_train_batch_size` rows, so that a large draw
needs no more memory than an ordinary step, and within a budget of tokens. The sum does not depend on the cut, since rows
share no random numbers (`run/checks/model.py`).

A random data set or collator may make several views of an example (`augmentation_multiplicity`). The mean over all examples
of a unit may be clipped once (`clip_unit_mean`). Rows that are clipped together stand together, and no cut separates them.
"""

import functools
import itertools
import operator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.batching.columns import columns_of_numbers
from doppler_hf.privacy.batching.fetching import DrawnExamples
from doppler_hf.privacy.batching.sampling import AllocationSampler, OfStep, share_of
from doppler_hf.privacy.batching.token_budget import check_token_budget, parts_of


class MicroBatch(NamedTuple):
    """The inputs of one forward pass."""

    inputs: dict[str, Any]
    size: int  # the rows that were collated, one for each view of an example: the number of losses
    # The share of a clipped gradient in its unit's contribution, the same for all: the collator may change their order.
    weight: float = 1.0
    # So many rows, one after another, are clipped as one: the views of an example, or of all examples of a unit.
    rows_each: int = 1


def collate_piece(
    examples: OfStep,
    *,
    collator: Collator,
    max_rows: int,
    max_tokens: int | None,
    views: int = 1,
    clip_unit_mean: bool = False,
) -> OfStep:
    """Return the micro-batches of a piece of `DrawnExamples`; none of an empty one, as collators need an example."""
    micro_batches = []
    for count, group in itertools.groupby(examples, key=operator.itemgetter(1)):
        # Sensitivity: a unit contributes the mean of so many clipped gradients, or, whole in one micro-batch, among units of
        # the same size, one: that of all its rows, each once.
        weight, rows_each = (1.0, views * count) if clip_unit_mean else (share_of(count), views)
        rows = [example for example, _ in group]
        for part in parts_of(rows, max_rows=max_rows, max_tokens=max_tokens, rows_each=rows_each):
            micro_batches.append(MicroBatch(collator(part), len(part), weight, rows_each))
    return OfStep(micro_batches, step=examples.step)


class PrivateLoader(DataLoader[Any]):
    """A loader of the sampler's draws: `sampler.micro_batches` items a draw, each a list of `MicroBatch`.

    It must not pass through `accelerator.prepare`, which repeats examples to make the shards of a batch sampler equal: an
    example could then count twice. `options` are further ones of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: AllocationSampler,
        collator: Collator,
        max_rows: int,
        max_tokens: int | None,
        views: int = 1,
        **options: Any,
    ) -> None:
        # Sensitivity: parts of a unit would each contribute up to C.
        clip_unit_mean = sampler.keeps_units_whole
        if max_tokens is not None:
            counts = sampler.counts if clip_unit_mean else None
            check_token_budget(sampler.lengths, max_tokens=max_tokens, views=views, counts=counts)
        self.examples, self.lengths, self.collator = dataset, sampler.lengths, collator
        self.numbers = columns_of_numbers(dataset)
        drawn = DrawnExamples(dataset, sampler.counts, numbers=self.numbers, views=views)
        cut: dict[str, Any] = {
            "max_rows": max_rows,
            "max_tokens": max_tokens,
            "views": views,
            "clip_unit_mean": clip_unit_mean,
        }
        collate = functools.partial(collate_piece, collator=collator, **cut)
        super().__init__(drawn, batch_sampler=sampler, collate_fn=collate, **options)

    def set_epoch(self, epoch: int) -> None:
        """Tell a data set that wants to know which epoch begins, as Transformers' loaders do."""
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)
