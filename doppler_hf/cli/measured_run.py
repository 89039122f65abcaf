"""Time and memory of the private run of a trainer, measured in a few steps that spend no ε and change no weight.

The trainer's own data, collator, model, loss, checks and optimizer make the steps, at learning rate 0 and in a temporary
folder. The first step has the longest rows, and tracks the bytes of its passes. Then two sizes of batches are timed. If
whole batches take too long, the time of a batch follows from the two sizes.

Privacy: the figures depend on the data. They are printed, and written to no file.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers import TrainerCallback

from doppler_hf.audit.audited_run import copied, hidden_prints, motionless_run
from doppler_hf.errors import Refusal
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.run.planning.estimate import Setting, seconds_of_noise
from doppler_hf.run.planning.filter_and_noise import chosen_filter
from doppler_hf.run.planning.memory import Peak
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.trainer import DopplerTrainer

# The measured steps: one step whose bytes are tracked and which warms up, then steps with small batches, then steps with
# larger ones.
_SMALL: Final = (1, 3)
_LARGE: Final = (3, 6)
_SECONDS_OF_A_STEP: Final = 5.0  # A larger batch may take this long.
_FLOAT: Final = 4


@dataclass(frozen=True)
class MeasuredRun:
    """What a private run will take, and what it will spend."""

    seconds: dict[str, float]  # of a step
    bytes: dict[str, float]  # The memory at the peak of a step.
    passes: int  # of a step
    measured_rows: int  # The number of records in the largest timed batch.
    start_seconds: float  # The time until the first step, with all checks.
    epsilon: float
    statement: PrivacyStatement

    @property
    def run_seconds(self) -> float:
        """The time of the whole run without evaluations and checkpoints."""
        return self.start_seconds + self.statement.steps_planned * sum(self.seconds.values())


class _Steps(TrainerCallback):
    """Measures the steps of a run, and chooses the sizes of their batches."""

    def __init__(self, trainer: DopplerTrainer) -> None:
        self._begun = self._last = time.perf_counter()
        self._device = trainer.args.device
        self._small = min(trainer.privacy.sampler.expected_batch_size, trainer.args.per_device_train_batch_size)
        self._whole = trainer.privacy.sampler.expected_batch_size
        self.start_seconds = 0.0
        self.seconds: list[float] = []
        self.sizes: list[int] = []
        self.passes: list[int] = []
        self.bytes: dict[str, float] = {}

    def watch(self, run: PrivateRun) -> None:
        """Make a run report its passes, and take the batches that are measured (modified in place)."""
        sampler, add = run.sampler, run.add_piece
        generator = np.random.default_rng(0)
        sizes = sampler.lengths if sampler.unit_sizes is None else sampler.unit_sizes

        def drawn_units(step: int) -> np.ndarray:
            if step == 0:
                count = min(sampler.num_units, run.most_rows, self._whole)
                longest = np.arange(count) if sizes is None else np.argsort(sizes, kind="stable")[::-1][:count]
                return np.sort(longest)
            return np.sort(generator.choice(sampler.num_units, size=self._size(step), replace=False))

        def add_piece(piece: Sequence[MicroBatch]) -> Any:
            self.passes[-1] += len(piece)
            if len(self.passes) > 1:
                return add(piece)
            with Peak() as peak:
                losses = add(piece)
            self.bytes["a pass"] = max(self.bytes.get("a pass", 0.0), peak.most)
            self.bytes["clipped sums"] = sum(total.nbytes for total in run.engine.sums.values())
            return losses

        sampler.drawn_units = drawn_units  # type: ignore[method-assign]
        run.add_piece = add_piece  # type: ignore[method-assign]

    def _size(self, step: int) -> int:
        """Return the size of a batch; a large one has as many records as a moment allows."""
        size = self._small
        if step >= _LARGE[0]:
            size = int(self._small * max(1.0, _SECONDS_OF_A_STEP / max(1e-3, self.seconds[_SMALL[1] - 1])))
        self.sizes.append(min(size, self._whole))
        return self.sizes[-1]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when the checks are done."""
        self._last = time.perf_counter()
        self.start_seconds = self._last - self._begun

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the passes of a new step."""
        self.passes.append(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time of a step, with the loading of its batch."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def for_whole_batch(self, values: Sequence[float]) -> float:
        """Return the value of a whole batch from the values of the steps: as measured, or on the line of two sizes."""
        sizes = [0, *self.sizes]  # The first step has other rows.
        less, more = (statistics.median(values[first:last]) for first, last in (_SMALL, _LARGE))
        small, large = sizes[_SMALL[0]], sizes[_LARGE[0]]
        if large == self._whole or large == small:
            return more * self._whole / large
        slope = max(0.0, more - less) / (large - small)
        return more + slope * (self._whole - large)


def measured_run(trainer: DopplerTrainer) -> MeasuredRun:
    """Measure a few steps of a trainer, and return what its run will take. Nothing is trained, saved or spent.

    Raises:
        ValueError: If the trainer has no privacy, uses several processes, or would refuse to train.
    """
    if trainer.args.disable_dp:
        raise Refusal(
            "no-privacy-to-estimate",
            "This command estimates a private run, and this trainer has disable_dp=True. Leave disable_dp out.",
        )
    if trainer.args.world_size > 1:
        raise Refusal(
            "several-processes",
            "This command measures a script in a single process; this run has several. Start it without torchrun or "
            "accelerate.",
        )
    planned = trainer.privacy.statement
    shape, low_pass_filter = NoiseShape.parse(planned.noise_shape), chosen_filter(trainer.args, planned)
    tested, steps = copied(trainer), _Steps(trainer)
    tested.callback_handler.callbacks.append(steps)
    make = tested._new_run

    def watched_run(**options: Any) -> PrivateRun:
        run = make(**options)
        steps.watch(run)
        return run

    tested._new_run = watched_run  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, hidden_prints():
        tested.args = motionless_run(trainer.args, steps=_LARGE[1], folder=folder)
        tested.args.low_pass_filter = str(low_pass_filter)
        tested.args.dataloader_num_workers, tested.args.dataloader_prefetch_factor = 0, None
        tested.args.dataloader_persistent_workers = False
        tested.args.warmup_steps, tested.args.num_train_epochs = 0, 1.0
        tested.train()
    parameters = [each for each in trainer.model.parameters() if each.requires_grad]
    number = sum(each.numel() for each in parameters)
    states = [value for state in tested.optimizer.optimizer.state.values() for value in state.values()]
    setting = Setting(
        batch_size=planned.expected_batch_size, micro_batch=1, processes=1, bandwidth=None, base=trainer.args.base_optimizer,
        low_pass_filter=low_pass_filter, noise_shape=shape,
    )  # fmt: skip
    # The measured steps have white noise. Shaped noise is also made of the noise of earlier steps.
    extra = 0.0
    if not shape.is_white:
        extra = seconds_of_noise(setting, number=number, device=parameters[0].device)
    return MeasuredRun(
        seconds={"passes, noise and optimizer": steps.for_whole_batch(steps.seconds), "shaped noise": extra},
        bytes={
            "weights": sum(each.nbytes for each in (*trainer.model.parameters(), *trainer.model.buffers())),
            "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
            "earlier noise": _FLOAT * number * (shape.bands - 1),
            **steps.bytes,
        },
        passes=round(steps.for_whole_batch(steps.passes)),
        measured_rows=steps.sizes[-1],
        start_seconds=steps.start_seconds,
        epsilon=PrivacyLedger.open(planned, run_id="estimate").planned_epsilon,
        statement=planned,
    )
