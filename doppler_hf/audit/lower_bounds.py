"""Lower bounds on ε that follow from an attack on canaries and hold with a stated confidence.

Secret fair coins put canaries into the training data or leave them out. An attack scores each canary: the more the trained
model looks as if it had seen it, the higher. (ε, δ)-DP limits how well any scores can predict the coins. Scores that do
better refute it, and the largest ε that they refute is the bound. `one_run_epsilon` uses all canaries of a single run;
`clopper_pearson_epsilon` needs independent trials.

Sources: Steinke, Nasr and Jagielski 2023, *Privacy Auditing with One (1) Training Run* (https://arxiv.org/abs/2305.08846),
and Jagielski, Ullman and Oprea 2020, *Auditing Differentially Private Machine Learning* (https://arxiv.org/abs/2006.07709).
"""

import math

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import betainc, betaincinv, expit, logit

from doppler_hf.errors import Refusal

# Fewer guesses prove almost nothing even if all are right: 16 show ε ≥ 0.8 at an error of 0.05, shared by twenty splits.
_FEWEST_GUESSES = 16

# Ratio between neighbouring ranks of the threshold grid. The error counts that the grid skips cost at most ln(1.25) of ε.
_RANK_RATIO = 1.25

# How often an interval of ε, a few dozen wide at most, is halved.
_BISECTIONS = 40


def one_run_epsilon(
    scores: Float[np.ndarray, " canaries"],
    included: Bool[np.ndarray, " canaries"],
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Return a lower bound on ε from the canaries of one training run.

    Each of the m canaries is in the data with probability ½, independently. The auditor guesses "in" for the k₊ highest
    scores and "out" for the k₋ lowest, and is right v times out of r = k₊ + k₋. Under (ε, δ)-DP, with q = e^ε / (1 + e^ε)
    and B ~ Binomial(r, q),

        P[v or more right] ≤ β + (1 − β) · mδ · β / (v · P[B = v]),   β = P[B ≥ v],

    and the ε at which the right side equals the error allowed is the bound. For δ = 0 this is Steinke et al.'s result for
    pure DP. For δ > 0 it is sharp: some mechanism attains it (proof: `_p_value`). Their Theorem 5.2 has
    2mδ · max_i P[v > B ≥ v − i] / i for the second term, more than twice as much wherever β is at most 5 %.

    The guesses may use the scores in any way, as long as r is fixed beforehand. A grid of splits is tried, r = m, m/2,
    m/4, … guesses, on both sides or on one, and the error allowed is shared equally between them. Ties are broken against
    the auditor, and with r = m the cut between "in" and "out" is moved to the nearest place where no tie is cut.

    Args:
        scores: One score for each canary; higher means more likely to be in the data.
        included: The coins, true for "in". They must be fair, independent, and unknown to the attack that made the scores.
        delta: δ, in [0, 1).
        confidence: Probability with which the bound holds, in (0, 1).

    Returns:
        The bound, in [0, ∞); 0 says that nothing was shown.

    Raises:
        ValueError: If scores are not finite, coins are not booleans, lengths differ, no canary is in or none is out, or δ
            or confidence is out of its range.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> included = rng.random(1000) < 0.5
        >>> scores = np.where(rng.random(1000) < 0.95, included, ~included) + rng.random(1000)  # ε = ln 19 = 2.9
        >>> round(one_run_epsilon(scores, included, delta=0.0), 1)
        2.4
    """
    _check(scores, included, delta=delta, confidence=confidence)
    canaries = len(scores)
    tallies = _right_guesses(scores, included)
    error = (1 - confidence) / len(tallies)
    epsilon = 0.0
    for guesses, right in tallies:
        # δ only lowers the bound, and for δ = 0 the equation can be solved directly.
        highest = float(logit(betaincinv(right, guesses - right + 1, error))) if right else 0.0
        if highest <= epsilon or _p_value(guesses, right, canaries, epsilon=epsilon, delta=delta) > error:
            continue  # This split shows no more than the earlier ones.
        for _ in range(_BISECTIONS):
            middle = (epsilon + highest) / 2
            if _p_value(guesses, right, canaries, epsilon=middle, delta=delta) <= error:
                epsilon = middle
            else:
                highest = middle
    return epsilon


def clopper_pearson_epsilon(
    scores: Float[np.ndarray, " trials"],
    included: Bool[np.ndarray, " trials"],
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Return a lower bound on ε from independent trials.

    An attack calls a trial "in" if its score exceeds a threshold. (ε, δ)-DP limits its true and false positive rates, TPR ≤
    e^ε FPR + δ, and likewise for the negatives. With exact bounds on the rates (Clopper and Pearson),

        ε ≥ ln((TPR_low − δ) / FPR_high)   and   ε ≥ ln((TNR_low − δ) / FNR_high).

    **The trials must be independent**, given the coins. Repeated runs with one canary each are independent. The canaries of
    one run are so only if none of them influences another's score, which joint training does not guarantee; use
    `one_run_epsilon` there. The bound assumes neither fair coins nor a fixed number of trials "in".

    The thresholds are scores of trials "out" (for the negatives, "in") at ranks fixed beforehand by their number n: the 1st
    to 7th, 9th, 12th, … highest, each a quarter further, up to the median. Reading them off the scores is free. The FPR
    above the j-th highest of n is at most Beta(j, n − j + 1) distributed, which is Clopper and Pearson's bound for j − 1
    false positives. The other group's scores are independent of it. Ties do not exceed the threshold, so that they count
    against the auditor. The error allowed is shared equally between all the bounds.

    Args:
        scores: One score for each trial; higher means more likely to be in the data.
        included: Whether the canary was in the trial's data.
        delta: δ, in [0, 1).
        confidence: Probability with which the bound holds, in (0, 1).

    Returns:
        The bound, in [0, ∞); 0 says that nothing was shown.

    Raises:
        ValueError: If an argument is invalid, as in `one_run_epsilon`.
    """
    _check(scores, included, delta=delta, confidence=confidence)
    inside, outside = scores[included], scores[~included]
    # The negatives' bound is the positives' with the two groups, and the direction of the scores, exchanged.
    pairs = [(inside, outside), (-outside, -inside)]
    grids = [_ranks(len(reference)) for _, reference in pairs]
    error = (1 - confidence) / (2 * sum(len(grid) for grid in grids))
    epsilon = 0.0
    for (found, reference), ranks in zip(pairs, grids, strict=True):
        thresholds = np.sort(reference)[len(reference) - ranks]
        exceeding = len(found) - np.searchsorted(np.sort(found), thresholds, side="right")
        ranks, exceeding = ranks[exceeding > 0], exceeding[exceeding > 0]
        rate_high = betaincinv(ranks, len(reference) - ranks + 1, 1 - error)
        rate_low = betaincinv(exceeding, len(found) - exceeding + 1, error)
        ratio = (rate_low - delta) / rate_high
        epsilon = max(epsilon, math.log(np.max(ratio, initial=1.0)))
    return epsilon


def _p_value(guesses: int, right: int, canaries: int, *, epsilon: float, delta: float) -> float:
    """Return the largest probability of this many right guesses or more under any (ε, δ)-DP mechanism, where it is below 1.

    Proof. Write W for the number of right guesses, g_k = P[W = k] and b_k = P[B = k]. Take δ's definition for the coins s,
    those with coin i turned over, and the event in which guess i is right and the first is too probable for the second;
    sum over i and average over s. Turning over the coin of one of k right guesses leaves k − 1, and among their
    r − k + 1 wrong guesses each can be the one turned over; so

        Σ_k (k g_k − e^ε (r − k + 1) g_{k−1})₊ ≤ mδ.

    The binomial has k b_k = e^ε (r − k + 1) b_{k−1}. So ρ_k = g_k / b_k has Σ_k k b_k (ρ_k − ρ_{k−1})₊ ≤ mδ, and

        P[W ≥ v] − β_v = Cov(1[B ≥ v], ρ_B) = Σ_k (ρ_k − ρ_{k−1}) Cov(1[B ≥ v], 1[B ≥ k])
                       ≤ mδ · max_k Cov(1[B ≥ v], 1[B ≥ k]) / (k b_k),

    in which the covariance is β_max(k,v) (1 − β_min(k,v)), and the maximum is at k = v because b is log-concave. A ρ with
    a single step, at v, attains it; being attained, the bound grows with ε.
    """
    tail = float(betainc(right, guesses - right + 1, expit(epsilon)))
    # β_v / b_v is computed from ratios of neighbouring b_k, since both may be smaller than the smallest double.
    more = np.arange(right, guesses)
    mills = 1 + np.cumprod((guesses - more) / (more + 1) * math.exp(epsilon)).sum()
    return float(tail + (1 - tail) * canaries * delta * mills / right)


def _right_guesses(scores: Float[np.ndarray, " canaries"], included: Bool[np.ndarray, " canaries"]) -> list[tuple[int, int]]:
    """Return the number of guesses and of right ones, for each split of the grid."""
    canaries = len(scores)
    # Among equal scores the wrong guesses come first, which is never better than an order that ignores the coins.
    highest_first = included[np.lexsort((included, -scores))]
    lowest_first = ~included[np.lexsort((~included, scores))]
    right_in = np.concatenate([[0], np.cumsum(highest_first)])
    right_out = np.concatenate([[0], np.cumsum(lowest_first)])

    # Every canary is guessed, so r = m wherever the cut is. The cut may therefore depend on the scores.
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(np.sort(scores))) + 1, [canaries]])
    cut = cuts[np.argmin(np.abs(cuts - canaries / 2))]
    tallies = [(canaries, int(right_in[canaries - cut] + right_out[cut]))]

    guesses = canaries // 2
    while guesses >= _FEWEST_GUESSES:
        for above in (guesses, guesses - guesses // 2, 0):
            tallies.append((guesses, int(right_in[above] + right_out[guesses - above])))
        guesses //= 2
    return tallies


def _ranks(size: int) -> Int[np.ndarray, " ranks"]:
    """Return the ranks at which thresholds are set: growing geometrically from 1 to the median."""
    median = (size + 1) // 2
    steps = math.floor(math.log(median, _RANK_RATIO))
    return np.unique(np.rint(_RANK_RATIO ** np.arange(steps + 1)).astype(np.int64))


def _check(
    scores: Float[np.ndarray, " canaries"], included: Bool[np.ndarray, " canaries"], *, delta: float, confidence: float
) -> None:
    if included.dtype != np.bool_:  # NumPy would read integers as positions.
        raise Refusal(
            "not-booleans", f"included must be an array of booleans; got {included.dtype}. Use included.astype(bool)."
        )
    if scores.shape != included.shape:
        raise Refusal(
            "other-lengths",
            f"scores and included must have the same length; got {len(scores)} and {len(included)}. For every canary (a "
            "record that the audit attacks), pass its score and whether it was in the training set, in the same order.",
        )
    if not np.isfinite(scores).all():
        worst = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise Refusal(
            "not-finite",
            f"scores must be finite; got {scores[worst]} for canary {worst}. If the attack diverged there, give that canary "
            "a constant score, chosen without knowing whether it was in the training set.",
        )
    if included.all() or not included.any():
        raise Refusal(
            "one-sided-coins",
            "An audit compares canaries in the training set with canaries that were left out, and needs both; included has "
            f"{int(included.sum())} in and {int((~included).sum())} out. Flip a fair coin for each canary to decide whether "
            "it is in, and use more canaries.",
        )
    if not 0.0 <= delta < 1.0:
        raise Refusal("out-of-range", f"delta must be in [0, 1); got {delta}. Use the δ of the claimed guarantee.")
    check_confidence(confidence)


def check_confidence(confidence: float) -> None:
    """Refuse a confidence outside of (0, 1)."""
    if not 0.0 < confidence < 1.0:
        raise Refusal("out-of-range", f"confidence must be in (0, 1); got {confidence}. A usual value is 0.95.")
