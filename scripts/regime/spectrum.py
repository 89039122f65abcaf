"""What the theory asks of a run: the autocorrelation of the signal in its private gradients, and what filters make of it.

`Released` records g_t = s_t + w_t, as anybody may. The white noise w_t of known size adds its power to the mean of ‖g_t‖²
and nothing to the means of ⟨g_t, g_{t−τ}⟩, so that those less the noise estimate the signal's autocorrelation, C_τ. Where
the signal is far below the noise, this takes more steps than a run has. `Signal` therefore records s_t itself, the mean of
the clipped gradients: the data of the study are public. Both keep a small image of each gradient (`CountSketch`).
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float64
from torch import Tensor
from transformers import TrainerCallback

from doppler_hf import DopplerTrainer, GradientRecorder
from doppler_hf.filters import LowPassFilter, impulse_response
from doppler_hf.run.count_sketch import CountSketch

LAGS: Final = 64
PARTS: Final = 3  # of a run
# Of the image of a signal: its power has a relative error of √(2/1024) over the seeds of the projection.
DIMENSIONS: Final = 1024


class Released:
    """Records the private gradients of a run.

    Attributes:
        before: What was recorded before the run was interrupted, shape (steps, dimensions).
    """

    name: Final = "spectrum_of_released"

    def __init__(self) -> None:
        self.callback = GradientRecorder()
        self.before = np.zeros((0, self.callback.dimensions))

    def attach(self, trainer: DopplerTrainer) -> None:
        """Do nothing: the callback suffices."""

    @property
    def series(self) -> Float64[np.ndarray, "steps dimensions"]:
        """The images of all steps."""
        return np.concatenate([self.before, self.callback.private])

    def spectrum(self) -> dict[str, Any]:
        """Return the autocorrelation of the signal, as estimated."""
        return spectrum_of(self.series, noise_power=self.callback.noise_std**2 * self.callback.dimensions, is_in_it=True)


class Signal:
    """Records the mean clipped gradient of every draw, before noise is added to it.

    Attributes:
        before: What was recorded before the run was interrupted, shape (steps, dimensions).
    """

    name: Final = "spectrum_of_signal"

    def __init__(self) -> None:
        self.callback = AtTheBeginning(self)
        self.before = np.zeros((0, DIMENSIONS))
        self._rows: list[Any] = []
        self._noise_power = 0.0
        self._trainer: DopplerTrainer | None = None

    def attach(self, trainer: DopplerTrainer) -> None:
        """Note the trainer, whose mechanism is made when its training begins."""
        self._trainer = trainer

    def begin(self) -> None:
        """Record what the mechanism is given from now on."""
        assert self._trainer is not None
        mechanism = self._trainer.private_run.mechanism
        number = sum(each.numel() for each in self._trainer.model.parameters())
        sketch = CountSketch(number, dimensions=min(DIMENSIONS, number), seed=0)
        self.before = self.before[:, : min(DIMENSIONS, number)]
        self._noise_power = number * mechanism.noise_std(step=0) ** 2
        batch_size, privatize = self._trainer.private_run.statement.expected_batch_size, mechanism.privatize

        def recorded(sums: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
            self._rows.append(sketch([*sums.values()]) / batch_size)
            return privatize(sums, **options)

        mechanism.privatize = recorded  # type: ignore[method-assign]

    @property
    def series(self) -> Float64[np.ndarray, "steps dimensions"]:
        """The images of all steps."""
        return np.concatenate([self.before, np.array(self._rows, dtype=np.float64).reshape(-1, self.before.shape[1])])

    def spectrum(self) -> dict[str, Any]:
        """Return the autocorrelation of the signal."""
        return spectrum_of(self.series, noise_power=self._noise_power, is_in_it=False)


class AtTheBeginning(TrainerCallback):
    """Begins a recording with the training."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin it."""
        self._signal.begin()


def spectrum_of(series: Float64[np.ndarray, "steps dimensions"], *, noise_power: float, is_in_it: bool) -> dict[str, Any]:
    """Return C_τ in units of the noise's power, of the whole run for all lags, and of its parts for lags 0, 1 and 10.

    Args:
        series: The gradients.
        noise_power: The power of the noise; 0 for a run without any, whose unit is the mean of ‖s_t‖².
        is_in_it: Whether the noise is in the series.
    """
    noise = noise_power if is_in_it else 0.0
    unit = noise_power or float(np.mean(np.sum(series**2, axis=1)))
    whole = products(series, lags=min(LAGS, len(series)))
    parts = [products(part, lags=min(11, len(part))) for part in np.array_split(series, PARTS)]
    return {
        "unit": float(f"{unit:.4g}"),
        "autocorrelation": [float(f"{value:.4g}") for value in (whole - noise * (np.arange(len(whole)) == 0)) / unit],
        "parts": [[float(f"{value:.4g}") for value in (part[[0, 1, -1]] - [noise, 0.0, 0.0]) / unit] for part in parts],
    }


def products(series: Float64[np.ndarray, "steps dimensions"], *, lags: int) -> Float64[np.ndarray, " lags"]:
    """Return the mean of ⟨g_t, g_{t−τ}⟩ over the pairs that there are, for every lag."""
    return np.array([np.mean(np.sum(series[lag:] * series[: len(series) - lag], axis=1)) for lag in range(lags)])


def power_after(filter: LowPassFilter, autocorrelation: Float64[np.ndarray, " lags"]) -> float:
    """Return the power of the filtered signal, ΣΣ κ_i κ_j C_{i−j}; lags beyond the last count as the last."""
    kappa = impulse_response(filter, 4 * LAGS)
    along = np.correlate(kappa, kappa, mode="full")[len(kappa) - 1 :]  # Σ_i κ_i κ_{i+τ}
    known = np.pad(autocorrelation, (0, len(along) - len(autocorrelation)), mode="edge")
    return float(along[0] * known[0] + 2 * np.sum(along[1:] * known[1:]))


def predicted_gain(filter: LowPassFilter, autocorrelation: Float64[np.ndarray, " lags"]) -> float:
    """Return what the paper's bound depends on, (Σ κ_τ ρ_τ)²/Σ κ_τ² with ρ = C/C_0: 1 without a filter."""
    kappa = impulse_response(filter, 4 * LAGS)
    rho = autocorrelation / autocorrelation[0]
    known = np.pad(rho, (0, len(kappa) - len(rho)), mode="edge")
    return float(max(np.sum(kappa * known), 0.0) ** 2 / np.sum(kappa**2))
