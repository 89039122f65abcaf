r"""`GradientRecorder`: keeps a small image of each step's gradient, from which its spectrum can be measured.

What is kept of a gradient is its image under `projection.Projection`.

Privacy. What is recorded of `p.grad` is computed from the private gradient and public numbers: post-processing, as private
as the gradient. It is of *every* step, whose gradients the accountant takes to be released anyway. What `record_raw` adds
has no noise at all, and voids the guarantee of the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import scipy.signal
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from doppler_hf.filters import LowPassFilter, corrected_output, estimate_power, step_response
from doppler_hf.run.projection import KINDS, TABLE_WIDTH, Kind, Projection
from doppler_hf.training_args import DopplerTrainingArguments

RAW_ON_SEVERAL_PROCESSES: Final = (
    "record_raw with {} processes: each would have a part of the sum. Record the raw gradient on one process."
)


@final
class GradientRecorder(TrainerCallback):
    """Records the private gradients of a training run, and estimates how much of them is signal.

    With several processes, process 0 records: the private gradient is the same everywhere. A second training, or a
    resumed one, begins a new recording, and `filtered` then begins as the filter of a new run would.

    Args:
        dimensions: k, how many numbers are kept of a gradient. The signal's power is found with a relative standard
            deviation of at most about √(2/k) over the seed, if no few coordinates hold most of it ("projection").
        kind: How a gradient becomes so few numbers: ``"projection"`` or ``"coordinates"``.
        record_raw: Whether to keep the clipped gradient before noise too. It is NOT private: the ledger says so then.
        seed: Says which projection, or which coordinates. It is public, and has nothing to do with the noise.

    Attributes:
        record_raw: As given.
        noise_std: Standard deviation of the noise in each number recorded, σ_DP √(d/k); 0 before training.
        low_pass_filter: The run's filter.

    Raises:
        ValueError: Dimensions out of range, or an unknown kind. When training begins: a run whose gradients are not
            private, or noise is not white (GaLore), or whose filter changes; fewer parameters than dimensions; or
            `record_raw` with several processes.

    Example:
        >>> recorder = GradientRecorder(dimensions=64)
        >>> trainer = DopplerTrainer(model=model, args=args, train_dataset=train, callbacks=[recorder])
        >>> trainer.train()
        >>> frequencies, density = power_spectral_density(recorder.private)
    """

    def __init__(self, *, dimensions: int = 256, kind: Kind = "projection", record_raw: bool = False, seed: int = 0) -> None:
        if not 1 <= dimensions <= TABLE_WIDTH:
            raise ValueError(f"dimensions is {dimensions}: record from 1 to {TABLE_WIDTH} numbers of a gradient.")
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}: choose one of {', '.join(KINDS)}.")
        self.dimensions = dimensions
        self.kind: Kind = kind
        self.record_raw = record_raw
        self.seed = seed
        self.noise_std = 0.0
        self.low_pass_filter = LowPassFilter(b=(1.0,))
        self._private: list[Float[np.ndarray, " dimensions"]] = []
        self._raw: list[Float[np.ndarray, " dimensions"]] = []
        self._steps_logged = 0

    @property
    def private(self) -> Float64[np.ndarray, "steps dimensions"]:
        """The private gradients, one row for each step."""
        return self._series(self._private)

    @property
    def filtered(self) -> Float64[np.ndarray, "steps dimensions"]:
        """What the optimizer makes of them, m̂, one row for each step; up to the rounding of its states."""
        return corrected_output(self.low_pass_filter, self.private) if self._private else self.private

    @property
    def raw(self) -> Float64[np.ndarray, "steps dimensions"] | None:
        """The clipped mean gradients without noise, one row for each step; None unless `record_raw`. NOT private."""
        assert not self.record_raw or len(self._raw) == len(self._private), "a raw gradient was not recorded"
        return self._series(self._raw) if self.record_raw else None

    def _series(self, rows: list[Float[np.ndarray, " dimensions"]]) -> Float64[np.ndarray, "steps dimensions"]:
        return np.array(rows, dtype=np.float64).reshape(len(rows), self.dimensions)

    def save(self, path: str | Path) -> None:
        """Write all that was recorded to an .npz file; its folder is made. With `record_raw` the file is NOT private."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            private=self.private,
            raw=self._series(self._raw),
            record_raw=self.record_raw,
            kind=self.kind,
            seed=self.seed,
            noise_std=self.noise_std,
            b=self.low_pass_filter.b,
            a=self.low_pass_filter.a,
        )

    @classmethod
    def load(cls, path: str | Path) -> "GradientRecorder":
        """Return the recording that `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            recorder = cls(
                dimensions=file["private"].shape[1],
                kind=file["kind"].item(),
                record_raw=file["record_raw"].item(),
                seed=file["seed"].item(),
            )
            recorder.noise_std = file["noise_std"].item()
            recorder.low_pass_filter = LowPassFilter(b=tuple(file["b"]), a=tuple(file["a"]))
            recorder._private = list(file["private"])
            recorder._raw = list(file["raw"])
        return recorder

    def on_train_begin(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a recording of this run's gradients, or refuse to."""
        if args.disable_dp:
            raise ValueError("GradientRecorder records private gradients, and with disable_dp there are none.")
        if args.optim_target_modules is not None:
            raise ValueError(
                "GradientRecorder takes the noise to be white, and with GaLore (optim_target_modules) it is not. "
                "Record a run without it."
            )
        if self.record_raw and args.world_size > 1:
            raise ValueError(RAW_ON_SEVERAL_PROCESSES.format(args.world_size))
        # The host has wrapped the optimizer by now (accelerate's AcceleratedOptimizer).
        optimizer = kwargs["optimizer"].optimizer
        if not isinstance(optimizer.low_pass_filter, LowPassFilter):
            raise ValueError(
                f"GradientRecorder cannot follow {optimizer.low_pass_filter}, whose taps change. Record a run with a fixed "
                "filter."
            )
        self._parameters = {name: p for name, p in kwargs["model"].named_parameters() if p.requires_grad}
        number = sum(p.numel() for p in self._parameters.values())
        if self.dimensions > number:
            raise ValueError(f"dimensions is {self.dimensions}, but {number} parameters are trained: lower it.")
        self._projection = Projection(number, dimensions=self.dimensions, kind=self.kind, seed=self.seed)
        self.noise_std = optimizer.noise_std * (number / self.dimensions) ** 0.5
        self.low_pass_filter = optimizer.low_pass_filter
        self._private, self._raw, self._steps_logged = [], [], 0
        self._filter_states = np.zeros((self.low_pass_filter.order, self.dimensions))

    def record_raw_gradient(self, sums: Mapping[str, Float[Tensor, "..."]], expected_batch_size: int) -> None:
        """Record the clipped mean of a step, before noise is added. The trainer calls it, where `record_raw` asks for it.

        Args:
            sums: The clipped sums by parameter name.
            expected_batch_size: B.

        Raises:
            ValueError: Without `record_raw`.
        """
        if not self.record_raw:
            raise ValueError("record_raw is False: this recorder keeps private gradients only.")
        # No sensitivity bound and no noise: this is why the ledger of such a run says that it is not private.
        self._raw.append(self._projection([sums[name] for name in self._parameters]) / expected_batch_size)

    def on_pre_optimizer_step(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the private gradient, just before the optimizer reads it."""
        if state.is_world_process_zero:
            gradients = [p.grad for p in self._parameters.values()]
            assert all(gradient is not None for gradient in gradients), "a trained parameter has no private gradient"
            self._private.append(self._projection([gradient for gradient in gradients if gradient is not None]))

    def add_estimates(self, logs: dict[str, float]) -> None:
        """Add to a training log how much was signal and how much noise since the last one (modified in place).

        `signal_power` and `noise_power` are ‖s‖² and dσ² of the gradient, `signal_power_error` the standard error of the
        first; `snr_before` and `snr_after` are signal per noise before the filter and after it. They come from private
        gradients. Where there is much noise, the signal, and with it both ratios, is now and then below 0: it is
        left so, because a mean over many logs is then still right. A log of an evaluation is left alone, and so is one of a
        process that does not record.

        Args:
            logs: What is about to be logged.
        """
        # The host logs the learning rate with every report on training steps, and with nothing else.
        rows = self._series(self._private[self._steps_logged :])
        if "learning_rate" not in logs or not len(rows):
            return
        first_step, self._steps_logged = self._steps_logged, len(self._private)
        b, a = self.low_pass_filter.b, self.low_pass_filter.a
        filtered, self._filter_states = scipy.signal.lfilter(b, a, rows, axis=0, zi=self._filter_states)
        filtered /= step_response(self.low_pass_filter, self._steps_logged)[first_step:, None]
        before = estimate_power(np.sum(rows**2, axis=1), noise_std=self.noise_std, dimension=self.dimensions)
        after = estimate_power(
            np.sum(filtered**2, axis=1),
            noise_std=self.noise_std,
            dimension=self.dimensions,
            filter=self.low_pass_filter,
            first_step=first_step,
        )
        logs |= {"signal_power": before.signal, "signal_power_error": before.error, "noise_power": before.noise}
        if self.noise_std:
            logs |= {"snr_before": before.snr, "snr_after": after.snr}
