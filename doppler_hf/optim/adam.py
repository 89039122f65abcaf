r"""The second-moment stage: the direction of DPAdam and of DPAdamBC from the filtered gradient.

    v_t = β₂ v_{t-1} + (1 - β₂) g_t²,    v̂_t = v_t / (1 - β₂ᵗ)

    DPAdam:    d_t = m̂_t / max(√v̂_t, ε)
    DPAdamBC:  d_t = m̂_t / √max(v̂_t - noise_std², floor)

The moment is that of the *unfiltered* gradient (DOPPLER, Algorithm 2, whose two lines on v mix two conventions of β;
torch's is used here). White noise adds its variance to it, which DPAdamBC takes away again (Tang et al. 2024); the
paper's listing leaves that out.
"""

from jaxtyping import Float
from torch import Tensor


def second_moment(
    grad: Float[Tensor, "*shape"], exp_avg_sq: Float[Tensor, "*shape"], *, beta2: float, step: int
) -> Float[Tensor, "*shape"]:
    r"""Advances v by one step and corrects its zero start: v̂_t.

    Args:
        grad: The unfiltered gradient g_t, any shape.
        exp_avg_sq: v, of the gradient's shape and dtype, zeros at first (modified in place).
        beta2: Decay β₂, in [0, 1).
        step: t, 1 at the first step.

    Returns:
        v̂_t, a new tensor.

    Example:
        >>> import torch
        >>> second_moment(torch.tensor([3.0]), torch.zeros(1), beta2=0.5, step=1)
        tensor([9.])

    Source:
        DOPPLER, Algorithm 2.
    """
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return exp_avg_sq / (1 - beta2**step)


def adam_direction(m_hat: Float[Tensor, "*shape"], v_hat: Float[Tensor, "*shape"], *, eps: float) -> Float[Tensor, "*shape"]:
    r"""DPAdam: d = m̂ / max(√v̂, ε).

    Args:
        m_hat: The filtered gradient m̂_t, any shape.
        v_hat: The second moment v̂_t, same shape.
        eps: Least denominator ε, in units of the gradient. The paper takes the maximum where torch's Adam takes the
            sum.

    Returns:
        The direction, a new tensor.

    Example:
        >>> import torch
        >>> adam_direction(torch.tensor([2.0, 1.0]), torch.tensor([16.0, 0.0]), eps=0.1)
        tensor([ 0.5000, 10.0000])

    Source:
        DOPPLER, Algorithm 2.
    """
    return m_hat / v_hat.sqrt().clamp_(min=eps)


def adam_bc_direction(
    m_hat: Float[Tensor, "*shape"], v_hat: Float[Tensor, "*shape"], *, noise_std: float, floor: float
) -> Float[Tensor, "*shape"]:
    r"""DPAdamBC: d = m̂ / √max(v̂ - noise_std², floor).

    Args:
        m_hat: The filtered gradient m̂_t, any shape.
        v_hat: The second moment v̂_t, same shape.
        noise_std: Standard deviation of the noise, per coordinate of the mean gradient.
        floor: Least squared denominator, positive, in units of the squared gradient.

    Returns:
        The direction, a new tensor.

    Example:
        >>> import torch
        >>> adam_bc_direction(torch.tensor([2.0, 1.0]), torch.tensor([20.0, 3.0]), noise_std=2.0, floor=0.01)
        tensor([ 0.5000, 10.0000])

    Source:
        Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
        Correction)", AAAI 2024.
    """
    return m_hat / (v_hat - noise_std**2).clamp_(min=floor).sqrt_()
