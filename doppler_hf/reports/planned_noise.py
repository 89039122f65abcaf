"""Noise shape, filter and σ that a training takes of a planned run."""

import dataclasses
from typing import Any

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, NoiseShape, auto_filter, auto_noise_shape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy.accounting.accounting import steps_of_whole_turns
from doppler_hf.privacy.accounting.calibration import get_noise_multiplier, noise_multiplier_if_any
from doppler_hf.reports.planned_runs import PlannedRun, Target


def taken_by_training(
    run: PlannedRun, target: Target | None, low_pass_filter: LowPassFilter | None, *, keeps_steps: bool = False
) -> tuple[NoiseShape, LowPassFilter, PlannedRun]:
    """Return noise shape and filter that a training of a planned run takes, as `run.choices` where memory suffices.

    It is given the `target` or, if that is None, σ, whose noise is white; it chooses the filter if that is None. The
    optimizer is Adam, and the rate falls linearly. Its steps may be fewer, unless they are kept, as `run.plan`.
    """
    white = WHITE, low_pass_filter or PAPER_FILTERS["none"], run
    if target is None or run.sampling == "poisson":
        return white
    rates = [1 - step / run.steps for step in range(run.steps)]
    terms: dict[str, Any] = {
        "target_epsilon": target.epsilon,
        "target_delta": target.delta,
        "sample_rate": run.sample_rate,
        "steps": run.steps,
    }
    shape = auto_noise_shape(
        lambda bands: noise_multiplier_if_any(NoiseShape.banded(bands).c, **terms),
        run.steps,
        learning_rates=rates,
        low_pass_filter=low_pass_filter,
    )
    if shape.is_white:
        return white
    whole = steps_of_whole_turns(run.steps, sample_rate=run.sample_rate, groups=shape.bands)
    steps = run.steps if keeps_steps else whole
    rates = [1 - step / steps for step in range(steps)]
    chosen = low_pass_filter or auto_filter(steps, learning_rates=rates, noise=shape)
    sigma = get_noise_multiplier(strategy=shape.c, **terms | {"steps": steps})
    return shape, chosen, dataclasses.replace(run, steps=steps, noise_multiplier=sigma)
