"""Adapters that Transformers itself attaches to a model, where the installed versions can."""

import importlib.metadata

import pytest
from packaging.version import Version

NEEDED_PEFT = {"5.24": "0.22"}  # from this version of Transformers on


def why_no_add_adapter(transformers, peft):
    """Return why `model.add_adapter` cannot be called with these versions, or None."""
    for since, needed in NEEDED_PEFT.items():
        if Version(transformers) >= Version(since) and Version(peft) < Version(needed):
            return f"model.add_adapter of Transformers {since} needs peft {needed}"
    return None


WHY_NOT = why_no_add_adapter(importlib.metadata.version("transformers"), importlib.metadata.version("peft"))


def add_adapter(model, config, *name):
    """Call the model's own `add_adapter`, and return the model; skip the test if it cannot be called."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    model.add_adapter(config, *name)
    return model
