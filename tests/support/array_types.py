"""What checks the types of arrays while the tests run: shapes and dtypes, as the annotations of jaxtyping say.

All else that a function takes is left to mypy and to the function's own messages: tests pass it wrong numbers and words on
purpose.
"""

from typing import get_args

import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray
from torch import Tensor

# Packages with all that is in them, and modules.
CHECKED = (
    "doppler_hf.audit",
    "doppler_hf.dpo",
    "doppler_hf.filters",
    "doppler_hf.gradient_recorder",
    "doppler_hf.triton_support",
    "doppler_hf.optim.fused_update",
    "doppler_hf.optim.galore",
    "doppler_hf.optim.muon",
    "doppler_hf.preflight.autograd_check.batch_dependence",
    "doppler_hf.preflight.autograd_check.coupling",
    "doppler_hf.privacy.batching",
    "doppler_hf.privacy.randomness",
    "doppler_hf.privacy.clipping.attention",
    "doppler_hf.privacy.clipping.clipped_gradients",
    "doppler_hf.privacy.clipping.copies",
    "doppler_hf.privacy.clipping.fused_gradients",
    "doppler_hf.privacy.clipping.gradients",
    "doppler_hf.privacy.clipping.opacus_layers",
    "doppler_hf.privacy.clipping.transformers_layers",
    "doppler_hf.privacy.clipping.other_layers",
    "doppler_hf.preflight.autograd_check.compared_examples",
    "doppler_hf.privacy.clipping.recurrence",
    "doppler_hf.privacy.clipping.torch_layers",
    "doppler_hf.privacy.dense_losses",
    "doppler_hf.privacy.losses",
    "doppler_hf.privacy.noise",
    "doppler_hf.privacy.pair_losses",
    "doppler_hf.privacy.token_losses",
    "doppler_hf.run",
    "doppler_hf.trainer",
    "doppler_hf.cli.random_model",
    "doppler_hf.mean_pooling",
)
# What is called for every parameter or layer of every step, or for every object that a model refers to: a check is some
# 40 µs, and there would be millions in the suite.
TOO_BUSY = (
    "doppler_hf.linalg",
    "doppler_hf.optim.optimizer",
    "doppler_hf.optim.update",
    "doppler_hf.privacy.clipping.engine",
)

ARRAYS = (AbstractArray, Tensor, np.ndarray)
# As everywhere in Python's typing, an int is a float.
BEARTYPE = beartype(conf=BeartypeConf(is_pep484_tower=True))

WRAPPED = jaxtyping.jaxtyped


def jaxtyped(*, typechecker):
    """Wrap what names arrays, in the place of jaxtyping's own decorator, which wraps every function.

    A function within another is wrapped each time that the other is called: only where arrays are checked.
    """

    def wrapped(function):
        is_idle = "<locals>" in function.__qualname__ and jaxtyping.config.jaxtyping_disable
        is_of_arrays = any(map(names_arrays, function.__annotations__.values()))
        return WRAPPED(function, typechecker=typechecker) if is_of_arrays and not is_idle else function

    return wrapped


def checked(function):
    """Return the function with a check of those annotations that name arrays."""
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if names_arrays(hint)}
    return BEARTYPE(function)


def names_arrays(hint):
    return (isinstance(hint, type) and issubclass(hint, ARRAYS)) or any(map(names_arrays, get_args(hint)))
