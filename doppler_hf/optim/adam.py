r"""The second-moment stage: the denominators of DPAdam and of DPAdamBC.

    v_t = β₂ v_{t-1} + (1 - β₂) g_t²,    v̂_t = v_t / k_t,    k_t = 1 - β₂ᵗ

    DPAdam:    d_t = m̂_t / max(√v̂_t, ε)
    DPAdamBC:  d_t = m̂_t / √max(v̂_t - noise_std², floor)

The moment is that of the *unfiltered* gradient (DOPPLER, Algorithm 2, whose two lines on v mix two conventions of β;
torch's is used here). White noise adds its variance to it, which DPAdamBC takes away again (Tang et al. 2024); the
paper's listing leaves that out.

k_t is one number for a whole tensor. It is multiplied into the constants, and √k_t into the step size, instead of divided
out of every element: both functions return √k_t times the denominator above.
"""

from jaxtyping import Float
from torch import Tensor


def second_moment(grad: Float[Tensor, "*shape"], exp_avg_sq: Float[Tensor, "*shape"], *, beta2: float) -> None:
    r"""Advances v by one step (modified in place); it is not yet corrected for its zero start.

    Args:
        grad: The unfiltered gradient g_t, any shape.
        exp_avg_sq: v, of the gradient's shape and dtype, zeros at first (modified in place).
        beta2: Decay β₂, in [0, 1).

    Example:
        >>> import torch
        >>> v = torch.zeros(1)
        >>> second_moment(torch.tensor([3.0]), v, beta2=0.5)
        >>> v
        tensor([4.5000])

    Source:
        DOPPLER, Algorithm 2.
    """
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def adam_denominator(exp_avg_sq: Float[Tensor, "*shape"], *, eps: float, correction: float) -> Float[Tensor, "*shape"]:
    r"""DPAdam: √k · max(√v̂, ε) = max(√v, √k ε).

    Args:
        exp_avg_sq: v_t, any shape.
        eps: Least denominator ε, in units of the gradient. The paper takes the maximum where torch's Adam takes the
            sum.
        correction: k_t = 1 - β₂ᵗ.

    Returns:
        √k times the denominator, a new tensor.

    Example:
        >>> import torch
        >>> adam_denominator(torch.tensor([4.0, 0.0]), eps=0.5, correction=0.25)
        tensor([2.0000, 0.2500])

    Source:
        DOPPLER, Algorithm 2.
    """
    return exp_avg_sq.sqrt().clamp_(min=eps * correction**0.5)


def adam_bc_denominator(
    exp_avg_sq: Float[Tensor, "*shape"], *, noise_std: float, floor: float, correction: float
) -> Float[Tensor, "*shape"]:
    r"""DPAdamBC: √k · √max(v̂ - noise_std², floor) = √max(v - k noise_std², k floor).

    Args:
        exp_avg_sq: v_t, any shape.
        noise_std: Standard deviation of the noise, per coordinate of the mean gradient.
        floor: Least squared denominator, positive, in units of the squared gradient.
        correction: k_t = 1 - β₂ᵗ.

    Returns:
        √k times the denominator, a new tensor.

    Example:
        >>> import torch
        >>> adam_bc_denominator(torch.tensor([5.0, 1.0]), noise_std=2.0, floor=1.0, correction=0.25)
        tensor([2.0000, 0.5000])

    Source:
        Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
        Correction)", AAAI 2024.
    """
    return exp_avg_sq.sub(correction * noise_std**2).clamp_(min=correction * floor).sqrt_()
