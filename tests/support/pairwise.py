"""Few cases of many choices. Most defects show where two choices meet, and few need a third (Kuhn, Wallace and Gallo 2004,
"Software Fault Interactions and Implications for Software Testing")."""

from itertools import combinations, product


def pairwise(*choices, strength=2):
    """Return cases, of one value of each choice, such that any two values of two choices meet in one of them.

    Greedy, and the same every time: the next case begins with the first values that have not met yet, and each further one
    is the value that meets most others for the first time.

    Args:
        *choices: The values of each choice, which must be hashable.
        strength: How many values meet: 3 for all triples.

    Example:
        >>> pairwise("ab", (1, 2), "xy")
        [('a', 1, 'x'), ('a', 2, 'y'), ('b', 1, 'y'), ('b', 2, 'x')]
    """
    places = combinations(range(len(choices)), strength)
    missing = dict.fromkeys(
        tuple(zip(some, values, strict=True)) for some in places for values in product(*(choices[place] for place in some))
    )  # a dictionary for its order
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for place in (place for place in range(len(choices)) if place not in case):
            others = list(combinations(case.items(), strength - 1))

            def first_met(value, place=place, others=others):
                return sum(tuple(sorted((*some, (place, value)), key=lambda item: item[0])) in missing for some in others)

            case[place] = max(choices[place], key=first_met)
        for some in combinations(sorted(case.items(), key=lambda item: item[0]), strength):
            missing.pop(some, None)
        cases.append(tuple(case[place] for place in range(len(choices))))
    return cases
