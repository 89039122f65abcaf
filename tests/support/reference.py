r"""Algorithm 3 of DOPPLER as printed: plain NumPy float64, direct form, whole histories.

It shares no code with the package. Where the listing needs settling: v uses torch's convention of β₂, AdamBC subtracts
noise_std², the weights decay before the step as in AdamW, and GaLore projects the shorter side. When the basis changes,
every past gradient and output is taken into the new one, as if the filter had run there from the start.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def top_directions(matrix: Array, rank: int) -> Array:
    """The leading left singular vectors, each with its largest entry positive."""
    directions = np.linalg.svd(matrix, full_matrices=False)[0][:, :rank]
    largest = np.abs(directions).argmax(axis=0)
    return directions * np.sign(directions[largest, np.arange(rank)])


class Filter:
    """m_t = -Σ a_τ m_{t-τ} + Σ b_τ g_{t-τ}, its step response c_t, and whole histories of both."""

    def __init__(self, *, a: Sequence[float], b: Sequence[float]) -> None:
        self.a, self.b = a, b
        self.inputs: list[Array] = []
        self.outputs: list[Array] = []
        self.responses: list[float] = []

    def __call__(self, g: Array) -> Array:
        """Return m_t / c_t."""
        self.inputs.append(g)
        m, c = np.zeros_like(g), 0.0
        for tau, b_tau in enumerate(self.b):
            if tau < len(self.inputs):
                m = m + b_tau * self.inputs[-1 - tau]
                c = c + b_tau
        for tau, a_tau in enumerate(self.a, start=1):
            if tau <= len(self.outputs):
                m = m - a_tau * self.outputs[-tau]
                c = c - a_tau * self.responses[-tau]
        self.outputs.append(m)
        self.responses.append(c)
        return m / c

    def transform(self, change: Array) -> None:
        """Multiply all that is remembered by a matrix."""
        self.inputs = [change @ g for g in self.inputs]
        self.outputs = [change @ m for m in self.outputs]


def doppler_trajectory(
    x: Array,
    grads: Iterable[Array],
    *,
    a: Sequence[float],
    b: Sequence[float],
    base: str,
    lr: float,
    beta2: float,
    eps: float,
    noise_std: float,
    floor: float,
    weight_decay: float,
    rank: int | None = None,
    update_proj_gap: int = 1,
    scale: float = 1.0,
) -> Array:
    """The iterates x_1 ... x_T. As in the paper, a holds a_1 ... a_{n_a} without the leading one."""
    if rank is not None and x.shape[0] > x.shape[1]:
        flipped = {name: value for name, value in locals().items() if name not in ("x", "grads")}
        return doppler_trajectory(x.T, (g.T for g in grads), **flipped).transpose(0, 2, 1)
    low_pass = Filter(a=a, b=b)
    v: Array | float = 0.0
    projection: Array | None = None
    trajectory = []
    for t, gradient in enumerate(grads):
        g = gradient
        if rank is not None:
            if t % update_proj_gap == 0:
                old, projection = projection, top_directions(gradient, rank)
                if old is not None:
                    change = projection.T @ old
                    low_pass.transform(change)
                    unseen = 1 - (change**2).sum(axis=1, keepdims=True)
                    v = change**2 @ v + np.maximum(unseen, 0.0) * np.mean(v, axis=0, keepdims=True)
            g = projection.T @ gradient
        m_hat = low_pass(g)
        v = beta2 * v + (1 - beta2) * g**2
        v_hat = v / (1 - beta2 ** (t + 1))
        if base == "sgd":
            d = m_hat
        elif base == "adam":
            d = m_hat / np.maximum(np.sqrt(v_hat), eps)
        else:
            d = m_hat / np.sqrt(np.maximum(v_hat - noise_std**2, floor))
        if rank is not None:
            d = scale * projection @ d
        x = x - lr * weight_decay * x
        x = x - lr * d
        trajectory.append(x)
    return np.stack(trajectory)
