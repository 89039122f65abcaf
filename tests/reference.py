r"""Algorithm 2 of DOPPLER (without GaLore) as printed: plain NumPy float64, direct form, whole histories.

It shares no code with the package. Where the listing needs settling: v uses torch's convention of β₂, AdamBC subtracts
noise_std², and the weights decay before the step as in AdamW.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def doppler_trajectory(
    x: NDArray[np.float64],
    grads: Iterable[NDArray[np.float64]],
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
) -> NDArray[np.float64]:
    """The iterates x_1 ... x_T. As in the paper, a holds a_1 ... a_{n_a} without the leading one."""
    g_history, m_history, ca_history = [], [], []
    v = np.zeros_like(x)
    trajectory = []
    for t, g in enumerate(grads, start=1):
        g_history.append(g)
        v = beta2 * v + (1 - beta2) * g**2

        m = np.zeros_like(x)
        c_a = 0.0
        for tau, b_tau in enumerate(b):
            if tau < len(g_history):
                m = m + b_tau * g_history[-1 - tau]
                c_a = c_a + b_tau * 1.0
        for tau, a_tau in enumerate(a, start=1):
            if tau <= len(m_history):
                m = m - a_tau * m_history[-tau]
                c_a = c_a - a_tau * ca_history[-tau]
        m_history.append(m)
        ca_history.append(c_a)

        m_hat = m / c_a
        v_hat = v / (1 - beta2**t)
        if base == "sgd":
            d = m_hat
        elif base == "adam":
            d = m_hat / np.maximum(np.sqrt(v_hat), eps)
        else:
            d = m_hat / np.sqrt(np.maximum(v_hat - noise_std**2, floor))
        x = x - lr * weight_decay * x
        x = x - lr * d
        trajectory.append(x)
    return np.stack(trajectory)
