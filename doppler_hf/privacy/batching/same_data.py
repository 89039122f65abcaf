"""Whether examples keep their numbers 0 … N − 1, on all processes and in every epoch.

Shares of processes, turns of shaped noise and units of privacy are by these numbers. An example that has one number here and
another there, or another now than before, is drawn more often than is accounted for.
"""

import contextlib
import hashlib
import io
import pickle
import random
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from doppler_hf.privacy.batching.fetching import fetch_one
from doppler_hf.privacy.batching.repeats import sources
from doppler_hf.privacy.batching.sampling import PoissonSampler
from doppler_hf.privacy.generators import filled_generators

# How many examples are looked at, at least and at most, and for how many seconds; fewer of slow ones.
_FEW, _MANY, _SECONDS = 64, 16_384, 0.5
_FEW_SLOW, _SECONDS_SLOW = 8, 5.0
_SECRET: Final = random.SystemRandom()
_UNREADABLE: Final = b""  # for an example of what cannot be written down, such as an open file


class KnownExamples:
    """Examples at random numbers, as they were at the start, and the order of a data set whose order can be read.

    What is augmented at random is augmented in the same way at each look.

    Args:
        dataset: The data set.
        numbers: The numbers; by default as many random ones as can be looked at in half a second, and 64 at least; of slow
            ones those of five seconds, and 8 at least.
    """

    def __init__(self, dataset: Any, *, numbers: Sequence[int] | None = None) -> None:
        self._dataset = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
        self._orders = self._orders_now()
        self._hashes = self._looked_at(self._any_numbers()) if numbers is None else self._hashes_of(numbers)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the examples."""
        return [*self._hashes]

    def seen(self, sampler: PoissonSampler) -> tuple[str, dict[int, bytes]]:
        """Return a hash of number, order, lengths and units of all examples, and those of known ones that stay the same."""
        digest = hashlib.sha256(f"{sampler.num_examples}".encode() + b"".join(self._orders))
        # Sensitivity: of units that hold others on another process, an example may be in both, whatever the shares.
        for values in (sampler.lengths, sampler.units, sampler.counts):
            if values is not None:
                digest.update(np.ascontiguousarray(values).data)
        again = self._hashes_of(self.numbers)
        same = {number: found for number, found in again.items() if found == self._hashes[number] != _UNREADABLE}
        return digest.hexdigest(), same

    def refuse_moved(self) -> None:
        """Refuse a data set in which examples have other numbers than before.

        Raises:
            ValueError: If its order can be read and is another one, or known examples stand where others stood.
        """
        orders = self._orders_now()
        if orders == self._orders or len(orders) != len(self._orders):  # a cache that fills up may look like rows, too
            some = self._looked_at(_SECRET.sample(self.numbers, min(_FEW, len(self.numbers))))
            if all(found == self._hashes[number] for number, found in some.items()) or not self._have_moved():
                return
        # Sensitivity: its unit, its turn and the process that draws it are those of the number that it had.
        raise ValueError(
            "train_dataset must keep its order during train(), got examples at the numbers of others: units of privacy, the "
            "turns of shaped noise and the shares of processes are by number, so that some would count more often than is "
            "accounted for. Draws are random already: leave the shuffle out."
        )

    def _have_moved(self) -> bool:
        """Return whether examples have come from elsewhere, as many as a shuffle brings: by chance a few may be equal.

        Augmentation that follows the epoch changes examples too, and they are those that are known from then on.
        """
        before, now = self._hashes, self._looked_at(self._any_numbers())
        times_before, times = Counter(before.values()), Counter(now.values())
        home = {found: number for number, found in before.items() if times_before[found] == 1 and found != _UNREADABLE}
        moved = sum(home.get(found, number) != number for number, found in now.items() if times[found] == 1)
        stayed = sum(before.get(number) == found for number, found in now.items())
        in_a_shuffle = len(home) * len(now) / len(self._dataset)
        self._hashes = now
        return moved > stayed and 2 * moved > in_a_shuffle

    def _orders_now(self) -> list[bytes]:
        """Return a hash of each list of numbers by which the data set chooses from another one or from a table."""
        orders = (rows for _, rows in sources(self._dataset, range(len(self._dataset))) if not isinstance(rows, range))
        return [hashlib.sha256(np.ascontiguousarray(rows).data).digest() for rows in orders]

    def _any_numbers(self) -> list[int]:
        size = len(self._dataset)
        return _SECRET.sample(range(size), min(_MANY, size))

    def _looked_at(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Look at the first of some examples, for as long as there is time."""
        begun, found = time.monotonic(), {}
        with contextlib.closing(self._hash_each(numbers)) as hashes:
            for number, each in hashes:
                found[number] = each
                seconds = time.monotonic() - begun
                if (len(found) >= _FEW and seconds > _SECONDS) or (len(found) >= _FEW_SLOW and seconds > _SECONDS_SLOW):
                    break
        return found

    def _hashes_of(self, numbers: Iterable[int]) -> dict[int, bytes]:
        return dict(self._hash_each(numbers))

    def _hash_each(self, numbers: Iterable[int]) -> Generator[tuple[int, bytes], None, None]:
        with filled_generators(0):  # gives the caller's states back
            for number in numbers:
                # The same random numbers each time. To fill the generators would take longer than to look.
                random.seed(number)
                np.random.seed(number % 2**32)
                torch.default_generator.manual_seed(number)
                yield number, _hash_of(fetch_one(self._dataset, number))


def _hash_of(example: Any) -> bytes:
    written = io.BytesIO()
    try:
        ByContent(written).dump(example)
    except Exception:  # whatever a value of the user's says that is asked for its content
        return _UNREADABLE
    return hashlib.sha256(written.getvalue()).digest()


class ByContent(pickle.Pickler):
    """Writes tensors by their values: torch writes where they lie in memory too, so that no two looks are the same."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made of an array."""
        if not isinstance(value, Tensor):
            return NotImplemented
        numbers = value.detach().cpu()
        return torch.as_tensor, ((numbers.float() if numbers.dtype == torch.bfloat16 else numbers).numpy(),)


def known_to_all(dataset: Any, sampler: PoissonSampler) -> KnownExamples:
    """Return the examples that process 0 has chosen to look at, once all processes have the same; called by all of them.

    Raises:
        ValueError: If a process has others, or another order, or no example is the same at a second look.
    """
    numbers: list[Any] = [None]
    if dist.get_rank() == 0:
        known = KnownExamples(dataset)
        numbers = [known.numbers]
    dist.broadcast_object_list(numbers, src=0)
    if dist.get_rank() > 0:
        known = KnownExamples(dataset, numbers=[number for number in numbers[0] if number < len(dataset)])
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, known.seen(sampler))
    refuse_different_data(seen)
    return known


def refuse_different_data(seen: Sequence[tuple[str, Mapping[int, bytes]]]) -> None:
    """Refuse processes with different data, by what all of them have `seen`, in the order of their ranks."""
    (order, first), *others = seen
    stable = set(first).intersection(*(found for _, found in others))
    for rank, (other_order, found) in enumerate(others, start=1):
        # Sensitivity: an example that stands at one number here and at another there is in two shards, and is drawn twice.
        if other_order != order or any(found[number] != first[number] for number in stable):
            raise ValueError(
                f"train_dataset must be the same on all processes, in the same order, got different ones on processes 0 and "
                f"{rank}: some examples would count twice, and some never. Shuffle and split with a fixed seed."
            )
    if not stable:
        raise ValueError(
            "train_dataset must be the same on all processes, got one of which no example is the same at a second look, so "
            "that this cannot be seen. Draw random numbers from the global generators of torch, NumPy or Python."
        )
