"""Poisson sampling: every step, every example is drawn independently with probability q = B/N.

The accountant's theorem is about this and nothing else: not a shuffle, not fixed-size batches, not a sampler that some
other layer shards again afterwards. One draw belongs to one optimizer step; it is cut into micro-batches only to fit
into memory.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from doppler_hf.privacy.noise import bit_stream


class PoissonSampler(Sampler[list[int]]):
    """A batch sampler whose every `micro_batches` consecutive batches are one Poisson draw over the whole data set.

    It states to the accountant what it does: `sample_rate` and, per epoch, `steps_per_epoch`. Empty micro-batches are
    yielded as empty lists, and an empty draw is a step like any other: dropping it would make the number of steps depend
    on the data.

    Args:
        num_examples: N, the size of the data set.
        expected_batch_size: B, the expected size of a draw over all processes; 1 ≤ B ≤ N.
        micro_batches: Into how many batches a draw is cut on each process.
        rank: This process's index.
        world_size: Number of processes. Each draws from its own disjoint shard, the examples ≡ rank mod world_size.
        lengths: Optional length of every example, shape (num_examples,). A draw is then sorted by length before it is
            cut, so that a micro-batch needs little padding.
        seed: None for draws from the operating system's entropy. An integer makes them reproducible, for tests only.

    Raises:
        ValueError: An expected batch size outside [1, N], or a `lengths` of another size than the data set.

    Example:
        >>> sampler = PoissonSampler(num_examples=1000, expected_batch_size=100, micro_batches=4)
        >>> sampler.sample_rate, sampler.steps_per_epoch, len(sampler)
        (0.1, 10, 40)
    """

    def __init__(
        self,
        *,
        num_examples: int,
        expected_batch_size: int,
        micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        lengths: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        if not 1 <= expected_batch_size <= num_examples:
            raise ValueError(
                f"The expected batch size must lie between 1 and the number of training examples, {num_examples}, got "
                f"{expected_batch_size} (per_device_train_batch_size × gradient_accumulation_steps × processes). "
                "Lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, got {micro_batches}.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, world_size), got rank {rank} of {world_size}.")
        if lengths is not None and len(lengths) != num_examples:
            raise ValueError(f"lengths must have one entry per example, {num_examples}, got {len(lengths)}.")
        self.num_examples = num_examples
        self.expected_batch_size = expected_batch_size
        self.micro_batches = micro_batches
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._shard = np.arange(rank, num_examples, world_size)
        self._stream = bit_stream(seed, purpose="sampling", rank=rank)
        self._epoch = 0

    @property
    def sample_rate(self) -> float:
        """Probability q = B/N with which each example is drawn at each step."""
        return self.expected_batch_size / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Draws per epoch, ⌈N/B⌉, as many steps as a shuffling loader would make."""
        return math.ceil(self.num_examples / self.expected_batch_size)

    @property
    def is_secret(self) -> bool:
        """Whether nobody can reproduce the draws; the amplification by sampling needs that."""
        return self._stream.is_secret

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is. Only reproducible draws depend on it."""
        self._epoch = epoch

    def draw(self, step: int) -> np.ndarray:
        """Return the indices of one draw of this process's shard, in any order.

        Args:
            step: Optimizer step, counted from 0. Only reproducible draws depend on it.
        """
        # Each example's coin is its own 53-bit uniform compared with q, so it neither depends on the other examples nor
        # on their number in the shard: exactly the independent inclusion that amplification by sampling assumes. The
        # shards are disjoint, so an example takes part at most once a step over all processes.
        uniforms = (self._stream.bits(len(self._shard), step=step) >> np.uint64(11)) * 2.0**-53
        drawn = self._shard[uniforms < self.sample_rate]
        # The order inside a draw never leaves it: the step releases a sum over the draw, and sums do not care.
        return drawn if self._lengths is None else drawn[np.argsort(self._lengths[drawn], kind="stable")]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the micro-batches of one epoch; some may be empty."""
        for step in range(self.steps_per_epoch):
            drawn = self.draw(self._epoch * self.steps_per_epoch + step)
            for micro_batch in np.array_split(drawn, self.micro_batches):
                yield micro_batch.tolist()

    def __len__(self) -> int:
        """Micro-batches per epoch on this process."""
        return self.steps_per_epoch * self.micro_batches
