r"""The second-moment stage: what DPAdam and DPAdamBC divide the filtered gradient by.

    v_t = β₂ v_{t-1} + (1 - β₂) g_t²,    v̂_t = v_t / k_t,    k_t = 1 - β₂ᵗ

    DPAdam:    d_t = m̂_t / max(√v̂_t, ε)                        = m̂_t / √max(v̂_t - 0, ε²)
    DPAdamBC:  d_t = m̂_t / √max(v̂_t - noise_std², floor)

The moment is that of the *unfiltered* gradient (DOPPLER, Algorithm 2, whose two lines on v mix two conventions of β;
torch's is used here). White noise adds its variance to it, which DPAdamBC takes away again (Tang et al. 2024); the
paper's listing leaves that out. Without noise and with floor = ε² the second is the first, so there is one function.

k_t is one number for a whole tensor. It is multiplied into the constants, and √k_t into the step size, instead of divided
out of every element:  √max(v̂ - noise_std², floor) = √max(v - k noise_std², k floor) / √k.
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


def denominator(
    exp_avg_sq: Float[Tensor, "*shape"], *, noise_var: float | Tensor, floor: float | Tensor
) -> Float[Tensor, "*shape"]:
    r"""Returns √max(v - noise_var, floor), a new tensor.

    Args:
        exp_avg_sq: v_t, any shape.
        noise_var: k_t times the variance of the noise per coordinate of the mean gradient; 0 for DPAdam.
        floor: k_t times the least squared denominator, positive, in units of the squared gradient.

    Example:
        >>> import torch
        >>> denominator(torch.tensor([20.0, 3.0]), noise_var=4.0, floor=0.25)
        tensor([4.0000, 0.5000])

    Source:
        Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
        Correction)", AAAI 2024.
    """
    return exp_avg_sq.sub(noise_var).clamp_(min=floor).sqrt_()
