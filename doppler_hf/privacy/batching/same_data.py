"""Whether examples keep their numbers 0 … N − 1, on all processes and in every epoch.

Shares of processes, turns of shaped noise and units of privacy are by these numbers. An example that has one number here and
another there, or another now than before, is drawn more often than is accounted for.
"""

import hashlib
import io
import pickle
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from doppler_hf.privacy.batching.repeats import sources
from doppler_hf.privacy.batching.sampling import PoissonSampler
from doppler_hf.privacy.generators import filled_generators

# How many examples are looked at, at least and at most, and how long further ones are.
_FEW, _MANY, _SECONDS = 64, 16_384, 0.5
_COINS: Final = random.SystemRandom()
_UNREADABLE: Final = b""  # for an example of what cannot be written down, such as an open file


class KnownRows:
    """Examples at random numbers, as they were at the start, and the order of a data set whose order can be read.

    What is augmented at random is augmented in the same way at each look.

    Args:
        dataset: The data set.
        places: The numbers; by default as many random ones as can be looked at in half a second, and 64 at least.
    """

    def __init__(self, dataset: Any, *, places: Sequence[int] | None = None) -> None:
        self._dataset = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
        self._hashes = self._looked_at(self._any_places() if places is None else places, at_least=len(places or ()))

    @property
    def places(self) -> list[int]:
        """The numbers of the examples."""
        return [*self._hashes]

    def digest(self, sampler: PoissonSampler) -> str:
        """Return a hash of the data set: order, number, lengths and units of all examples, and the known examples.

        Raises:
            ValueError: If no example is the same at a second look.
        """
        digest = hashlib.sha256(f"{sampler.num_examples}".encode())
        # Sensitivity: of units that hold others on another process, an example may be in both, whatever the shares.
        orders = (rows for _, rows in sources(self._dataset, range(sampler.num_examples)))
        for values in (sampler.lengths, sampler.units, sampler.counts, *orders):
            if isinstance(values, range):
                digest.update(repr(values).encode())
            elif values is not None:
                digest.update(np.ascontiguousarray(values).data)
        same = [found for place, found in self._hashes.items() if found != _UNREADABLE and found == self._hash_at(place)]
        if not same:
            raise ValueError(
                "train_dataset must be the same on all processes, got one of which no example is the same at a second look, "
                "so that this cannot be seen. Draw random numbers from the global generators of torch, NumPy or Python."
            )
        digest.update(b"".join(same))
        return digest.hexdigest()

    def refuse_moved(self) -> None:
        """Refuse a data set in which an example has another number than before.

        Raises:
            ValueError: If a known example stands where another one stood.
        """
        some = _COINS.sample(self.places, min(_FEW, len(self.places)))
        if all(self._hash_at(place) == self._hashes[place] for place in some):
            return
        # Augmentation that follows the epoch changes examples too, but makes none of them into another.
        times = Counter(self._hashes.values())
        before = {found: place for place, found in self._hashes.items() if times[found] == 1 and found != _UNREADABLE}
        now = self._looked_at([*some, *self._any_places()])
        if any(before.get(found, place) != place for place, found in now.items()):
            # Sensitivity: its unit, its turn and the process that draws it are those of the number that it had.
            raise ValueError(
                "train_dataset must keep its order during train(), got examples at the numbers of others: units of privacy, "
                "the turns of shaped noise and the shares of processes are by number, so that some would count more often "
                "than is accounted for. Draws are random already: leave the shuffle out."
            )

    def _any_places(self) -> list[int]:
        size = len(self._dataset)
        return _COINS.sample(range(size), min(_MANY, size))

    def _looked_at(self, places: Iterable[int], *, at_least: int = _FEW) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        end = time.monotonic() + _SECONDS
        for place in places:
            if len(found) >= max(_FEW, at_least) and time.monotonic() > end:
                break
            found[place] = self._hash_at(place)
        return found

    def _hash_at(self, place: int) -> bytes:
        written = io.BytesIO()
        with filled_generators(place):  # the same random numbers each time
            example = self._dataset[place]
        try:
            ByContent(written).dump(example)
        except (pickle.PicklingError, AttributeError, TypeError):
            return _UNREADABLE
        return hashlib.sha256(written.getvalue()).digest()


class ByContent(pickle.Pickler):
    """Writes tensors by their numbers: torch writes where they lie in memory too, so that no two looks are the same."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made of an array."""
        return (torch.as_tensor, (value.detach().cpu().double().numpy(),)) if isinstance(value, Tensor) else NotImplemented


def rows_known_to_all(dataset: Any, sampler: PoissonSampler) -> KnownRows:
    """Return the rows that process 0 has chosen to look at, once all processes have the same; called by all of them.

    Raises:
        ValueError: If a process has others, or another order.
    """
    places: list[Any] = [None]
    if dist.get_rank() == 0:
        known = KnownRows(dataset)
        places = [known.places]
    dist.broadcast_object_list(places, src=0)
    if dist.get_rank() > 0:
        known = KnownRows(dataset, places=[place for place in places[0] if place < len(dataset)])
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, known.digest(sampler))
    refuse_different_data(digests)
    return known


def refuse_different_data(digests: Sequence[str]) -> None:
    """Refuse processes with different data, by the digests of all in the order of their ranks."""
    # Sensitivity: an example that stands at one number here and at another there is in two shards, and is drawn twice.
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ValueError(
            f"train_dataset must be the same on all processes, in the same order, got different ones on processes 0 and "
            f"{other}: some examples would count twice, and some never. Shuffle and split with a fixed seed."
        )
