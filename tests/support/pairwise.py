"""Few cases of many choices. Most defects show where two choices meet, and few need a third (Kuhn, Wallace and Gallo 2004,
"Software Fault Interactions and Implications for Software Testing")."""

from itertools import combinations, product


def pairwise(*choices, strength=2):
    """Return cases, of one value of each choice, such that any two values of two choices meet in one of them.

    Greedy: the next case is the one of the whole product with the most pairs that have not met yet, and the first of these,
    so that the cases are the same every time.

    Args:
        *choices: The values of each choice, which must be hashable.
        strength: How many values meet: 3 for all triples.

    Example:
        >>> pairwise("ab", (1, 2), "xy")
        [('a', 1, 'x'), ('a', 2, 'y'), ('b', 1, 'y'), ('b', 2, 'x')]
    """
    met_by = {case: set(combinations(enumerate(case), strength)) for case in product(*choices)}
    missing, cases = set().union(*met_by.values()), []
    while missing:
        cases.append(max(met_by, key=lambda case: len(met_by[case] & missing)))
        missing -= met_by[cases[-1]]
    return cases
