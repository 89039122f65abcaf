r"""The paper's closed form of the impulse response (equation "kappa"): a sum of geometric series, one for each pole.

κ_τ = Σ_{s=0..min(n_b, τ)} b_s Σ_i z_i p_i^{τ-s},    Σ_i z_i / (1 - p_i x) = 1 / (1 + Σ_τ a_τ x^τ)

For n distinct poles p_i the residues are z_i = p_i^{n-1} / Π_{j≠i} (p_i - p_j). At a repeated pole the form does not exist,
and near one the residues are large and cancel. It shares nothing with the recursion, which it is here to check.
"""

import numpy as np


def partial_fraction_response(low_pass_filter, steps):
    """Return κ_0 ... κ_{steps-1}, and how far rounding can put it off: eps · Σ|a| · Σ_i |z_i| / (1 - |p_i|) · max|κ|."""
    b, a = np.array(low_pass_filter.b), np.trim_zeros(np.array(low_pass_filter.a), "b")
    poles = np.roots(a)
    if not len(poles):
        # Without feedback the sum over poles is empty, but 1 / 1 is the impulse itself.
        return np.convolve(b, np.eye(1, steps)[0])[:steps], 0.0
    distances = poles[:, None] - poles
    np.fill_diagonal(distances, 1)
    if not distances.all():
        return np.full(steps, np.nan), np.inf
    residues = poles ** (len(poles) - 1) / distances.prod(axis=1)
    feedback = (residues[:, None] * poles[:, None] ** np.arange(steps)).sum(axis=0).real
    kappa = np.convolve(b, feedback)[:steps]
    error = np.finfo(float).eps * np.abs(a).sum() * (np.abs(residues) / (1 - np.abs(poles))).sum()
    return kappa, float(error * np.abs(kappa).max())
