"""Digests of a model's parameters and other saved state, which tell whether these were changed.

    digest = SHA-256 of name, dtype, shape and sum of every tensor

The sum adds up the tensor's bytes, read as integers of 64 bits, modulo 2^64. It is exact, so it is the same on every device.
It takes as long as reading the memory: a tenth of a second for 125 million parameters on a CPU. A training step changes it.
It does not detect a forger (nor would a ledger), or values that only changed places. For a tensor of less than eight bytes,
single bytes are added up, and a change may leave their sum unchanged by chance.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.linalg import sums_of_bytes
from doppler_hf.privacy.ledger.record import ModelDigests
from doppler_hf.shards import first_row, part_here

# Part of a weight on this process → a description of the whole weight, and the sum of the part when the weight was cut.
_WHOLE: Final = WeakIdKeyDictionary()


def parameters_digest(model: nn.Module) -> str:
    """Return the digest of the parameters by which a ledger knows a model, 64 hexadecimal digits.

    The digest covers all parameters that a model computes with or is saved with. If PEFT saves only the adapters, it covers
    the adapters and other trained parameters: nobody reads the base from these files, and merging an adapter and unmerging
    it changes the last bits of the base.
    """
    if not is_saved_as_adapter(model):
        return whole_digest(model)
    held = _in_adapter_files(model)
    used = {parameter: name for name, parameter in _named_parameters(model) if parameter in held or parameter.requires_grad}
    return _digest((name, parameter) for parameter, name in used.items())


def whole_digest(model: nn.Module) -> str:
    """Return the digest of all parameters, including an adapter's base, as in ledgers before format 11.

    If PEFT trains a copy of a layer, such as a new head, the layer itself is unused: its random weights differ each time the
    base is loaded. They are left out if only the adapter is saved.
    """
    unused = _layers_in_no_file(model)
    used: dict[Tensor, str] = {}
    for name, parameter in _named_parameters(model, remove_duplicate=False):
        if not name.startswith(unused):
            used.setdefault(parameter, name)
    return _digest((name, parameter) for parameter, name in used.items())


def is_saved_as_adapter(model: nn.Module) -> bool:
    """Return whether saving this model writes PEFT's adapters without their base."""
    peft = sys.modules.get("peft")
    # Privacy: a model with injected adapters, or inside another module, is saved as a whole, whatever has become of its
    # base.
    return peft is not None and (isinstance(model, peft.PeftModel) or bool(getattr(model, "_hf_peft_config_loaded", False)))


def _in_adapter_files(model: Any) -> set[Tensor]:
    """Return the parameters that PEFT saves: those of the adapters, and embeddings that no adapter changes."""
    peft = sys.modules["peft"]
    kinds = peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper
    parts: list[Any] = [getattr(model, "prompt_encoder", None)]
    for module in model.modules():
        if isinstance(module, kinds):
            parts += [getattr(module, name, None) for name in module.adapter_layer_names]
    parts += [embedding for embedding in _embeddings(model) if not isinstance(embedding, kinds[0])]
    held: set[Tensor] = {part for part in parts if isinstance(part, nn.Parameter)}
    return held.union(*(part.parameters() for part in parts if isinstance(part, nn.Module)))


def _embeddings(model: Any) -> list[nn.Module]:
    """Return a model's embeddings. PEFT saves them, too, if the vocabulary has grown."""
    found = []
    for of_model in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(AttributeError, NotImplementedError):
            found.append(getattr(model, of_model)())
    return [embedding for embedding in found if embedding is not None]


def adapted_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters adapted by PEFT's `target_parameters`, which a forward pass takes out and writes back."""
    peft = sys.modules.get("peft")
    if peft is None:
        return []
    return [module.get_param() for module in model.modules() if isinstance(module, peft.tuners.lora.ParamWrapper)]


def _named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
    """Return parameters in their order, or sorted by name if a forward pass changes the order."""
    named = [*model.named_parameters(remove_duplicate=remove_duplicate)]
    return sorted(named, key=lambda pair: pair[0]) if adapted_parameters(model) else named


def _layers_in_no_file(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the names of weights whose layers PEFT copies, trains and saves."""
    if not is_saved_as_adapter(model):
        return ()
    peft = sys.modules["peft"]
    copied, embeddings = peft.utils.other.ModulesToSaveWrapper, _embeddings(model)
    return tuple(
        f"{name}.original_module."
        for name, module in model.named_modules()
        if isinstance(module, copied) and not any(module is embedding for embedding in embeddings)
    )


def replicas_digest(model: nn.Module) -> str:
    """Return the digest of all parameters but trained shards, which all processes should share. Nothing is gathered."""
    return _digest((n, p) for n, p in _named_parameters(model) if not (isinstance(p, DTensor) and p.requires_grad))


def untrained_digest(model: nn.Module) -> str:
    """Return the digest of everything that is saved but not trained: frozen parameters, buffers and other state.

    If only adapters are saved, the digest leaves out their base.
    """
    held = _in_adapter_files(model) if is_saved_as_adapter(model) else None
    frozen = (
        (name, value)
        for name, value in _named_parameters(model)
        if not value.requires_grad and (held is None or value in held)
    )
    return _digest((*frozen, *_state_besides_parameters(model)))


def digests_of(model: nn.Module) -> ModelDigests:
    """Return the digests by which a ledger knows a model."""
    return ModelDigests(parameters_digest(model), _digest(_state_besides_parameters(model)))


def is_known(model: nn.Module, models: Sequence[ModelDigests]) -> bool:
    """Return whether one of these digests of a ledger is the digest of the model as it is."""
    digests = digests_of(model)
    if digests in models:
        return True
    # A ledger before format 11 has a joint digest of an adapter and its base.
    return is_saved_as_adapter(model) and digests._replace(parameters=whole_digest(model)) in models


def _state_besides_parameters(model: nn.Module) -> list[tuple[str, Any]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [(name, value) for name, value in model.state_dict().items() if name not in parameters]


def _digest(named: Iterable[tuple[str, Any]]) -> str:
    found = [(name, *described(value)) for name, value in named]
    return hashlib.sha256(json.dumps(found).encode("utf-8")).hexdigest()


def note_shards(parameters: Iterable[Tensor]) -> None:
    """Let parts of weights be described by the present whole weight until a part changes.

    Every process must call this collective, or the others wait. Only sums of the parts are exchanged, never weights.
    """
    shards = [value for value in parameters if isinstance(value, DTensor)]
    if shards:
        sums = torch.stack([sums_of_rows(value) for value in shards])
        dist.all_reduce(sums)
        for shard, whole in zip(shards, sums.tolist(), strict=True):
            _WHOLE[shard] = (*_kind(shard), whole), sums_of_bytes(part_here(shard)).tolist()


def described(value: Any) -> tuple[Any, ...]:
    """Return what distinguishes a tensor from others; for other state, its `repr`."""
    if not isinstance(value, Tensor):
        return (repr(value),)
    if isinstance(value, DTensor):
        whole, before = _WHOLE[value]
        now = sums_of_bytes(part_here(value)).tolist()
        return whole if now == before else (*whole, *now)
    return *_kind(value), sums_of_bytes(value.detach()).tolist()


def _kind(value: Tensor) -> tuple[Any, ...]:
    return str(value.dtype), list(value.shape)


def sums_of_rows(shard: Tensor) -> Tensor:
    """Return this part's share of the whole weight's two sums (`sums_of_bytes`); words that span two parts add up."""
    flat = part_here(shard).contiguous().view(-1).view(torch.uint8)
    size = shard.numel() * shard.itemsize
    begin = first_row(shard) * (size // len(shard))
    cut = min(max(0, size // 8 * 8 - begin), len(flat))
    # Pad with zeros at both ends, so that words begin at the same bytes as in the whole weight.
    words = F.pad(flat[:cut], (begin % 8, -(begin + cut) % 8))
    return torch.stack([words.view(torch.int64).sum(), flat[cut:].sum(dtype=torch.int64)])
