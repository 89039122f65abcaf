"""The shape of the noise that `auto` chooses, for a single run and for a trial of a search.

It needs no torch, so that `doppler-hf plan` starts fast and shows the shape that a training has. Choosing costs no privacy,
since it depends on public numbers only: ε, δ, q, T and the schedule.
"""

import functools
from collections.abc import Sequence

from doppler_hf.filters import LowPassFilter, NoiseShape, auto_noise_shape
from doppler_hf.privacy.accounting.calibration import noise_multiplier_if_any
from doppler_hf.privacy.accounting.selection import Guarantee, Selection


def shape_of_equal_epsilon(
    target: Guarantee,
    selection: Selection | None,
    *,
    sample_rate: float,
    steps: int,
    learning_rates: Sequence[float] | None,
    low_pass_filter: LowPassFilter | None,
    most_bands: int | None = None,
) -> NoiseShape:
    """Return the shape of the noise with the least loss among runs of equal ε.

    Args:
        target: ε and δ of a single run.
        selection: What a trial of a search satisfies in place of the target; None for a single run.
        sample_rate: q, the expected batch size divided by the number of records.
        steps: T, before a plan with groups leaves out its last steps.
        learning_rates: As for `auto_noise_shape`.
        low_pass_filter: As for `auto_noise_shape`.
        most_bands: As for `auto_noise_shape`.
    """
    # A trial has to satisfy the first of its two guarantees, which nearly always decides about its noise.
    epsilon, delta = target if selection is None else selection.first
    of_strategy = functools.partial(
        noise_multiplier_if_any, target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps
    )
    return auto_noise_shape(
        lambda bands: of_strategy(NoiseShape.banded(bands).c),
        steps,
        learning_rates=learning_rates,
        low_pass_filter=low_pass_filter,
        most_bands=most_bands,
    )
