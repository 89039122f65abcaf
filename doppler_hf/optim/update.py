"""Algorithm 3 for one parameter: weight decay, the filter, the second moment, and the step that they give."""

from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.optim.one_pass import ParameterTensors, StepConstants


def update(tensors: ParameterTensors, constants: StepConstants) -> None:
    """Make one step of Algorithm 3 for one parameter, or for a slice of it (all but the gradient modified in place).

    The second moment is of the *unfiltered* gradient, in torch's convention of β₂. DPAdamBC takes the noise's variance away
    from it (Tang et al. 2024); the paper's listing leaves that out. The corrections c_t and k_t are in the constants:
    √max(v̂ - n̂, floor) = √max(v - n, k floor) / √k.
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
        v = tensors.exp_avg_sq
        v.mul_(constants.beta2).addcmul_(g, g, value=1 - constants.beta2)
        # Not the root itself, which takes half as long again on a CPU.
        reciprocal = v.sub(constants.noise_var).clamp_(min=constants.floor).rsqrt_()
        subtract(x, m, reciprocal, factor=constants.step_size)
    if x is not tensors.weight:
        tensors.weight.copy_(x)


def subtract(
    x: Float[Tensor, "*shape"],
    first: Float[Tensor, "*shape"],
    second: Float[Tensor, "*shape"] | None,
    *,
    factor: float | Float[Tensor, ""],
) -> None:
    """Take factor · first · second, or without the latter, from x (modified in place), in one pass for a float."""
    if isinstance(factor, Tensor):
        x.sub_(factor * (first if second is None else first * second))
    elif second is None:
        x.add_(first, alpha=-factor)
    else:
        x.addcmul_(first, second, value=-factor)
