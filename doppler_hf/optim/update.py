"""Algorithm 3 for one parameter: weight decay, the filter, the second moment, and the step that they give."""

from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.optim.one_pass import ParameterTensors, StepConstants
from doppler_hf.optim.rounding import store


def update(tensors: ParameterTensors, constants: StepConstants) -> None:
    r"""Make one step of Algorithm 3 for one parameter, or for a slice of it (all but the gradient modified in place).

    The moment is that of the *unfiltered* gradient (Algorithm 3, whose two lines on v mix two conventions of β₂; torch's is
    used here). Noise adds its variance to it, which DPAdamBC takes away again (Tang et al. 2024); the paper's listing
    leaves that out. Nothing is divided by c_t and k_t here, as they are in the constants:
    √max(v̂ - n̂, floor) = √max(v - n, k floor) / √k.

    Args:
        tensors: x_t, g_t, the states of the filter, and v_{t-1}, or None to divide by nothing.
        constants: What the step is made with.

    Example:
        >>> tensors = ParameterTensors(torch.zeros(1), torch.tensor([3.0]), [], torch.zeros(1))
        >>> no_filter = lambda grad, tensors, coefficients: grad
        >>> update(tensors, StepConstants(no_filter, beta2=0.5, step_size=1.0, noise_var=0.5, floor=0.1))
        >>> tensors.exp_avg_sq, tensors.weight
        (tensor([4.5000]), tensor([-1.5000]))
    """
    x, g = in_float32(tensors.weight), in_float32(tensors.grad)
    # Of a fixed filter, m_t = s_1 + b_0 g_t and s_i ← s_{i+1} + b_i g_t - a_i m_t; see `low_pass`.
    m = constants.advance(g, tensors, constants.coefficients)
    # In half precision, decay and step are rounded once, together; a decay of 1 - 1e-5 rounded by itself is lost.
    if isinstance(constants.decay, Tensor) or constants.decay != 1.0:
        x.mul_(constants.decay)
    if tensors.exp_avg_sq is None:
        subtract(x, m, None, factor=constants.step_size)
    else:
        v = in_float32(tensors.exp_avg_sq)
        v.mul_(constants.beta2).addcmul_(g, g, value=1 - constants.beta2)
        if v is not tensors.exp_avg_sq:
            store(tensors.exp_avg_sq, v, entropy=g)
        denominator = v.sub(constants.noise_var).clamp_(min=constants.floor).sqrt_()
        subtract(x, m, denominator, factor=constants.step_size)
    if x is not tensors.weight:
        tensors.weight.copy_(x)


def subtract(
    x: Float[Tensor, "*shape"],
    numerator: Float[Tensor, "*shape"],
    divisor: Float[Tensor, "*shape"] | None,
    *,
    factor: float | Float[Tensor, ""],
) -> None:
    """Take factor · numerator / divisor, or without the latter, from x (modified in place), in one pass for a float."""
    if isinstance(factor, Tensor):
        x.sub_(factor * (numerator if divisor is None else numerator / divisor))
    elif divisor is None:
        x.add_(numerator, alpha=-factor)
    else:
        x.addcdiv_(numerator, divisor, value=-factor)
