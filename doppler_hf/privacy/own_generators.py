"""Random generators that an object holds besides the global ones, wherever it keeps them.

The global generators hold secret words (see `generators`). One of a collator's own follows a public seed in the order of the
draw, so that one example more gives the others other numbers. To look at what it does is not enough: a flip of one example
in a hundred shows in few batches. So it is searched for; see `reachable`.
"""

import random
from typing import Any

import numpy as np
import torch

from doppler_hf.privacy.reachable import GENERATORS, is_a, reachable


def own_generators(*roots: object) -> list[Any]:
    """Return the generators that can be reached from some objects, without the global ones."""
    of_numpy = np.random.mtrand._rand
    of_python = random._inst
    of_torch = (torch.default_generator, *torch.cuda.default_generators)
    known = {id(generator) for generator in (of_numpy, of_numpy._bit_generator, of_python, *of_torch)}
    return [
        found
        for found in reachable(*roots)
        # What the operating system gives follows no order.
        if is_a(found, *GENERATORS) and not is_a(found, random.SystemRandom) and id(found) not in known
    ]


def state_of(generator: Any) -> str:
    """Return the state of a generator."""
    match generator:
        case torch.Generator():
            return str(generator.get_state().tolist())
        case np.random.Generator():
            return str(generator.bit_generator.state)
        case np.random.BitGenerator():
            return str(generator.state)
        case np.random.RandomState():
            return str([part.tolist() if isinstance(part, np.ndarray) else part for part in generator.get_state()])
        case _:
            return str(generator.getstate())
