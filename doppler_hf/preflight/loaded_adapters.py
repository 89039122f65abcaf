"""Check that a saved adapter, once it is loaded, gives the trained model back.

PEFT saves the trained weights. When it loads an adapter, it makes everything else again: frozen weights of the adapter,
indices, and the changes that some initial weights make to the base model, such as PiSSA's. If this takes random numbers that
are in no file, the loaded model differs from the trained one.
"""

import contextlib
import copy
import functools
import tempfile
import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from doppler_hf.errors import Refusal
from doppler_hf.preflight.saved_weights import is_saved_by_own_code, saved_adapters, without_prefix
from doppler_hf.run.processes.processes import on_process_0
from doppler_hf.run.weights.merges import adapted_layers, copy_without_hooks

# Initial weights of LoRA that are loaded exactly, as a test measures. All others are tried in every run.
EXACT: Final = (True, False, "gaussian", "orthogonal", "eva", "pissa", "olora", "mica")
# A layer that is loaded exactly has the same outputs, except that several threads may round differently.
_TOLERANCE: Final = 1e-4
_MOST_WEIGHTS: Final = 2**26  # The largest layer that is tried; larger layers take seconds.
# Options that concern other layers than the one that is tried, or that need the whole model.
_OF_OTHER_LAYERS: Final = ("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")


def refuse_adapters_that_load_differently(trainer: Any) -> None:
    """Refuse an adapter whose files would not give the trained model back, because loading it draws new random numbers."""
    model = trainer.model
    if is_saved_by_own_code(trainer):
        return
    for name in saved_adapters(model):
        config = model.peft_config[name]
        start = vars(config).get("init_lora_weights")
        is_exact = type(config).__name__ == "LoraConfig" and start in EXACT
        if not is_exact and not config.is_prompt_learning:
            on_process_0(functools.partial(_refuse, model, name, config, folder=trainer.args.output_dir))


def _refuse(model: Any, name: str, config: Any, *, folder: str) -> None:
    difference = difference_when_loaded(model, name, folder=folder)
    if difference is None or difference <= _TOLERANCE:
        return
    start = vars(config).get("init_lora_weights")
    kind = type(config).__name__
    what = f"init_lora_weights={start!r}" if start is not None else kind
    if isinstance(start, str) and start.startswith("pissa"):
        mend = "Set init_lora_weights='pissa', which draws no random numbers"
    elif start is not None:
        mend = "Leave init_lora_weights out"
    else:
        mend = "Update peft, since a newer version may draw the same numbers again, or use LoraConfig"
    raise Refusal(
        "adapter-loads-differently",
        f"A saved adapter with {what} would not restore the trained model. PEFT draws random numbers when it makes the "
        "adapter, and draws different ones when it loads it, so the loaded model would differ from the trained one, after "
        f"all of ε is spent. {mend}.",
    )


def difference_when_loaded(model: Any, name: str, *, folder: str | None = None) -> float | None:
    """Return by how much the output of an adapted layer changes when the adapter is saved and loaded.

    The smallest layer of each kind is copied and gets a new adapter, whose weights are changed. This adapter is saved, and
    loaded onto a second copy. No weight of the model itself is read, unless it is quantized.

    Args:
        model: The adapted model.
        name: The name of the adapter.
        folder: Where to write the adapter; by default, the system's folder for temporary files.

    Returns:
        The largest difference relative to the largest output, or None if no layer could be tried.
    """
    config = copy.deepcopy(model.peft_config[name])
    for option in (*_OF_OTHER_LAYERS, "task_type", "base_model_name_or_path"):
        if option in vars(config):
            setattr(config, option, None)
    config.inference_mode = False
    smallest: dict[tuple[type, type], tuple[int, str, Any]] = {}
    for place, layer in adapted_layers(model):
        base = layer.get_base_layer()
        size = sum(each.numel() for each in base.parameters())
        kind = type(layer), type(base)
        if size <= _MOST_WEIGHTS and _has(layer, name) and (kind not in smallest or size < smallest[kind][0]):
            smallest[kind] = size, without_prefix(model, place), base
    found = []
    for _, place, base in smallest.values():
        # A kind of adapter may need the whole model, and then nothing is known about it.
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            found.append(_difference_of_layer(place, base, config, folder=folder))
    return max((each for each in found if each is not None), default=None)


def _has(layer: Any, adapter: str) -> bool:
    parts = [getattr(layer, attribute, None) for attribute in layer.adapter_layer_names]
    return any(adapter in part for part in parts if isinstance(part, nn.ModuleDict | nn.ParameterDict))


def _difference_of_layer(place: str, base: Any, config: Any, *, folder: str | None) -> float | None:
    import peft

    with torch.random.fork_rng(devices=[]), torch.no_grad(), tempfile.TemporaryDirectory(dir=folder) as there:
        made = _without_weights(base)
        again = _at(place, copy.deepcopy(made))
        trained = peft.PeftModel(_at(place, made), copy.deepcopy(config))
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
        trained.save_pretrained(there, save_embedding_layers=False)
        loaded = peft.PeftModel.from_pretrained(again, there)
        layers = [each.eval().get_submodule(f"base_model.model.{place}") for each in (trained, loaded)]
        inputs = _inputs_of(made)
        if inputs is None:
            return None
        state, outputs = torch.get_rng_state(), []
        for layer in layers:
            torch.set_rng_state(state)  # some adapters sample in evaluations
            outputs.append(layer(inputs).float())
        before, after = outputs
        most = float(before.abs().max())
        # A loaded layer whose outputs are not finite gives nothing back.
        difference = float((after - before).abs().nan_to_num(nan=torch.inf).max())
        return difference / max(most, torch.finfo(torch.float32).tiny)


def _without_weights(base: nn.Module) -> nn.Module:
    """Return a copy of a layer with random weights of the same shapes, except for quantized weights, which are copied."""
    made: nn.Module = copy_without_hooks(base)
    for module in made.modules():
        vars(module).pop("forward", None)  # the copy of a `forward` of the object's own is None
        for key, value in module._parameters.items():
            if (type(value) is nn.Parameter and value.is_floating_point()) or isinstance(value, DTensor):
                whole = torch.empty(value.shape, dtype=value.dtype).normal_(0.0, 0.02)
                module._parameters[key] = nn.Parameter(whole, requires_grad=False)
    return made


def _at(place: str, layer: nn.Module) -> nn.Module:
    """Return a module that has a layer under a name with dots, and nothing else."""
    top = nn.Module()
    *outer, last = place.split(".")
    module = top
    for part in outer:
        module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(last, layer)
    return top


def _inputs_of(layer: Any) -> Tensor | None:
    """Return random inputs for a layer of a common kind."""
    weight = next(layer.parameters())
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, (64,), device=weight.device)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sizes = [4 + step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        shape = [2, layer.in_channels, *sizes]
    elif isinstance(layer, nn.LayerNorm):
        shape = [8, *layer.normalized_shape]
    else:
        width = weight.shape[0] if isinstance(layer, Conv1D) else getattr(layer, "in_features", None)
        if width is None:
            return None
        shape = [8, width]
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return torch.randn(shape, dtype=dtype, device=weight.device)
