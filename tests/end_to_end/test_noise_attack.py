"""An attacker who knows the code, every argument and the seed takes the usual noise off a gradient, and not ours.

He sees the private gradients of a few steps. Rows of an embedding that no example touched show the bare noise there. He
replays every generator that one might have used with the seed he knows, and compares. What he takes for the noise must
agree with all of 95 × 64 bare coordinates to 1e-5 of their size; another stream's agrees in one with a probability below
1e-4, so that he is wrong once in 10²⁴⁰⁰⁰ runs.
"""

import numpy as np
import pytest
import torch
from transformers import set_seed

from doppler_hf.privacy import GaussianMechanism

SEED = 42  # `args.seed`, saved with every checkpoint
SIGMA, C, B = 1.1, 0.5, 8
SHAPES = {"head": (3, 5), "embedding": (100, 64)}
TOUCHED, STEPS = 5, 3  # rows of the embedding that some example touched
STD = SIGMA * C


def clipped_sums(step):
    """What nobody may learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    sums = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    sums["embedding"][TOUCHED:] = 0.0
    return sums


def torch_normals(generator):
    return lambda shape, step: torch.randn(shape, generator=generator)


def numpy_normals(generator):
    return lambda shape, step: torch.from_numpy(generator.standard_normal(shape)).float()


def global_normals(seed):
    set_seed(seed)
    return torch_normals(torch.default_generator)


def mechanism_normals(mechanism):
    """The noise of a mechanism by itself, in units of its standard deviation: what it adds to zeros."""
    return lambda shape, step: mechanism.privatize({"": torch.zeros(shape)}, step=step)[""] / mechanism.noise_std(step)


def gaussian(**arguments):
    return GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B, **arguments)


# What a seed gives. Each is used by victims, and tried by the attacker.
USUAL = {
    "torch's global generator": global_normals,
    "a torch generator": lambda seed: torch_normals(torch.Generator().manual_seed(seed)),
    "NumPy's global generator": lambda seed: numpy_normals(np.random.RandomState(seed)),
    "a NumPy generator": lambda seed: numpy_normals(np.random.default_rng(seed)),
    "a NumPy Philox": lambda seed: numpy_normals(np.random.Generator(np.random.Philox(seed))),
    "a seeded mechanism": lambda seed: mechanism_normals(gaussian(seed=seed)),
}


def released(normals):
    """The private gradients of all steps, of a victim who draws its noise like this."""
    gradients = []
    for step in range(STEPS):
        sums = clipped_sums(step)
        gradients.append({name: (total + normals(total.shape, step) * STD) / B for name, total in sums.items()})
    return gradients


def replay(normals):
    """The noise of the mean gradient of all steps."""
    return [{name: normals(shape, step) * STD / B for name, shape in SHAPES.items()} for step in range(STEPS)]


def agrees(noise, gradient):
    """Whether this noise is what shows in the rows that no example touched."""
    return torch.allclose(noise["embedding"][TOUCHED:], gradient["embedding"][TOUCHED:], rtol=1e-5, atol=1e-7)


def attack(gradients, *, seeds=(SEED,)):
    """Return the noise of every step and the name of the generator it came from, or None."""
    for name, make in USUAL.items():
        for seed in seeds:
            noise = replay(make(seed))
            if all(agrees(*pair) for pair in zip(noise, gradients)):
                return noise, name
    return None


def clean(gradient, noise):
    return {name: (gradient[name] - noise[name]) * B for name in SHAPES}


@pytest.mark.parametrize("victim", USUAL)
def test_usual_noise_is_taken_off(victim):
    gradients = released(USUAL[victim](SEED))
    noise, name = attack(gradients)
    assert name == victim or {name, victim} == {"torch's global generator", "a torch generator"}  # one stream
    for step in range(STEPS):
        assert not torch.allclose(gradients[step]["embedding"] * B, clipped_sums(step)["embedding"], atol=0.1)
        for parameter, total in clean(gradients[step], noise[step]).items():
            torch.testing.assert_close(total, clipped_sums(step)[parameter], atol=2e-6, rtol=0)


@pytest.mark.parametrize("safe", [False, True])
def test_ours_stays(safe):
    set_seed(SEED)
    mechanism = gaussian(floating_point_safe=safe)
    gradients = [mechanism.privatize(clipped_sums(step), step=step) for step in range(STEPS)]
    assert attack(gradients, seeds=(SEED, 0, 1)) is None
    # Nor do two steps share theirs, nor has the attacker's own copy of the mechanism it.
    twin = replay(mechanism_normals(gaussian(floating_point_safe=safe)))
    for step in range(STEPS):
        assert not any(agrees(other, gradients[step]) for other in (*gradients[:step], *twin))
