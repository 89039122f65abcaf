"""An attacker who guesses the seed of the noise, and subtracts the noise.

`args.seed` is public: 42 by default, and saved with every checkpoint. If the noise came from a generator seeded with it, an
attacker who knows the code could draw the same noise. A guess is tested on the first step's private gradient g, which is
mostly noise. With n coordinates compared, a wrong guess z correlates with g by about 𝒩(0, 1/n), the right one by nearly 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.noise import Mechanism

Gradients = Mapping[str, Float[Tensor, "..."]]

# The most numbers that other code may have drawn from torch's generator since its seeding, or since the last noise.
MAX_SKIPPED: Final = 64
# A guess is tested on the first parameters, until they have LEAST_COMPARED coordinates, and on MOST_COMPARED of any one:
# torch fills a tensor from its front, sixteen values at a time, so that the front does not depend on the tensor's size.
LEAST_COMPARED: Final = 256
MOST_COMPARED: Final = 4096
# In standard deviations of the correlation of a wrong guess: one in 10⁹ passes.
THRESHOLD: Final = 6.0


class NoiseReplay:
    """Tries the usual generators under one seed, and subtracts the noise of one that fits.

    Args:
        seed: The guess.
        mechanism: The run's mechanism, of which the size of the noise is public.

    Attributes:
        source: The generator that fits, in words, or None.
    """

    def __init__(self, seed: int, *, mechanism: Mechanism) -> None:
        self._seed, self._mechanism, self._reproduced = seed, mechanism, mechanism.reproducible(seed)
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._candidates: dict[str, Callable[[Gradients, int], Gradients | None]] = {
            f"torch's generator, seeded with {seed}": self._of_torch,
            f"the trainer's own noise under noise_seed={seed}": self._of_the_mechanism,
        }
        self.source: str | None = None

    def without_noise(self, gradients: Gradients, *, step: int) -> Gradients:
        """Return the gradients of one step minus the noise that a guess reproduces, or unchanged if none does.

        A guess that does not fit once is dropped.

        Args:
            gradients: The private gradient by parameter name, in the order in which noise is drawn.
            step: Optimizer step, counted from 0.
        """
        for source, replay in tuple(self._candidates.items()):
            noise = replay(gradients, step)
            if noise is not None and agree(gradients, noise):
                self.source, self._candidates = source, {source: replay}
                return {name: gradient - noise[name].to(gradient) for name, gradient in gradients.items()}
            del self._candidates[source]
        return gradients

    def _of_the_mechanism(self, gradients: Gradients, step: int) -> Gradients:
        zeros = {name: torch.zeros(gradient.shape, device=gradient.device) for name, gradient in gradients.items()}
        return self._reproduced.privatize(zeros, step=step)

    def _of_torch(self, gradients: Gradients, step: int) -> Gradients | None:
        """Return the noise of torch's CPU generator, seeded once, or in every step with the seed or the seed + step."""
        probe = probe_of(gradients)
        starts = (self._state, *(torch.Generator().manual_seed(self._seed + shift).get_state() for shift in (0, step)))
        generator = torch.Generator()
        for start in starts:
            for skipped in range(MAX_SKIPPED):
                for compared in (probe, gradients):
                    generator.set_state(start)
                    torch.rand(skipped, generator=generator)
                    noise = {
                        name: torch.randn(gradient.shape, generator=generator) * self._mechanism.noise_std(step)
                        for name, gradient in compared.items()
                    }
                    if not agree(compared, noise):
                        break
                else:
                    self._state = generator.get_state()
                    return noise
        return None


def probe_of(gradients: Gradients) -> dict[str, Float[Tensor, "..."]]:
    """Return the first parameters' gradients, and of a large one only the front."""
    probe: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        probe[name] = gradient.flatten()[:MOST_COMPARED] if gradient.numel() > MOST_COMPARED else gradient
        if sum(part.numel() for part in probe.values()) >= LEAST_COMPARED:
            break
    return probe


def agree(gradients: Gradients, noise: Gradients) -> bool:
    """Return whether the two correlate by more than chance."""
    product = sum(float(torch.sum(gradients[name].double().cpu() * z.double().cpu())) for name, z in noise.items())
    squares = [sum(float(values[name].double().square().sum()) for name in noise) for values in (gradients, noise)]
    size = sum(z.numel() for z in noise.values())
    return product * math.sqrt(size) > THRESHOLD * math.sqrt(squares[0] * squares[1])
