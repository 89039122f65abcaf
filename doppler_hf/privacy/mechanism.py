"""The Gaussian mechanism: the one place where clipped sums become private gradients.

    g_t = (1/B)·(Σ_{i∈draw} clip(∇fᵢ, C) + 𝒩(0, σ²C²·I))                                    (Algorithm 1, line 5)

B is the *expected* batch size, never the drawn one: the drawn size depends on who is in the data. The noise is the
mechanism's own affair; what the other side of the privacy boundary needs to know of it is one float, `noise_std`.
"""

from collections.abc import Mapping

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.noise import add_gaussian_noise, bit_stream


class GaussianMechanism:
    """Add Gaussian noise to clipped sums and average them over the expected batch.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm. 0 adds no noise.
        max_grad_norm: C, the bound on one example's contribution.
        expected_batch_size: B, over all processes.
        seed: None for noise from the operating system's entropy. An integer makes it reproducible, for tests only.

    Raises:
        ValueError: A negative `noise_multiplier`, or a clip norm or batch size that is not positive.

    Example:
        >>> mechanism = GaussianMechanism(noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=100)
        >>> mechanism.noise_std
        0.005
        >>> mechanism.privatize({"weight": torch.zeros(3, 2)}, step=0)["weight"].shape
        torch.Size([3, 2])
    """

    def __init__(
        self, *, noise_multiplier: float, max_grad_norm: float, expected_batch_size: int, seed: int | None = None
    ) -> None:
        if not 0.0 <= noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {noise_multiplier}.")
        if not 0.0 < max_grad_norm < float("inf"):
            raise ValueError(f"max_grad_norm must be a finite number > 0, got {max_grad_norm}.")
        if expected_batch_size < 1:
            raise ValueError(f"expected_batch_size must be at least 1, got {expected_batch_size}.")
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.expected_batch_size = expected_batch_size
        self._stream = bit_stream(seed, purpose="noise")

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise per coordinate of the mean gradient, σC/B (the paper's σ_DP)."""
        return self.noise_multiplier * self.max_grad_norm / self.expected_batch_size

    def privatize(self, sums: Mapping[str, Float[Tensor, "..."]], *, step: int) -> dict[str, Float[Tensor, "..."]]:
        """Turn clipped sums into the private gradient of step `step`.

        Args:
            sums: This process's clipped sums by parameter name, contiguous (modified in place, so that no second gradient
                is held). With several processes each passes its own; they must agree in names, shapes and order.
            step: Optimizer step, counted from 0.

        Returns:
            The private mean gradient by parameter name, the same on every process: the tensors that were passed.
        """
        # Sensitivity: adding or removing one example changes the sum over all processes by at most C in the joint ℓ₂
        # norm, because each example is on one process only and contributes one clipped gradient. Process 0 adds the
        # noise before the sums are reduced, so no unnoised total exists anywhere, the noise is there exactly once
        # whatever the number of processes, and every replica receives the same bits.
        distributed = dist.is_available() and dist.is_initialized()
        is_noisy = self.noise_multiplier > 0.0 and (not distributed or dist.get_rank() == 0)
        std = self.noise_multiplier * self.max_grad_norm
        for total in sums.values():
            if is_noisy:
                add_gaussian_noise(total, std=std, stream=self._stream, step=step)
            if distributed:
                dist.all_reduce(total)
            total.div_(self.expected_batch_size)
        return dict(sums)
