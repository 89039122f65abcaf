"""Factors bring every norm to C, also where float32 has few digits left."""

import torch

from doppler_hf.privacy.clipping.clip_factors import SMALLEST_FACTOR, factors_of
from doppler_hf.privacy.clipping.per_sample_gradient import Norms


def factors(norm, *, in_float64, clipping="vanilla"):
    norms = {"all": Norms(torch.tensor([norm], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))}
    found = factors_of(
        norms,
        torch.ones(1, dtype=torch.float64),
        max_grad_norm=1e-4,
        clipping=clipping,
        dtype=torch.float32,
        in_float64=torch.tensor([in_float64]),
    )
    return found["all"].item()


def test_an_example_whose_factor_float32_would_round_by_much_contributes_nothing():
    largest = 1e-4 / SMALLEST_FACTOR
    assert factors(0.9 * largest, in_float64=False) > 0.0
    assert factors(1.1 * largest, in_float64=False) == 0.0
    assert factors(1.1 * largest, in_float64=True) > 0.0
