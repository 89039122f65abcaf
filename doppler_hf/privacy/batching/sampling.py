"""Random allocation: in a round of steps, every unit of privacy takes part at most once, in a turn chosen in secret.

A unit is one example, or all examples of one user. If B of N units are expected in a step, a round has n = ⌊N/B⌋ steps,
about an epoch. In each round, a unit draws one of n turns, each with probability q = B/N, or none. The accountant's theorem
covers this sampling only: no shuffle, no batches of fixed size, and no sampler that another layer shards again. One draw
(random batch) belongs to one optimizer step. It is cut into micro-batches only to fit into memory.

Noise that is shaped over b steps needs units that take part at most once in b steps (`filters.noise_shape`). Each unit then
belongs to one of b groups, which take turns at the steps. A round has n = ⌊N/(bB)⌋ turns of each group, with probability
b·q.

With Poisson sampling, a round is a single step, which draws every unit with probability q, independently of earlier steps.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt32
from torch.utils.data import Sampler

from doppler_hf.deprecated import with_earlier_parameters
from doppler_hf.errors import Failure, Refusal
from doppler_hf.privacy.accounting.accounting import Sampling
from doppler_hf.privacy.batching.columns import labels_of
from doppler_hf.privacy.batching.cutting import Cut, Pass
from doppler_hf.privacy.batching.data_digest import DataDigest, digests_of_fields
from doppler_hf.privacy.randomness import WordsByNumber, bit_stream

_AT_ONCE = 1 << 20  # The random words of so many units are in memory at the same time.


class Piece(list[Any]):
    """A list of indices, examples or micro-batches that knows its optimizer step, counted from 0.

    Indices and examples also know the passes into which they are cut.
    """

    def __init__(self, items: Iterable[Any], *, step: int, passes: Sequence[Pass] = ()) -> None:
        super().__init__(items)
        self.step, self.passes = step, passes


def example_weight(count: int) -> float:
    """Return the weight of one of `count` examples in the contribution of their unit, which is the mean."""
    # Sensitivity: a unit is drawn with `count` examples. Each of their clipped gradients, of norm at most C, has the weight
    # 1/count, rounded towards 0, so that the weights of a unit add up to at most 1 in float32 too, and its contribution has
    # a norm of at most C.
    return 1.0 if count == 1 else float(np.nextafter(np.float32(1.0 / count), np.float32(0.0)))


@with_earlier_parameters
class AllocationSampler(Sampler[list[int]]):
    """A batch sampler of random batches (draws): every `pieces` consecutive lists are one draw over the whole data set.

    The accountant reads `sample_rate` and `steps_per_epoch` from the sampler. An empty piece is yielded as an empty list,
    and an empty draw is a step like any other, because skipping it would make the number of steps depend on the data.

    Args:
        num_examples: The size of the data set.
        expected_batch_size: B, the expected number of units in a draw over all processes; 1 ≤ B ≤ N.
        pieces: Number of parts into which each process cuts a draw.
        micro_batch_size: The largest number of examples in a pass, with which `cut` begins; None for no limit.
        rank: The index of this process.
        world_size: Number of processes. Each draws from its own disjoint shard, the units ≡ rank mod world_size.
        lengths: Optional length of every example, shape (num_examples,). Before a draw is cut, it is then sorted by length
            (among examples of units of the same size), so that a micro-batch needs little padding.
        units: Optional unit of every example, shape (num_examples,), numbered from 0 without gaps. A unit is drawn with all
            its examples. By default every example is a unit.
        max_examples_per_unit: The largest number of examples drawn with a unit. If a unit has more, each draw takes that
            many at random. None for no limit.
        keeps_units_whole: Whether all examples that are drawn with a unit are neighbours in the same pass.
        groups: b, the number of groups of units that take turns.
        sampling: "allocation", or "poisson" for one group in rounds of one step.
        first_step: The optimizer step at which the first round begins. Earlier steps are empty.
        seed: None for secret draws, with random numbers of the operating system. An integer makes draws reproducible, for
            tests only.

    Attributes:
        num_units: N, the number of units.
        turns_of_round: n, the number of turns of a group in a round.
        groups, sampling, first_step, pieces, keeps_units_whole: As given.
        cut: How a draw is cut into passes; a loader sets it.
        other_lengths: Lengths of further columns that `cut` looks at, shape (num_examples, columns), or None.
        is_reserved: Whether only a training run may read the draws, so that each iteration must follow a `begin_at`. False
            at first.
        secret: 32 bytes from which groups and turns are computed.
        lengths, units: As given, of shape (num_examples,), or None.
        unit_sizes: Number of examples of each unit, shape (num_units,); None if every example is a unit.
        counts: For each example, how many examples are drawn with its unit, shape (num_examples,); None if every example is
            a unit.

    Raises:
        ValueError: If the expected batch size is outside [1, N/b], `lengths` or `units` have another size than the data set,
            the numbers of `units` have gaps, the limit is below 1 or given without units, or the rank is out of range.

    Example:
        >>> sampler = AllocationSampler(num_examples=1000, expected_batch_size=100, pieces=4)
        >>> sampler.sample_rate, sampler.steps_per_epoch, len(sampler)
        (0.1, 10, 40)
    """

    def __init__(
        self,
        *,
        num_examples: int,
        expected_batch_size: int,
        pieces: int = 1,
        micro_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        lengths: Sequence[int] | np.ndarray | None = None,
        units: Sequence[int] | np.ndarray | None = None,
        max_examples_per_unit: int | None = None,
        keeps_units_whole: bool = False,
        groups: int = 1,
        sampling: Sampling = "allocation",
        first_step: int = 0,
        seed: int | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise Refusal(
                "out-of-range",
                f"The rank of AllocationSampler must be at least 0 and below world_size={world_size}; got {rank}.",
            )
        for name, values in (("lengths", lengths), ("units", units)):
            if values is not None and len(values) != num_examples:
                raise Refusal(
                    "other-lengths",
                    f"The argument {name} of AllocationSampler must have one entry for each of the {num_examples} records; "
                    f"got {len(values)} entries.",
                )
        if max_examples_per_unit is not None and units is None:
            raise Refusal(
                "out-of-range",
                "The argument max_examples_per_unit is given without units. Pass units, the user of each record, too.",
            )
        if max_examples_per_unit is not None and max_examples_per_unit < 1:
            raise Refusal(
                "out-of-range", f"The argument max_examples_per_unit must be at least 1; got {max_examples_per_unit}."
            )
        self.num_examples = num_examples
        self.expected_batch_size = expected_batch_size
        self.pieces, self.cut = pieces, Cut(micro_batch_size)
        self.other_lengths: np.ndarray | None = None
        self.max_examples_per_unit = max_examples_per_unit
        self.keeps_units_whole = keeps_units_whole and units is not None
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.units = None if units is None else np.asarray(units)
        self.num_units, self.counts = num_examples, None
        self.unit_sizes: np.ndarray | None = None
        if self.units is not None:
            self.unit_sizes = np.bincount(self.units)
            if not self.unit_sizes.all():
                gap = np.flatnonzero(self.unit_sizes == 0)[0]
                raise Refusal(
                    "units-with-gaps",
                    f"The argument units must number the users from 0 without gaps; got no record of user {gap}. Renumber "
                    "the users: units = np.unique(units, return_inverse=True)[1].",
                )
            self._starts = np.cumsum(self.unit_sizes) - self.unit_sizes
            self._examples_by_unit = np.argsort(self.units, kind="stable")
            limit = self.unit_sizes.max() if max_examples_per_unit is None else max_examples_per_unit
            self.num_units, self.counts = len(self.unit_sizes), np.minimum(self.unit_sizes, limit)[self.units]
        if not 1 <= expected_batch_size <= self.num_units:
            raise Refusal(
                "batch-out-of-range",
                f"The expected batch size is {expected_batch_size} (per_device_train_batch_size × "
                f"gradient_accumulation_steps × processes), but the training set has {self.num_units} {self.noun}s. Lower "
                "one of these factors.",
            )
        self._rank, self._world_size = rank, world_size
        self._stream = bit_stream(seed, purpose="sampling", rank=rank)
        self.secret = bit_stream(seed, purpose="turns", rank=rank).bits(4, step=0).tobytes()
        self._words = WordsByNumber(self.secret)
        self.first_step = self._next_step = first_step
        self.sampling: Sampling = sampling
        self.is_reserved = self._may_begin = False
        self._round, self._places = -1, np.zeros(0, dtype=np.uint32)
        self.take_turns(groups)

    def take_turns(self, groups: int) -> None:
        """Divide the units into `groups` groups, before the first draw."""
        if groups * self.expected_batch_size > self.num_units:
            raise Refusal(
                "too-few-units",
                f"The noise shape divides the {self.noun}s into {groups} groups that take turns, and each group must fill a "
                f"batch of {self.expected_batch_size}. So {groups * self.expected_batch_size} {self.noun}s are needed; the "
                f"training set has {self.num_units}. Use a noise_shape with fewer bands, or a smaller batch.",
            )
        if groups > 1 and self.sampling == "poisson":
            raise Refusal(
                "groups-with-poisson",
                f"Poisson sampling cannot divide the {self.noun}s into groups, but a noise shape with {groups} bands needs "
                f"{groups} groups. Set noise_shape='white' or sampling='allocation'.",
            )
        self.groups, batch = groups, groups * self.expected_batch_size
        self.turns_of_round = 1 if self.sampling == "poisson" else self.num_units // batch
        # A unit with a word below bound ⌈turn·bB/N·2⁶⁴⌉ has one of the first `turn` turns. Whole numbers are used, because a
        # float has 53 bits only.
        bounds = (-(-(turn * batch << 64) // self.num_units) for turn in range(1, self.turns_of_round + 1))
        self._bounds = np.array([bound for bound in bounds if bound < 1 << 64], dtype=np.uint64)

    def go_on(self, secret: bytes, *, first_step: int) -> None:
        """Continue with the groups and turns of a sampler of the same units, whose first round began at `first_step`."""
        # Sensitivity: a round that continues is the same round. A unit that had its turn gets no other turn in it.
        self.secret, self._words, self.first_step = secret, WordsByNumber(secret), first_step

    @property
    def noun(self) -> str:
        """What is sampled, in a message: "record" or "user"."""
        return "record" if self.units is None else "user"

    @property
    def sample_rate(self) -> float:
        """Probability q = B/N with which a unit is drawn at a step, averaged over its possible groups."""
        return self.expected_batch_size / self.num_units

    @property
    def steps_per_epoch(self) -> int:
        """Number of draws per epoch, ⌈N/B⌉, the same as the steps of a shuffling loader."""
        return math.ceil(self.num_units / self.expected_batch_size)

    @property
    def is_secret(self) -> bool:
        """Whether the draws cannot be reproduced, which the amplification by sampling requires."""
        return self._stream.is_secret

    def begin_at(self, step: int) -> None:
        """Set the optimizer step of the first draw of the next iteration, on which groups and reproducible draws depend."""
        self._next_step, self._may_begin = step, True

    def draw(self, step: int) -> np.ndarray:
        """Return the indices of the examples of one draw of this process's shard at an optimizer step."""
        drawn = self.drawn_units(step)
        if self.units is not None:
            drawn = self._examples_of(drawn, step=step)
        # The order within a draw reveals nothing, because the step releases a sum over the draw.
        lengths, counts, others = self._sizes_of(drawn)
        if lengths is not None:
            return drawn[self.cut.order(lengths, counts, others)]
        return drawn if counts is None else drawn[np.argsort(counts, kind="stable")]

    def _sizes_of(self, drawn: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Return lengths, counts and other lengths of drawn examples, the lengths of a whole unit if it stays together."""
        lengths, counts, others = (
            None if values is None else values[drawn] for values in (self.lengths, self.counts, self.other_lengths)
        )
        if self.keeps_units_whole and lengths is not None:
            assert self.units is not None
            # The examples of a unit are neighbours already, and with the same keys they stay neighbours.
            _, unit_of = np.unique(self.units[drawn], return_inverse=True)
            lengths = _most_of_each(unit_of, lengths)
            if others is not None:
                others = np.stack([_most_of_each(unit_of, column) for column in others.T], axis=1)
        return lengths, counts, others

    def drawn_units(self, step: int) -> Int64[np.ndarray, " units"]:
        """Return the units of one draw of this process's shard, shape (units,).

        Raises:
            RuntimeError: If the round of the step is over, because its units would take part again.
        """
        number, place = divmod(step - self.first_step, self.turns_of_round * self.groups)
        if number < 0:
            return np.zeros(0, dtype=np.int64)
        if number < self._round and self.is_secret:
            raise Failure(
                "steps-out-of-order",
                f"Batches must be used in the order of the steps, but the batch of step {step} was requested after a later "
                "round had started, so its records would take part twice. A round deals out every record once. Let "
                "DopplerTrainer.train() make the steps, and start the run again with resume_from_checkpoint=True.",
            )
        if number != self._round:
            self._round, self._places = number, self._drawn_places(number)
        return self._rank + self._world_size * np.flatnonzero(self._places == place)

    def _drawn_places(self, number: int) -> UInt32[np.ndarray, " units"]:
        """Return the step within a round at which each unit of this process's shard takes part, or a step after its end."""
        # Sensitivity: the turn of a unit follows from a word of its own, whose law depends on no other unit; N is public. So
        # a unit that is added or removed does not change the turns of other units. A unit is in at most one draw of a round,
        # in each turn of its group with probability b·q, except for the rounding of the bounds by less than 2⁻⁶⁴. Over T
        # turns that adds less than T·2⁻⁶³·e^ε to δ. Shards are disjoint.
        count = len(range(self._rank, self.num_units, self._world_size))
        places = np.empty(count, dtype=np.uint32)
        for start in range(0, count, _AT_ONCE):
            part = places[start : start + _AT_ONCE]
            units = self._rank + self._world_size * np.arange(start, start + len(part))
            turns = np.searchsorted(self._bounds, self._words.of(units, series=1 + number), side="right")
            part[:] = turns * self.groups + (self.group_of(units) if self.groups > 1 else 0)
        return places

    def group_of(self, units: np.ndarray) -> np.ndarray:
        """Return the group of each of these units of this process's shard; it never changes."""
        # Sensitivity: the group of a unit is its own secret coin, so that one unit more or less does not move other units to
        # other groups, as it would if units were counted off. The accountant relies on the secret: nothing that is published
        # may depend on a group except through the draws.
        return (self._words.of(units, series=0) % np.uint64(self.groups)).astype(np.int64)

    def _examples_of(self, units: np.ndarray, *, step: int) -> np.ndarray:
        """Return the examples that are drawn with these units, shape (examples,)."""
        assert self.unit_sizes is not None
        sizes = self.unit_sizes[units]
        # Position k of the result, in unit j, is the (k - ends[j] + sizes[j])-th example of this unit.
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        examples = self._examples_by_unit[np.repeat(self._starts[units], sizes) + within]
        limit = self.max_examples_per_unit
        if limit is None or not np.any(sizes > limit):
            return examples
        # Which examples of a unit are chosen depends on the size of this unit and on secret coins, never on another unit.
        shuffled = np.lexsort((self.coins(len(examples), step=step), np.repeat(np.arange(len(units)), sizes)))
        return examples[shuffled[within < limit]]

    def coins(self, count: int, *, step: int) -> np.ndarray:
        """Return uniform random numbers in [0, 1) with 53 bits, shape (count,)."""
        return (self._stream.bits(count, step=step) >> np.uint64(11)) * 2.0**-53

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the pieces of one epoch, each an `Piece`; some may be empty.

        Raises:
            Refusal: If the draws are reserved for a training run, and something else asks for them.
        """
        if self.is_reserved and not self._may_begin:
            raise Refusal(
                "loader-read",
                "The loader of this run was read outside of its training loop. Its batches are the secret random batches of "
                "the steps, and each can be used in one step only. To look at a batch, read the train_dataloader that "
                "callbacks get, or call trainer.get_train_dataloader() during the run.",
            )
        self._may_begin = False
        first, self._next_step = self._next_step, self._next_step + self.steps_per_epoch
        for step in range(first, first + self.steps_per_epoch):
            yield from self._pieces_of(self.draw(step), step=step)

    def _pieces_of(self, drawn: np.ndarray, *, step: int) -> Iterator[Piece]:
        """Yield the pieces of a draw, each of as many passes as the others, or of one more."""
        lengths, counts, others = self._sizes_of(drawn)
        passes = self.cut.passes(len(drawn), lengths=lengths, counts=counts, others=others)
        ends = [len(passes) * (piece + 1) // self.pieces for piece in range(self.pieces)]
        for first, end in itertools.pairwise([0, *ends]):
            start = passes[first - 1].stop if first else 0
            own = [each._replace(stop=each.stop - start) for each in passes[first:end]]
            rows = drawn[start : start + own[-1].stop] if own else drawn[:0]
            yield Piece(rows.tolist(), step=step, passes=own)

    def __len__(self) -> int:
        """Return the number of pieces per epoch on this process."""
        return self.steps_per_epoch * self.pieces


def _most_of_each(unit_of: np.ndarray, values: np.ndarray) -> np.ndarray:
    most = np.zeros(len(values), dtype=values.dtype)
    np.maximum.at(most, unit_of, values)
    return most[unit_of]


def digest_of_data(dataset: Any, sampler: AllocationSampler) -> DataDigest:
    """Return a digest of the rows of a data set in their order, and of their number, units and labels.

    The shards of processes, the turns of groups and the units of privacy depend on the numbers of examples. If an example
    has different numbers in two processes or launches, it may be drawn more often than the accountant assumes.
    """
    digest = hashlib.sha256(f"{sampler.num_examples}".encode())
    for values in (sampler.units, labels_of(dataset)):
        digest.update(b"none" if values is None else np.ascontiguousarray(values).data)
    return DataDigest(digest.hexdigest()[:16], digests_of_fields(dataset))
