"""Rows of random data that are as likely whatever other examples are in the batch.

Sensitivity. One example more shifts the places of others and changes their number. Where two examples have rows of the same
joint distribution alone and with others inserted beside them, whichever these are and however many, a coupling leaves their
rows as they are, and the sum moves by at most C. Not so if every second row is mirrored, or exactly half of them.

A look compares copies of an example in batches of two with two of them in larger batches, of copies and other examples, none
of them wider; then beside a wider one, of which only what the mask attends to can be the same. By permutation: without a
difference, which of the batches were larger is as likely as any other choice of half of them. For each tensor, and for the
distance between its two rows, the statistic is the energy distance of two samples X and Y,

    2 E|X - Y| - E|X - X'| - E|Y - Y'|,

after Székely and Rizzo, "Energy statistics" (2013). Of K statistics one must exceed those of all 100 K permutations, which
happens by chance in less than one look of a hundred. Three looks must agree, each with numbers of its own: by chance they do
in less than one start of a million, and beside a wider one in as many again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.generators import fill_generators, filled_generators
from doppler_hf.privacy.rows import has_rows

# Looks that must agree, and one in how many finds a difference by chance.
_LOOKS, _BY_CHANCE = 3, 100
# Most copies in a batch; and how many batches of either kind a look has, of which as many as can be made in that time.
_ROWS, _FEWEST, _MOST, _SECONDS = 17, 32, 256, 1.0
# So many numbers of each row are compared, chosen at random in each look if it has more.
_NUMBERS = 256

Inputs = Mapping[str, Any]


def refuse_other_distribution(make: Callable[[Sequence[int]], Inputs], *, others: int, is_wider: bool = False) -> None:
    """Refuse random rows that depend on their places, on how many there are, or on what is beside them.

    Args:
        make: Makes a batch of examples, from the global generators: 0 is the one whose rows are compared.
        others: How many others there are: 1, 2, ….
        is_wider: Whether rows are padded further beside them, so that only what is attended to is compared.

    Raises:
        ValueError: If they do.
    """
    if all(is_other_beside_others(make, others=others, is_wider=is_wider) for _ in range(_LOOKS)):
        raise ValueError(
            "data_collator must return rows that are as likely whatever other examples are beside them, got others in "
            "larger batches or at other places of a batch. One example more would change the rows of others, which no "
            "noise covers. Draw for each row by itself, treat every place alike, and count nothing over the batch."
        )


def is_other_beside_others(make: Callable[[Sequence[int]], Inputs], *, others: int, is_wider: bool = False) -> bool:
    """Return whether a look finds that two copies of an example have other rows in larger batches than in one of two.

    Args:
        make: As in `refuse_other_distribution`.
        others: As in `refuse_other_distribution`.
        is_wider: As in `refuse_other_distribution`.
    """
    coins = np.random.default_rng()
    seed = int(coins.integers(2**32))
    pairs: list[dict[str, Tensor]] = []
    until = time.process_time() + _SECONDS
    with filled_generators(None):
        while len(pairs) < 2 * _FEWEST or (len(pairs) < 2 * _MOST and time.process_time() < until):
            number = int(coins.integers(3, _ROWS, endpoint=True))
            # In the order in which they are drawn, with others before, between and behind them.
            places = sorted(coins.choice(number, 2, replace=False).tolist())
            larger = coins.integers(others, size=number, endpoint=True)
            larger[places] = 0
            for rows, at in (([0, 0], [0, 1]), (larger.tolist(), places)):
                fill_generators(None)
                inputs = make(rows)
                if is_wider:
                    inputs = of_attended(at, inputs)
                    at, rows = [0, 1], [0, 0]
                pairs.append(rows_at(at, inputs, number=len(rows), seed=seed))
    # What is padded to a random width is another row in a larger batch, and may be.
    samples = [
        torch.stack([pair[name] for pair in pairs])
        for name in set.intersection(*map(set, pairs))
        if len({pair[name].shape for pair in pairs}) == 1
    ]
    distances = [distance for sample in samples for distance in distances_of(sample)]
    is_larger = np.arange(len(pairs)) % 2
    permuted = coins.permuted(np.tile(is_larger, (_BY_CHANCE * len(distances), 1)), axis=1)
    return any(exceeds_all(distance, is_larger, permuted) for distance in distances)


def of_attended(places: Sequence[int], inputs: Inputs) -> dict[str, Tensor]:
    """Return what the mask attends to of the rows at some places, by name, if it is as much of each."""
    mask = inputs["attention_mask"]
    is_attended = [mask[place] != 0 for place in places]
    if len({int(attended.sum()) for attended in is_attended}) > 1:
        return {}
    found = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.shape == mask.shape}
    return {
        name: torch.stack([value[place][attended] for place, attended in zip(places, is_attended, strict=True)])
        for name, value in found.items()
    }


def rows_at(places: Sequence[int], inputs: Inputs, *, number: int, seed: int) -> dict[str, Tensor]:
    """Return some numbers of the rows at some places of a batch, shape (places, numbers), by name.

    Args:
        places: Of the rows.
        inputs: The batch.
        number: Of its rows.
        seed: Of the choice of numbers.
    """
    found = {}
    for name, value in inputs.items():
        if has_rows(value, number):
            rows = value[list(places)].reshape(len(places), -1)
            size = rows.shape[1]
            chosen = np.arange(size) if size <= _NUMBERS else np.random.default_rng(seed).integers(size, size=_NUMBERS)
            found[name] = rows[:, torch.from_numpy(chosen)].double().nan_to_num()
    return found


def distances_of(sample: Float[Tensor, "pairs two numbers"]) -> list[Float[Tensor, "pairs pairs"]]:
    """Return distances between pairs of rows, and differences between the distances within them.

    Each number is divided by its standard deviation, so that all count alike.
    """
    deviation = sample.std(dim=(0, 1))
    scaled = sample / torch.where(deviation > 0, deviation, torch.inf)
    within = (scaled[:, 0] - scaled[:, 1]).norm(dim=1)
    return [
        torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
        for points in (scaled.flatten(1), within[:, None])
    ]


def exceeds_all(distances: Float[Tensor, "pairs pairs"], is_larger: np.ndarray, permuted: np.ndarray) -> bool:
    """Return whether the energy distance between two halves of a sample is above that of every permutation of them.

    Args:
        distances: Between the points of the sample.
        is_larger: To which half each point belongs, 0 or 1, shape (pairs,).
        permuted: The same, permuted, shape (permutations, pairs).
    """
    signs = torch.from_numpy(2.0 * np.concatenate([is_larger[None], permuted]) - 1)
    # But for a factor: equal signs are two points of one half.
    energies = -((signs @ distances) * signs).sum(dim=1)
    return bool(energies[0] > energies[1:].max() + 1e-9 * distances.sum())
