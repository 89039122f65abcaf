"""The best score of an attack: the likelihood ratio of what is released with a canary and without it.

    x ~ 𝒩(0, σ²) in all steps without the canary,    x ~ 𝒩(1, σ²) with it in a step that is chosen by the sampling,

Here x is the canary's coordinate of the private gradient and σ the noise, both in units of one canary's contribution. For a
round of n steps under white noise the log-likelihood ratio is log(1 − n·q + q·Σ exp((x − ½)/σ²)), with sample rate q. A
round is the stretch of steps over which random allocation deals out every record once.
"""

import numpy as np
import scipy.special
from jaxtyping import Float

from doppler_hf.filters.noise_shape import NoiseShape


class LikelihoodRatios:
    """The log-likelihood ratios of canaries over a run, in which each canary takes part only in the turns of its group.

    The attacker undoes the shaping: C·(gradients) has white noise, and a contribution in step t appears in its rows t to
    t + b − 1, in proportion to c. The group of a canary is secret, so the ratio is the mean over all groups. For white
    noise b is 1, and every step is a turn. `sample_rate` is the probability that a canary takes part in a turn of its
    group, and `turns_per_round` counts the turns of one group in a round.
    """

    def __init__(self, canaries: int, *, shape: NoiseShape, sample_rate: float, turns_per_round: int) -> None:
        self._c, self._sample_rate, self._turns_per_round = shape.c, sample_rate, turns_per_round
        # The gradients that the next row needs, the latest first.
        self._seen: list[Float[np.ndarray, " canaries"]] = []
        # ⟨μ, y⟩ and ‖μ‖² for each turn that will appear in further rows, the oldest first.
        self._open: list[tuple[Float[np.ndarray, " canaries"], float]] = []
        self._finished_rounds = np.zeros((shape.bands, canaries))  # log-ratio of all finished rounds, by group
        self._current_round = np.full((shape.bands, canaries), -np.inf)  # log Σ exp(⟨μ, y⟩ − ‖μ‖²/2) over the round's turns
        self._closed = 0

    def see(self, x: Float[np.ndarray, " canaries"], *, sigma: float) -> None:
        """Read one step's private gradient at the canaries' coordinates, x, shape (canaries,).

        `sigma` is the standard deviation of the noise before it is shaped. Both are in units of one canary's contribution.
        """
        self._seen = [x, *self._seen[: len(self._c) - 1]]
        row = sum((c * values for c, values in zip(self._c, self._seen, strict=False)), np.zeros_like(x))
        self._open.append((np.zeros_like(x), 0.0))
        self._open = [
            (matched + c * row / sigma**2, squares + (c / sigma) ** 2)
            for c, (matched, squares) in zip(reversed(self._c[: len(self._open)]), self._open, strict=True)
        ]
        if len(self._open) == len(self._c):
            self._close()

    def scores(self) -> Float[np.ndarray, " canaries"]:
        """Return the log-likelihood ratio of every canary; a turn that the end of the run cut short counts in part."""
        while self._open:
            self._close()
        for group in range(len(self._c)):
            self._end_round(group, turns=len(range(group, self._closed, len(self._c))) % self._turns_per_round)
        return np.asarray(scipy.special.logsumexp(self._finished_rounds, axis=0) - np.log(len(self._finished_rounds)))

    def _close(self) -> None:
        matched, squares = self._open.pop(0)
        turn, group = divmod(self._closed, len(self._c))
        self._closed += 1
        # The sum is kept as a logarithm, because the ratio of one turn may overflow a float64.
        self._current_round[group] = np.logaddexp(self._current_round[group], matched - squares / 2)
        if (turn + 1) % self._turns_per_round == 0:
            self._end_round(group, turns=self._turns_per_round)

    def _end_round(self, group: int, *, turns: int) -> None:
        """Add log(1 − n·q + q·Σ exp(⟨μ, y⟩ − ‖μ‖²/2)) of a round of n turns."""
        with_turn, without = np.log(self._sample_rate) + self._current_round[group], 1.0 - turns * self._sample_rate
        self._finished_rounds[group] += with_turn if without <= 0.0 else np.logaddexp(np.log(without), with_turn)
        self._current_round[group] = -np.inf
