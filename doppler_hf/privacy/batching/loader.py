"""The private data loader: Poisson draws, each cut into pieces, each piece a list of micro-batches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from doppler_hf.privacy.batching.micro_batches import WeightedExamples, check_token_budget, collate_piece
from doppler_hf.privacy.batching.sampling import PoissonSampler


def private_loader(
    dataset: Any,
    *,
    sampler: PoissonSampler,
    collator: Callable[[Sequence[Any]], dict[str, Any]],
    max_tokens: int | None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader of the sampler's draws: `sampler.micro_batches` items a draw, each a list of `MicroBatch`.

    It must not pass through `accelerator.prepare`, which shards any batch sampler and repeats examples to make the shards
    equal: an example could then count twice.

    Args:
        dataset: The training set, in the sampler's order.
        sampler: The sampler.
        collator: A function that makes a batch of a list of examples.
        max_tokens: The most padded tokens of a micro-batch, or None for no limit.
        **options: Further arguments of `DataLoader`, such as `num_workers`.

    Raises:
        ValueError: If the budget of tokens cannot be met.
    """
    if max_tokens is not None:
        check_token_budget(sampler.lengths, max_tokens=max_tokens)
    is_weighted = sampler.weights is not None
    return DataLoader(
        dataset if sampler.weights is None else WeightedExamples(dataset, sampler.weights),
        batch_sampler=sampler,
        collate_fn=functools.partial(collate_piece, collator=collator, max_tokens=max_tokens, is_weighted=is_weighted),
        **options,
    )
