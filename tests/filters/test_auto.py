"""The rules minimize the loss that they state, and keep their limits."""

import math

import numpy as np
import pytest

from doppler_hf.filters import (
    PAPER_FILTERS,
    ClosedLoop,
    LowPassFilter,
    NoiseShape,
    auto_filter,
    auto_noise_shape,
    group_delay,
    momentum,
)
from tests.support.tiers import thorough

NONE = PAPER_FILTERS["none"]
BANDED = NoiseShape.banded(4)
# σ of 60,000 examples, B = 1000, T = 300, ε = 3, by the number of bands.
SIGMAS = {1: 0.8346, 2: 0.9837, 4: 1.2071, 8: 1.5438, 16: 2.0154}


def auto_shape(sigmas=SIGMAS, *, steps=300, **options):
    return auto_noise_shape(lambda bands: sigmas.get(bands, math.inf), steps, **options)


def delay(low_pass_filter):
    return float(group_delay(low_pass_filter, np.zeros(1))[0])


@pytest.mark.parametrize("noise", [NoiseShape(), BANDED], ids=str)
@pytest.mark.parametrize("steps", [100, *thorough(1000)])
def test_the_filter_has_nearly_the_least_loss_and_no_shorter_one_has(steps, noise):
    chosen, loop = auto_filter(steps, noise=noise), ClosedLoop.of_run(steps)
    tried = [loop.loss(momentum(each / (1 + each)), noise) for each in np.geomspace(0.01, steps / 50, 60)]
    assert loop.loss(chosen, noise) <= 1.025 * min(tried)
    half = momentum(delay(chosen) / (2 + delay(chosen)))
    assert loop.loss(half, noise) > 1.015 * min(tried)


def test_the_longest_runs_have_a_filter():
    """In a run of 100,000 steps, a delay of 2 % of them would be that of β = 0.9995, which rounds to 1."""
    assert delay(auto_filter(100_000, noise=NoiseShape.banded(64))) == pytest.approx(999)


def test_shaped_noise_asks_for_more_of_a_filter():
    assert delay(auto_filter(1000, noise=BANDED)) > 3 * delay(auto_filter(1000)) > 0


@pytest.mark.parametrize("steps", [25, 12_345])
def test_the_delay_is_at_most_a_fiftieth_of_the_run(steps):
    # β has three decimals.
    assert 0 < delay(auto_filter(steps, noise=BANDED)) <= steps / 50 * 1.01


@pytest.mark.parametrize("low_pass_filter", ["momentum", "first-order-v1"])
def test_the_shape_has_the_least_loss_of_all_numbers_of_bands(low_pass_filter):
    loop, low_pass_filter = ClosedLoop.of_run(300), LowPassFilter.parse(low_pass_filter)
    losses = {}
    for bands, sigma in SIGMAS.items():
        shape = loop.best_shape(bands, low_pass_filter)
        losses[bands] = sigma**2 * loop.loss(low_pass_filter, shape), shape
    chosen = auto_shape(low_pass_filter=low_pass_filter)
    assert chosen == min(losses.values(), key=lambda each: each[0])[1]
    assert chosen.bands > 1


def test_where_shaping_costs_more_than_it_gains_noise_is_white():
    # Every unit in nearly every step: σ grows like the root of the bands.
    assert auto_shape({1: 1.0, 2: 1.42, 4: 2.0}, steps=25).is_white
    assert auto_shape({1: 1.0}).is_white
    assert auto_shape({1: 1.0, 2: 0.1}, steps=1).is_white
    # Without a filter it comes back in the sharp directions.
    assert auto_shape(low_pass_filter=NONE).is_white
    # Whatever is added to a loop that is unstable, it stays so.
    assert auto_shape(low_pass_filter=PAPER_FILTERS["second-order"]).is_white


def test_the_filter_is_chosen_with_the_shape():
    together = auto_shape()
    # The filter for white noise would be lighter, and shaping worth less.
    light = auto_shape(low_pass_filter=momentum(0.5))
    assert together.bands >= light.bands > 1
    assert together != light


def test_the_schedule_counts():
    assert auto_shape(learning_rates=[1 - step / 300 for step in range(300)]) != auto_shape()
