"""What a shape of the noise buys at equal ε: less noise that stays in the weights, for more in each step.

Each number of bands b needs a σ of its own: a unit takes part in ⌈T/b⌉ turns, at b times the rate, so that sampling hides
less of it.
"""

import math
from typing import Final, NamedTuple

from doppler_hf.filters import ClosedLoop, LowPassFilter, NoiseShape, noise_gain
from doppler_hf.privacy.accounting.accounting import Accountant, Releases, get_noise_multiplier
from doppler_hf.reports.planned_runs import PlannedRun

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


def shapes_of_equal_epsilon(
    run: PlannedRun, *, target_epsilon: float, delta: float, accountant: Accountant, low_pass_filter: LowPassFilter
) -> list[ShapedRun]:
    """Calibrate a run with other shapes of the noise to the same ε.

    Args:
        run: The run, with white noise.
        target_epsilon: ε > 0.
        delta: δ, in (0, 1).
        accountant: The accountant that calibrates.
        low_pass_filter: The filter, by which `filtered` and `loop` are.

    Returns:
        White noise first, then shapes of more bands, as far as a unit is drawn in its turn with a probability below 1.
    """
    runs, white = [], run.noise_multiplier * noise_gain(low_pass_filter) ** 0.5
    loop = ClosedLoop.of_run(run.steps, [1 - step / run.steps for step in range(run.steps)])
    of_white = loop.loss(low_pass_filter)
    for bands in BANDS:
        shape = NoiseShape.banded(bands)
        turns = Releases.in_turns(run.noise_multiplier, run.sample_rate, run.steps, groups=bands)
        if bands > 1 and (turns.sample_rate >= 1.0 or bands > run.steps):
            break
        sigma = run.noise_multiplier
        if bands > 1:
            try:
                sigma = get_noise_multiplier(
                    target_epsilon=target_epsilon,
                    target_delta=delta,
                    sample_rate=turns.sample_rate,
                    steps=turns.steps,
                    accountant=accountant,
                    unchecked=True,
                )
            except ValueError:  # ε is so small that no noise multiplier up to 10⁶ is known to reach it.
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
