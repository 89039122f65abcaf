"""Adapters that Transformers itself attaches to a model, and prefixes of classifiers, where the installed versions can."""

import importlib.metadata

import peft
import pytest
import torch
from packaging.version import Version

NEEDED_PEFT = {"5.24": "0.22"}  # from this version of Transformers on


def why_no_add_adapter(transformers, installed):
    """Return why `model.add_adapter` cannot be called with these versions, or None."""
    for since, needed in NEEDED_PEFT.items():
        if Version(transformers) >= Version(since) and Version(installed) < Version(needed):
            return f"model.add_adapter of Transformers {since} needs peft {needed}"
    return None


TRANSFORMERS, PEFT = (importlib.metadata.version(name) for name in ("transformers", "peft"))
WHY_NOT = why_no_add_adapter(TRANSFORMERS, PEFT)


def add_adapter(model, config, *name):
    """Call the model's own `add_adapter`, and return the model; skip the test if it cannot be called."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    model.add_adapter(config, *name)
    return model


def config_of(name, **options):
    """Return a configuration of PEFT by the name of its class; skip the test if the installed PEFT does not have it."""
    if not hasattr(peft, name):
        pytest.skip(f"PEFT {PEFT} has no {name}")
    return getattr(peft, name)(**options)


def takes_prefix(model):
    """Return whether the installed PEFT can pass a prefix on to a classifier, as it cannot with Transformers 5.24."""
    try:
        model(input_ids=torch.ones(1, 2, dtype=torch.long))
    except ValueError as error:
        if "past key values" not in str(error):
            raise
        return False
    return True


def prefixed(model, config):
    """Give a classifier a prefix, and return it; skip the test if PEFT cannot pass the prefix on."""
    model = peft.get_peft_model(model, config)
    if not takes_prefix(model):
        pytest.skip(f"PEFT {PEFT} gives no prefix to a classifier of Transformers {TRANSFORMERS}")
    return model
