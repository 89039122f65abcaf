"""Rounding at random: one of the two neighbours, right on average, and a second moment that does not stand still."""

import math

import pytest
import torch

from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.rounding import store
from tests.support.tiers import thorough


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def between_neighbours(fraction, seed):
    """A bfloat16 number between 1e-10 and 1e2, its next larger one, and a float32 number in between."""
    exponent = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() * 12 - 10
    low = torch.tensor(10.0**exponent).bfloat16().float()
    high = (low.view(torch.int32) + 2**16).view(torch.float32)
    return low, high, low + fraction * (high - low)


def stored(value, entropy):
    state = torch.full(entropy.shape, 7.0, dtype=torch.bfloat16)
    store(state, value.expand(entropy.shape).contiguous(), entropy=entropy)
    return state.float()


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_rounding_is_unbiased_and_takes_a_neighbour(scale):
    numel = 100_000
    for seed in range(60):
        low, high, value = between_neighbours(fraction := (seed + 0.5) / 60, seed)
        result = stored(value, scale * normal(numel, seed=seed))
        is_up = result == high
        assert ((result == low) | is_up).all()
        # 5 standard errors, 60 times: a false alarm once in 30,000 runs, if the seeds were not fixed.
        z = (is_up.float().mean().item() - fraction) / math.sqrt(fraction * (1 - fraction) / numel)
        assert abs(z) < 5


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0**-126, 1e-40, 3.0e38, math.inf])
def test_what_bfloat16_can_hold_is_stored_exactly(value):
    exact = torch.tensor(value).bfloat16().float()
    assert (stored(exact, normal(1000)) == exact).all()


def test_rounding_depends_on_number_and_entropy_alone():
    values, entropy = normal(1000).abs(), normal(1000, seed=1)
    before, state = torch.get_rng_state(), torch.zeros(1000, dtype=torch.bfloat16)
    store(state, values, entropy=entropy)
    assert torch.equal(torch.get_rng_state(), before)
    for part in (slice(0, 7), slice(500, 1000)):
        again = torch.zeros_like(state[part])
        store(again, values[part], entropy=entropy[part])
        assert torch.equal(again, state[part])


@pytest.mark.parametrize("dtype", [*thorough(torch.float32), torch.bfloat16], ids=str)
def test_a_second_moment_of_half_size_follows_the_full_one(dtype):
    numel, beta2, std = 2048, 0.999, 0.1
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for _ in range(2)]
    full, half = (
        DopplerOptimizer([p], 1e-3, base="adam", beta2=beta2, state_dtype=state_dtype)
        for p, state_dtype in zip(params, (torch.float32, torch.bfloat16), strict=True)
    )
    nearest = torch.zeros(numel, dtype=torch.bfloat16)
    for _ in range(3000):
        grad = (std * torch.randn(numel, generator=generator)).to(dtype)
        for p, optimizer in zip(params, (full, half), strict=True):
            p.grad = grad
            optimizer.step()
        nearest = (beta2 * nearest.float() + (1 - beta2) * grad.float() ** 2).bfloat16()
    v, stored_v = full.state[params[0]]["exp_avg_sq"], half.state[params[1]]["exp_avg_sq"].float()
    errors = stored_v / v - 1
    # Measured: 0.05 % on average and 9 % in 95 of 100 coordinates; rounded to nearest 34 % and 41 %.
    assert abs(errors.mean()) < 0.005
    assert errors.abs().quantile(0.95) < 0.12
    assert (nearest.float() / v - 1).mean() > 0.25
