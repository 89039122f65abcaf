"""`GradientRecorder`: a small image of each step's gradient (`count_sketch.CountSketch`), to measure its spectrum.

Images of `p.grad` are post-processing of the private gradients, and as public as they are.
"""

from collections.abc import Iterable
from typing import Any, final

import numpy as np
import scipy.signal
from jaxtyping import Float, Float64
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerState

from doppler_hf.filters import PAPER_FILTERS, corrected_noise_gain, estimate_power, step_response
from doppler_hf.run.count_sketch import TABLE_WIDTH, CountSketch
from doppler_hf.training_args import DopplerTrainingArguments


@final
class GradientRecorder(TrainerCallback):
    """Records the private gradients of a training run, and estimates how much of them is signal.

    With several processes, process 0 records. A second training, or a resumed one, begins a new recording.

    Args:
        dimensions: k, the number of values kept of a gradient. The estimate of the signal's power has a relative standard
            deviation of about √(2/k) over the seed, more if few coordinates hold most of it.
        seed: The seed of the projection. It is public, and independent of the noise.

    Attributes:
        noise_std: Standard deviation of the noise in each number recorded, σ_DP √(d/k); 0 before training.
        low_pass_filter: The run's filter; none before training.
    """

    def __init__(self, *, dimensions: int = 256, seed: int = 0) -> None:
        if not 1 <= dimensions <= TABLE_WIDTH:
            raise ValueError(f"dimensions must lie in [1, {TABLE_WIDTH}], got {dimensions}.")
        self.dimensions = dimensions
        self.seed = seed
        self.noise_std = 0.0
        self.low_pass_filter = PAPER_FILTERS["none"]
        self._private: list[Float[np.ndarray, " dimensions"]] = []
        self._steps_logged = 0
        # Of the run, from its beginning on.
        self._parameters: dict[str, Tensor] = {}
        self._sketch: CountSketch | None = None
        self._filter_states = np.zeros((0, dimensions))

    @property
    def private(self) -> Float64[np.ndarray, "steps dimensions"]:
        """The private gradients, one row for each step."""
        return np.array(self._private, dtype=np.float64).reshape(-1, self.dimensions)

    def on_train_begin(self, args: DopplerTrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a recording of this run's gradients, or refuse the run."""
        if args.disable_dp:
            raise ValueError("GradientRecorder records private gradients, and disable_dp=True has none. Leave one out.")
        if args.optim_target_modules is not None:
            raise ValueError(
                "GradientRecorder filters whole gradients, which GaLore (optim_target_modules) does not. Record a run "
                "without it."
            )
        # Transformers has wrapped the optimizer by now (accelerate's AcceleratedOptimizer).
        optimizer = kwargs["optimizer"].optimizer
        self._parameters = {name: p for name, p in kwargs["model"].named_parameters() if p.requires_grad}
        if any(isinstance(p, DTensor) for p in self._parameters.values()):
            raise ValueError(
                "GradientRecorder must have whole gradients, got trained weights in shards (FSDP). Use "
                "recipes/accelerate/ddp.yaml."
            )
        number = sum(p.numel() for p in self._parameters.values())
        if self.dimensions > number:
            raise ValueError(f"dimensions must be at most the {number} trained parameters, got {self.dimensions}.")
        self._sketch = CountSketch(number, dimensions=self.dimensions, seed=self.seed)
        self.noise_std = optimizer.noise_std * (number / self.dimensions) ** 0.5
        self.low_pass_filter = optimizer.low_pass_filter
        self._private, self._steps_logged = [], 0
        self._filter_states = np.zeros((self.low_pass_filter.order, self.dimensions))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Record the private gradient, just before the optimizer reads it."""
        if state.is_world_process_zero:
            assert self._sketch is not None
            self._private.append(self._sketch([p.grad for p in self._parameters.values() if p.grad is not None]))

    def add_estimates(self, logs: dict[str, float]) -> None:
        """Add the power of signal and noise since the last training log to a new one (modified in place).

        All are estimates from private gradients before and after the filter. With much noise they may be negative, and are
        not cut at 0, so that a mean over logs is unbiased.
        """
        # Transformers logs the learning rate with every report on training steps, and with no other.
        rows = np.array(self._private[self._steps_logged :], dtype=np.float64)
        if "learning_rate" not in logs or not len(rows):
            return
        first_step, self._steps_logged = self._steps_logged, len(self._private)
        b, a = self.low_pass_filter.b, self.low_pass_filter.a
        filtered, self._filter_states = scipy.signal.lfilter(b, a, rows, axis=0, zi=self._filter_states)
        settling = slice(first_step, None)
        # The optimizer divides by the step response, too, while the filter settles.
        filtered /= step_response(self.low_pass_filter, self._steps_logged)[settling, None]
        before = estimate_power(rows, noise_std=self.noise_std)
        logs |= {"signal_power": before.signal, "signal_power_error": before.error, "noise_power": before.noise}
        if self.noise_std:
            gains = corrected_noise_gain(self.low_pass_filter, self._steps_logged)[settling]
            after = float(np.mean(filtered**2)) / (self.noise_std**2 * float(gains.mean())) - 1
            logs |= {"snr_before": before.snr, "snr_after": after}


def recorders_in(callbacks: Iterable[TrainerCallback]) -> list[GradientRecorder]:
    """Return the callbacks that record gradients."""
    return [callback for callback in callbacks if isinstance(callback, GradientRecorder)]
