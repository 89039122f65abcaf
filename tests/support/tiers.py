"""Which cases `make test` leaves to `make test-all`: those beside others that hold the same."""

from itertools import product

import pytest

from tests.support.pairwise import pairwise


def thorough(*cases):
    """Return cases for `parametrize` that `make test-all` alone runs; a tuple has a value for each name."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]


def further(cases, *, quick=None):
    """Return the cases in their order, of which `make test` runs the quick ones, or those in which a value comes first."""
    if quick is None:
        seen = [[*zip(*cases[:place])] or [()] * len(case) for place, case in enumerate(cases)]
        quick = [case for case, others in zip(cases, seen) if any(value not in some for value, some in zip(case, others))]
    return [case if case in quick else thorough(case)[0] for case in cases]


def combined(*choices, strength=2):
    """Return every case of one value of each choice; any so many values of as many choices meet in a quick one."""
    return further([*product(*choices)], quick=pairwise(*choices, strength=strength))
