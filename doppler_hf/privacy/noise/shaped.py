"""The recursion of shaped noise, y_t = z_t - Σ_{k=1}^{b-1} c_k y_{t-k}, which remembers b - 1 steps of noise.

This memory is secret: it would reveal later noise in the gradients. It is never saved, and a run that is resumed begins a
new recursion, which the ledger accounts for as such.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters.noise_shape import NoiseShape


class ShapedNoise:
    """The noise of all steps so far, as far as the next one depends on it: b - 1 tensors for each parameter.

    Args:
        shape: The strategy c.
    """

    def __init__(self, shape: NoiseShape) -> None:
        self.coefficients = shape.c[1:]
        self._past: dict[str, list[Tensor]] = {}  # of each parameter, the last step first

    def advance(self, name: str, *, like: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], list[Float[Tensor, "..."]]]:
        """Go on to the next step of a parameter.

        Args:
            name: The parameter.
            like: A tensor of its shape, dtype and device.

        Returns:
            A tensor for y_t, and y_{t-1}, y_{t-2}, … as far as they count. The last of these is overwritten by y_t, if
            there are b - 1.
        """
        past = self._past.setdefault(name, [])
        before = list(past)
        past.insert(0, past.pop() if len(past) == len(self.coefficients) else torch.empty_like(like))
        return past[0], before

    def next(
        self, name: str, *, like: Float[Tensor, "..."], add_white: Callable[[Float[Tensor, "..."]], None]
    ) -> Float[Tensor, "..."]:
        """Return the noise of the next step of a parameter, with a function that adds white noise z_t to a tensor."""
        # Privacy: y depends on the generator alone, never on an example, so that what it is rounded to in float32 is noise
        # of a slightly other z, and not a function of the data.
        y, past = self.advance(name, like=like)
        # Before y is written, which may be the oldest of them.
        taken_back = sum(coefficient * before for coefficient, before in zip(self.coefficients, past, strict=False))
        add_white(y.zero_())
        return y.sub_(taken_back)
