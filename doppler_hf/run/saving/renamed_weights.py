"""Load weights that `save_pretrained` has written under different names than the model's own, as it does for ViT.

Transformers maps these names only in `from_pretrained`, which makes a new model from the configuration. A model whose head
was replaced, or whose class takes further arguments, differs from that. Here the same mapping loads into an existing model.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from doppler_hf.errors import Refusal


def load_renamed(model: PreTrainedModel, folder: str | Path) -> None:
    """Load the weights of a folder into a model, by the mapping of names with which Transformers saved them."""
    state: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state.update(load_file(path))
    missing = _load(model, state, device="cpu")
    if missing:
        raise Refusal(
            "weights-do-not-fit",
            f"{folder} lacks {len(missing)} weights of {type(model).__name__}, or has them in another shape; the first is "
            f"{missing[0]!r}. Make the model exactly as it was in the run that saved them.",
        )


def colliding_names(model: PreTrainedModel) -> list[str]:
    """Return the weights of a model that could not be loaded again after `save_pretrained`."""
    # Tensors on the meta device have no content, so only names and shapes are mapped.
    state = {name: torch.empty_like(value, device="meta") for name, value in model.state_dict().items()}
    saved = revert_weight_conversion(model, dict(state))
    return [] if saved.keys() == state.keys() else _load(model, saved, device="meta")


def _load(model: PreTrainedModel, state: Mapping[str, Any], *, device: str) -> list[str]:
    """Copy a saved state into the model's own tensors, unless `device` is "meta"; return the names that it lacks."""
    # A model is saved with the mapping with which it was loaded. A model that was never loaded has no mapping of its own.
    before = vars(model).get("_weight_conversions")
    mapping = get_model_conversion_mapping(model) if before is None else before
    own = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            own[prefix, id(tensors)] = (tensors, dict(tensors))
    names = model.state_dict(keep_vars=True)
    terms = LoadStateDictConfig(device_map={"": device}, weight_mapping=copy.deepcopy(mapping))
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, dict(state), terms, None)
        loaded = model.state_dict()
    finally:
        # The optimizer and tied layers hold the tensors from before, so keep these and copy the values into them.
        for tensors, values in own.values():
            tensors.update(values)
        if shows_progress:
            logging.enable_progress_bar()
        if before is None:
            vars(model).pop("_weight_conversions", None)
        else:
            model._weight_conversions = before
    absent = info.missing_keys | {name for name, *_ in info.mismatched_keys}
    found = {id(value) for name, value in names.items() if name not in absent}  # a tied weight is saved only once
    missing = sorted(name for name in absent if id(names[name]) not in found)
    if device != "meta" and not missing:
        with torch.no_grad():
            for name, value in names.items():
                if name not in absent:
                    value.copy_(loaded[name])
    return missing
