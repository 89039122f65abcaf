"""A clip norm that follows a quantile of the gradients' norms (Andrew et al. 2021, https://arxiv.org/abs/1905.03871).

    b̃_t = ½ + (1/B)·(Σ_{i∈draw} wᵢ(bᵢ − ½) + 𝒩(0, σ_b²/4)),    C_{t+1} = C_t·exp(−η(b̃_t − γ))

where bᵢ falls from 1 to 0 as ‖gᵢ‖ passes C_t (`ClippedGradients.num_within`). This count of gradients that are not clipped
is one more coordinate of what the step releases, over the same draw, with σ_b in units of its sensitivity of ½. For both
together `joint_noise_multiplier` accounts. C_{t+1} is a function of earlier releases alone, and the gradient's noise is
σ·C_{t+1}. In units of its noise, a step's sensitivity does not depend on the clip norm. So the steps compose adaptively,
which the accountant bounds.
"""

import math
from typing import Final

from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.noise.mechanism import Mechanism

COUNT_SENSITIVITY: Final = 0.5
# Sensitivity: gradients of nothing but rounding, some 1e-7 that follow others' padding, are not to be clipped up to C.
SMALLEST_CLIP_NORM: Final = 1e-4
RATE: Final = 0.2  # η, as in the paper
FARTHEST: Final = 1e3  # C stays within so many times the first.


class AdaptiveClip:
    """Releases the noisy share of gradients that are not clipped, and moves the clip norm towards their quantile.

    Args:
        mechanism: With σ_b as `noise_multiplier` and ½ as `max_grad_norm`.
        quantile: γ, the share of gradients that are to be no longer than the clip norm.
        first: The clip norm of the first step of the training.
        max_grad_norm: That of the next step, if it is another one.

    Attributes:
        mechanism: As given.
        max_grad_norm: C_t, the clip norm of the next step.
        rate: η.

    Example:
        >>> mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=4)
        >>> clip = AdaptiveClip(mechanism, quantile=0.5, first=1.0)
        >>> clip.release(torch.tensor(2.0), step=0)  # four gradients, none of them clipped
        0.9048374180359595
    """

    def __init__(self, mechanism: Mechanism, *, quantile: float, first: float, max_grad_norm: float | None = None) -> None:
        self.mechanism, self.rate = mechanism, RATE
        self.max_grad_norm = first if max_grad_norm is None else max_grad_norm
        self._quantile, self._first = quantile, first

    def release(self, count: Float[Tensor, ""], *, step: int) -> float:
        """Return the clip norm of the next step, the same on every process.

        Args:
            count: This process's Σ wᵢ(bᵢ − ½) over the draw (modified in place).
            step: Optimizer step, counted from 0.
        """
        # Sensitivity: an example changes the count by ±½ times its share of its unit, and a unit by at most ½.
        share = 0.5 + float(self.mechanism.privatize({"count": count}, step=step)["count"])
        moved = math.log(self.max_grad_norm / self._first) - self.rate * (share - self._quantile)
        moved = min(max(moved, -math.log(FARTHEST)), math.log(FARTHEST))
        self.max_grad_norm = max(SMALLEST_CLIP_NORM, self._first * math.exp(moved))
        return self.max_grad_norm
