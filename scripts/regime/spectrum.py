"""What the theory asks of a run: the autocorrelation of the signal in its private gradients, and what filters make of it.

`Released` records g_t = s_t + w_t, as anybody may. The white noise w_t of known size adds its power to the mean of ‖g_t‖²,
so that those means and the means of ⟨g_t, g_{t−τ}⟩ estimate the signal's autocorrelation, C_τ. Where the signal is far below
the noise, this takes more steps than a run has. `Signal` therefore records s_t itself, the mean of the clipped gradients:
the data of the study are public. Both keep a small image of each gradient (`CountSketch`).

Noise moves the weights, and the next gradients pull them back. So in a direction of curvature λ, C_1 contains −ηλ of the
power that the noise has there, and further lags what follows from it. Where a signal is as weak as the noise of the draws, a
negative C_1 may come from that alone.

The draws add noise of their own to s_t, which is as white as the mechanism's. Under Poisson sampling with probability q the
sum over a draw has the variance q(1 − q) Σ ‖clip(gᵢ)‖² over all examples, which (1 − q) Σ ‖clip(gᵢ)‖² over the draw
estimates.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float64
from torch import Tensor
from transformers import TrainerCallback

from doppler_hf import DopplerTrainer, GradientRecorder
from doppler_hf.filters import LowPassFilter, impulse_response
from doppler_hf.gradient_recorder import CountSketch

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
    """Records the mean clipped gradient of every draw before noise is added to it, and the power of the draw's own noise.

    Attributes:
        before: What was recorded before the run was interrupted, shape (steps, 1 + dimensions): that power, and the images.
    """

    name: Final = "spectrum_of_signal"

    def __init__(self) -> None:
        self.callback = AtTheBeginning(self)
        self.before = np.zeros((0, 0))
        self._squares = 0.0
        self._rows: list[Any] = []
        self._noise_power = 0.0
        self._trainer: DopplerTrainer | None = None

    def attach(self, trainer: DopplerTrainer) -> None:
        """Note the trainer, whose mechanism is made when its training begins."""
        self._trainer = trainer

    def begin(self) -> None:
        """Record what the mechanism is given from now on."""
        assert self._trainer is not None
        run = self._trainer.privacy
        clipped, mechanism, statement = run.engine, run.mechanism, run.statement
        number = sum(each.numel() for each in self._trainer.model.parameters())
        sketch = CountSketch(number, dimensions=min(DIMENSIONS, number), seed=0)
        self._noise_power = number * mechanism.noise_std(step=0) ** 2
        privatize, backward = mechanism.privatize, clipped.backward

        def clip_and_add(losses: Tensor, **options: Any) -> Tensor:
            norms = backward(losses, **options)
            self._squares += float(norms.clamp(max=clipped.max_grad_norm).square().sum())
            return norms

        def record(sums: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
            image = sketch([*sums.values()]) / statement.expected_batch_size
            power = (1 - statement.sample_rate) * self._squares / statement.expected_batch_size**2
            self._rows.append(np.concatenate([[power], image]))
            self._squares = 0.0
            return privatize(sums, **options)

        clipped.backward = clip_and_add  # type: ignore[method-assign]
        mechanism.privatize = record  # type: ignore[method-assign]

    @property
    def series(self) -> Float64[np.ndarray, "steps dimensions"]:
        """The power of the draws' noise and the images, of all steps."""
        return np.array([*self.before, *self._rows], dtype=np.float64)

    def spectrum(self) -> dict[str, Any]:
        """Return the autocorrelation of the signal, with the draws' noise in lag 0, and the power of that noise in parts."""
        found = spectrum_of(self.series[:, 1:], noise_power=self._noise_power, is_in_it=False)
        powers = [float(np.mean(part)) for part in np.array_split(self.series[:, 0], PARTS)]
        return found | {"of_draws": [float(f"{power / found['unit']:.4g}") for power in powers]}


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


def peak_period(autocorrelation: Float64[np.ndarray, " lags"]) -> float:
    """Return the period in steps at which a signal has most power; infinite where slow changes have most.

    The power is that of Blackman and Tukey, with a triangular window over the lags, whose number is the longest period.
    """
    number = len(autocorrelation)
    window = np.concatenate([[0.5], 1 - np.arange(1, number) / number])
    omega = np.linspace(2 * np.pi / number, np.pi, 32 * number)
    power = np.cos(np.outer(omega, np.arange(number))) @ (window * autocorrelation)
    first = int(np.argmax(power))
    return float(2 * np.pi / omega[first]) if first else np.inf
