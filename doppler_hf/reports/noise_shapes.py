"""What a shape of the noise buys at equal ε: less noise that stays in the weights, for more in each step.

Each number of bands b needs a σ of its own: a unit has one step in b as its turn, at b times the rate, so that sampling
hides less of it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from doppler_hf.filters import (
    PAPER_FILTERS,
    ClosedLoop,
    LowPassFilter,
    NoiseShape,
    auto_filter,
    auto_noise_shape,
    noise_gain,
)
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy.accounting.calibration import get_noise_multiplier, noise_multiplier_if_any
from doppler_hf.reports.planned_runs import PlannedRun, Target

BANDS: Final = (1, 2, 4, 8, 16)


class ShapedRun(NamedTuple):
    """A run with noise of one shape, relative to white noise of equal ε.

    Attributes:
        shape: The shape.
        noise_multiplier: σ.
        end: Noise of the sum of all gradients, which stays in the weights of SGD at a constant learning rate.
        step: Noise of one step, once it has settled.
        filtered: Noise of one step after the filter.
        loop: Noise in the weights once the gradient pulls back, through the filter, at a learning rate that falls linearly
            (`filters.closed_loop`): the root of what it costs in loss. None if the filter makes a loop that is unstable.
    """

    shape: NoiseShape
    noise_multiplier: float
    end: float
    step: float
    filtered: float
    loop: float | None


def shapes_of_equal_epsilon(run: PlannedRun, target: Target, *, low_pass_filter: LowPassFilter) -> list[ShapedRun]:
    """Calibrate a run of white noise with other shapes to the same ε; `filtered` and `loop` are by the filter.

    Returns:
        White noise first, then shapes of more bands, as far as a unit is drawn in its turn with a probability below 1.
    """
    runs, white = [], run.noise_multiplier * noise_gain(low_pass_filter) ** 0.5
    calibrate = _calibration(run, target)
    loop = ClosedLoop.of_run(run.steps, _falling(run.steps))
    of_white = loop.loss(low_pass_filter)
    for bands in BANDS:
        shape = NoiseShape.banded(bands)
        sigma = run.noise_multiplier if bands == 1 else calibrate(shape.c)
        if bands > run.steps or math.isinf(sigma):
            break
        more = sigma / run.noise_multiplier
        runs.append(
            ShapedRun(
                shape,
                sigma,
                end=more * shape.std_of_sum([1.0] * run.steps) / math.sqrt(run.steps),
                step=more * shape.std(run.steps),
                filtered=sigma * noise_gain(low_pass_filter, shape) ** 0.5 / white,
                loop=None if math.isinf(of_white) else more * math.sqrt(loop.loss(low_pass_filter, shape) / of_white),
            )
        )
    return runs


def taken_by_training(
    run: PlannedRun, target: Target | None, low_pass_filter: LowPassFilter | None
) -> tuple[NoiseShape, LowPassFilter, float]:
    """Return noise shape, filter and σ that a training of a planned run takes, as `run.choices` where memory suffices.

    It is given the `target` or, if that is None, σ, whose noise is white; it chooses the filter if that is None. The
    optimizer is Adam, and the rate falls linearly.
    """
    shape, rates = WHITE, _falling(run.steps)
    if target is not None:
        compared = _calibration(run, target)
        shape = auto_noise_shape(
            lambda bands: compared(NoiseShape.banded(bands).c),
            run.steps,
            learning_rates=rates,
            low_pass_filter=low_pass_filter,
        )
    if target is None or shape.is_white:
        return shape, low_pass_filter or PAPER_FILTERS["none"], run.noise_multiplier
    chosen = low_pass_filter or auto_filter(run.steps, learning_rates=rates, noise=shape)
    sigma = get_noise_multiplier(strategy=shape.c, **_terms(run, target))
    return shape, chosen, sigma


def _falling(steps: int) -> list[float]:
    return [1 - step / steps for step in range(steps)]


def _calibration(run: PlannedRun, target: Target) -> Callable[[tuple[float, ...]], float]:
    return functools.partial(noise_multiplier_if_any, **_terms(run, target))


def _terms(run: PlannedRun, target: Target) -> dict[str, Any]:
    return {
        "target_epsilon": target.epsilon,
        "target_delta": target.delta,
        "sample_rate": run.sample_rate,
        "steps": run.steps,
    }
