"""δ of a run with secret groups, by a simulation that shares no code with the package's accounting.

It estimates δ of removal by importance sampling, from the densities of outputs that move further than the noise allows.
"""

import math
from typing import Any

import numpy as np

STRETCHES = (1.0, 1.6, 2.4, 3.4, 5.0)


def log_ratios(x: np.ndarray, *, sigma: float, rate: float, groups: int, turns: int, stretch: float) -> np.ndarray:
    """Return ln of the density of x with the unit of each group, whose shift is stretched, over that without it."""
    shift, of_groups = stretch / sigma, []
    for group in range(groups):
        own = x[:, group::groups]
        rounds = [own[:, first : first + turns] for first in range(0, own.shape[1], turns)]
        terms = [1.0 - each.shape[1] * rate + rate * np.exp(shift * each - shift**2 / 2).sum(axis=1) for each in rounds]
        of_groups.append(np.sum(np.log(np.maximum(terms, 0.0)), axis=0) if terms else np.zeros(len(x)))
    return np.array(of_groups)


def simulated_delta(
    epsilons: np.ndarray, c: tuple[float, ...], *, sigma: float, sample_rate: float, steps: int, samples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return δ of removal at each ε, and its standard error, where a unit's group is secret."""
    random, groups = np.random.default_rng(seed), len(c)
    rate, turns = groups * sample_rate, math.floor(1 / (groups * sample_rate) + 1e-9)
    norm = math.sqrt(sum(each**2 for each in c))
    columns = np.zeros((steps, steps + groups - 1))
    for step in range(steps):
        columns[step, step : step + groups] = np.array(c) / norm
    terms: dict[str, Any] = {"sigma": sigma, "rate": rate, "groups": groups, "turns": turns}
    total, squares = np.zeros(len(epsilons)), np.zeros(len(epsilons))
    batch = max(1, 2_000_000 // steps)
    for begin in range(0, samples, batch):
        size = min(batch, samples - begin)
        # Steps in which the unit of a random group takes part, once a round at most.
        takes_part = np.zeros((size, steps))
        group = random.integers(groups, size=size)
        for first in range(0, steps, groups * turns):
            step = first + groups * np.floor(random.random(size) / rate).astype(int) + group
            is_there = (step < steps) & (step < first + groups * turns)
            takes_part[np.flatnonzero(is_there), step[is_there]] = 1.0
        stretch = random.choice(STRETCHES, size=(size, 1))
        z = random.standard_normal((size, columns.shape[1])) + stretch * (takes_part @ columns) / sigma
        x = z @ columns.T
        drawn_from = [log_ratios(x, **terms, stretch=each) for each in STRETCHES]
        ratio = np.exp(drawn_from[0]).mean(axis=0)
        weight = np.mean([np.exp(each).mean(axis=0) for each in drawn_from], axis=0)
        values = np.maximum(ratio - np.exp(epsilons)[:, None], 0.0) / weight
        total, squares = total + values.sum(axis=1), squares + np.square(values).sum(axis=1)
    mean = total / samples
    return mean, np.sqrt((squares / samples - mean**2) / samples)
