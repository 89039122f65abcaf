"""The training loss as a private number: clipped for each example, summed over the draw, and noised.

    (1/B)·(Σ_{i∈draw} wᵢ·clip(lossᵢ, ±L) + 𝒩(0, σ_L²L²)),    wᵢ the example's share of its unit, 1 for examples of their own

It is one more coordinate of what the step releases, over the same draw as the gradient. `joint_noise_multiplier` accounts
for both together.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.noise.mechanism import GaussianMechanism


class PrivateLoss:
    """Adds up the losses of a draw on a device and releases their noisy mean over the expected batch.

    The mechanism has σ_L as `noise_multiplier` and L as `max_grad_norm`.

    Example:
        >>> mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=2.0, expected_batch_size=2)
        >>> loss = PrivateLoss(mechanism, device=torch.device("cpu"))
        >>> loss.add(torch.tensor([0.5, 7.0]))
        >>> loss.release(step=0).item()
        1.25
    """

    def __init__(self, mechanism: GaussianMechanism, *, device: torch.device) -> None:
        self.mechanism = mechanism
        # In float64, so that what one example adds does not depend on how much the others have added up to.
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, losses: Float[Tensor, " batch"], *, weights: Float[Tensor, " batch"] | None = None) -> None:
        """Add the losses of some of the draw's examples, of which NaN counts as L, each times its share of its unit.

        These weights, 1 by default, add up to at most 1 for a unit.
        """
        # Sensitivity: an example changes the sum by a number within ±L, whatever its loss, and a unit by at most L.
        bound = self.mechanism.max_grad_norm
        clipped = losses.double().nan_to_num(nan=bound).clamp(-bound, bound)
        self._sum += clipped.sum() if weights is None else clipped @ weights.double()

    def reset(self) -> None:
        """Begin the next draw, and forget what was added for one that was not released."""
        self._sum = torch.zeros_like(self._sum)

    def release(self, *, step: int) -> Float[Tensor, ""]:
        """Return the private mean loss of the draw, the same on every process, and begin the next draw."""
        released = self.mechanism.privatize({"loss": self._sum}, step=step)["loss"]
        self.reset()
        return released
