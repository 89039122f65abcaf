"""Where a monotone function that is slow to evaluate meets a target: by noise multiplier, and by number of steps.

Regula falsi on scales on which ε is nearly straight (ln ε against ln σ, ε against √T), every third time bisection, so that
the bracket shrinks whatever the function does. What is returned has been evaluated, not interpolated.
"""

import math
from collections.abc import Callable


def solve_falling(excess: Callable[[float], float], *, start: float, tolerated: tuple[float, float]) -> float | None:
    """Return an argument at which a falling function lies in a range.

    Args:
        excess: Falls, roughly as a straight line, as the logarithm of its argument grows; may be infinite.
        start: A first guess, > 0.
        tolerated: The range's lower and upper end, below and above 0.

    Returns:
        The argument; just below a jump if `excess` jumps over the range, and None if it is above the range up to 10⁶.

    Example:
        >>> solve_falling(lambda x: 3.0 - x, start=1.0, tolerated=(-1.0, 1.0))
        2.718281828459045
    """
    smallest, largest = tolerated
    # Bracket the answer: too much at `low`, not too much at `high`. ln ε falls by one to two for each unit of ln σ.
    low, high = 0.0, start
    excess_low, excess_high = math.inf, excess(high)
    while excess_high > largest:
        low, excess_low = high, excess_high
        high *= min(max(math.exp(min(excess_high, 10.0) / 2), 1.1), 30.0)
        if high > 1e6:
            return None
        excess_high = excess(high)
    stride = 0.0
    while low == 0.0 and excess_high < smallest:
        # A little too far rather than not far enough: a bracket is half of the answer.
        stride = max(min(excess_high / 1.2, 2.0 * stride, -0.01), -0.7)
        candidate = high * math.exp(stride)
        excess_candidate = excess(candidate)
        if excess_candidate > largest:
            low, excess_low = candidate, excess_candidate
        else:
            high, excess_high = candidate, excess_candidate
    attempt = 0
    while excess_high < smallest and high > low * (1.0 + 1e-9):
        attempt += 1
        share = 0.5 if attempt % 3 == 0 else excess_low / (excess_low - excess_high)
        if not 0.0 < share < 1.0:  # one of the two is infinite
            share = 0.5
        candidate = low * (high / low) ** share
        excess_candidate = excess(candidate)
        if excess_candidate > largest:
            low, excess_low = candidate, excess_candidate
        else:
            high, excess_high = candidate, excess_candidate
    return high


def largest_count(cost: Callable[[int], float], *, budget: float, at_most: int) -> int:
    """Return the largest count that costs no more than a budget.

    Args:
        cost: Grows with the count, roughly as its square root; may be infinite.
        budget: What may be spent.
        at_most: The largest answer that is of interest, ≥ 0.

    Returns:
        The count; 0 if even that is too much. Where `cost` does not grow throughout, a count within the budget whose
        successor is beyond it.

    Example:
        >>> largest_count(lambda steps: steps**0.5, budget=5.0, at_most=100)
        25
    """
    low, high = 0, at_most
    cost_low, cost_high = cost(low), cost(high)
    if cost_high <= budget:
        return at_most
    if cost_low > budget:
        return 0
    attempt = 0
    while high - low > 1:
        attempt += 1
        share = 0.5 if attempt % 3 == 0 else (budget - cost_low) / (cost_high - cost_low)
        root = math.sqrt(low) + share * (math.sqrt(high) - math.sqrt(low))
        candidate = min(max(int(root**2), low + 1), high - 1)
        cost_candidate = cost(candidate)
        if cost_candidate <= budget:
            low, cost_low = candidate, cost_candidate
        else:
            high, cost_high = candidate, cost_candidate
    return low
