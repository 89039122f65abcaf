"""Frozen weights in shards on all processes: FSDP2 of torch (`fully_shard`), as accelerate applies it.

What is trained stays whole on every process: per-sample norms are of whole gradients, and clipped sums, noise, optimizer and
checkpoints are those of processes that each have all weights. Only where the frozen weights lie is another matter. So the
host's trainer is not told of it: to the host, FSDP means that gradients and optimizer are in shards too.

Sensitivity: a gathered weight has the bits that it had before it was cut, and nothing of an example is in it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, final

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from doppler_hf.privacy.losses import without_adapters
from doppler_hf.run.in_step import InStep
from doppler_hf.run.parameters import described, remember_whole
from doppler_hf.run.replicas import give_all_the_weights_of_process_0
from doppler_hf.training_args import DopplerTrainingArguments

_BY_LAUNCHER: Final = "ACCELERATE_USE_FSDP"
_DDP: Final = "take recipes/accelerate/ddp.yaml, with which each process has all weights"
# Setting of FSDP → the only value that a private run can have, why, and the mend.
_SETTINGS: Final[dict[str, tuple[Any, str, str]]] = {
    "fsdp_version": (2, "version 1 joins trained and frozen weights in one", "Set fsdp_version: 2"),
    "reshard_after_forward": (
        True, "each process would keep all weights that it has gathered", f"Set fsdp_reshard_after_forward: true, or {_DDP}",
    ),
    "cpu_ram_efficient_loading": (
        False, "every process cuts what it has loaded", "Set fsdp_cpu_ram_efficient_loading: false",
    ),
    "activation_checkpointing": (
        False, "it wraps layers that the engine must see", "Set gradient_checkpointing=True instead",
    ),
    "ignored_modules": (None, "what is trained stays whole, and what is frozen does not", "Leave fsdp_ignored_modules out"),
    "cpu_offload": (None, "nothing was tested with it", "Leave fsdp_offload_params out, or take more processes"),
}  # fmt: skip


@contextlib.contextmanager
def kept_from_host(args: DopplerTrainingArguments) -> Iterator[FullyShardedDataParallelPlugin | None]:
    """Let the host make its accelerator in the block as if no FSDP were asked for.

    Yields:
        What was asked for, by `args.fsdp` or by the launcher; None for nothing.

    Raises:
        ValueError: If it cannot be had with privacy.
    """
    by_launcher, of_args = os.environ.get(_BY_LAUNCHER), args.fsdp_plugin_args
    if of_args is None and (by_launcher or "").lower() != "true":
        yield None
        return
    plugin = FullyShardedDataParallelPlugin(**(of_args or {}))
    refuse_plugin(plugin, args)
    os.environ.pop(_BY_LAUNCHER, None)
    args.fsdp_plugin_args = None
    try:
        yield plugin
    finally:
        args.fsdp_plugin_args = of_args
        if by_launcher is not None:
            os.environ[_BY_LAUNCHER] = by_launcher


def refuse_plugin(plugin: FullyShardedDataParallelPlugin, args: DopplerTrainingArguments) -> None:
    """Refuse settings of FSDP, and arguments beside it, that a private run cannot have.

    Raises:
        ValueError: If there is one, by its name.
    """
    for name, (only, reason, mend) in _SETTINGS.items():
        value = getattr(plugin, name)
        is_fit = not isinstance(value, CPUOffloadPolicy) if name == "cpu_offload" else value == only
        if not is_fit:
            raise ValueError(f"FSDP must have {name}={only} in a private run, got {value}: {reason}. {mend}.")
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ValueError(
            f"FSDP must be that of torch 2.13 or later in a private run, got torch {torch.__version__}, which cannot go on "
            f"behind a pass that did not fit into memory. Install torch 2.13, or {_DDP}."
        )
    if args.world_size == 1:
        raise ValueError(
            "FSDP must have several processes, got one, which would have all weights. Start several with `accelerate "
            "launch --num_processes`, or leave fsdp out."
        )
    if args.optim_target_modules is not None:
        raise ValueError(
            f"optim_target_modules={args.optim_target_modules!r} cannot be used with FSDP: GaLore trains the weights that "
            f"FSDP cuts, and computes its basis from whole gradients. Train adapters, or {_DDP}."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True cannot be used with FSDP: weights in shards are not converted. Leave it out, or load the "
                "model with dtype=torch.bfloat16."
            )


@final
class Sharding:
    """The frozen weights of a model, cut at the first use and gathered for each pass.

    Args:
        plugin: What was asked for; None for nothing, with which each process has all weights.
        device: The device of the pieces.

    Attributes:
        is_asked_for: Whether there is a plugin.
        in_step: The meetings of the processes; None if each has all weights, or before they are cut.
    """

    def __init__(self, plugin: FullyShardedDataParallelPlugin | None, *, device: torch.device) -> None:
        self._plugin, self._device, self.is_asked_for = plugin, device, plugin is not None
        self.in_step: InStep | None = None

    def cut(self, model: nn.Module) -> None:
        """Give each process its part of the frozen weights of process 0, and all that is trained (in place).

        Raises:
            ValueError: If nothing is frozen, or what was frozen when the weights were cut is trained now.
        """
        if self._plugin is None:
            return
        frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
        cut = {name: value for name, value in model.named_parameters() if isinstance(value, DTensor)}
        thawed = [name for name, value in cut.items() if value.requires_grad]
        if thawed:
            raise ValueError(
                f"What is trained under FSDP must be so before the first training or evaluation, got {thawed[0]!r} that was "
                "unfrozen since, of which each process has a part only. Set requires_grad before, or make a new trainer."
            )
        if isinstance(model, FSDPModule):
            return
        if not frozen:
            raise ValueError(
                "A model must have frozen weights for FSDP in a private run, got none: an example's gradient is clipped by "
                "its norm over all that is trained, which stays whole on every process, and only what is frozen is cut. "
                f"Train adapters (lora_r) or a head on a frozen base, or {_DDP}."
            )
        # The model is on the processor still, where it fits as a whole, and words are numbers of it: to read one must not
        # wait for a device.
        group = dist.new_group(backend="gloo")
        give_all_the_weights_of_process_0(model, group=group)
        uncut = [*(value for value in model.parameters() if value.requires_grad), *shared_by_layers(model)]
        for parameter in uncut:
            parameter.data = parameter.data.to(self._device)
        whole = {name: described(value) for name, value in frozen.items()}
        # Only parameters count of a module to be ignored, so that one made for them will do.
        self._plugin.ignored_modules = [nn.ParameterList(uncut)]
        # Casts are autocast's, as with one process.
        self._plugin.mixed_precision_policy = MixedPrecisionPolicy()
        if self._plugin.transformer_cls_names_to_wrap is None:
            self._plugin.transformer_cls_names_to_wrap = kinds_of_layers(model)
        fsdp2_prepare_model(self._as_accelerator(), model)
        for name, value in model.named_parameters():
            if isinstance(value, DTensor):
                remember_whole(value, whole[name])
        assert isinstance(model, FSDPModule)
        # So that between two passes all weights are in pieces, and none is taken for a whole one.
        model.set_reshard_after_forward(True)
        groups = groups_of(model)
        assert not any(value.sharded_param.requires_grad for group in groups for value in group.fsdp_params)
        self.in_step = InStep(model, [*groups.values()], group=group, set_float32=gathered_in_float32(list(groups)))
        model.register_load_state_dict_pre_hook(cut_what_is_loaded)
        if hasattr(model, "generate"):  # of adapters, whose own `generate` calls the model inside of them
            register_fsdp_forward_method(model, "generate")
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # So that all processes generate equally many tokens.
                module._is_fsdp_managed_module = True

    def look_again(self, model: nn.Module) -> None:
        """Know the model by the weights that it has now: others may have been loaded since they were cut."""
        for value in model.parameters():
            if isinstance(value, DTensor):
                remember_whole(value, described(value.full_tensor()))

    def _as_accelerator(self) -> Any:
        """Return what `fsdp2_prepare_model` reads of an accelerator, which has no FSDP on a CPU."""
        return SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=self._plugin),
            torch_device_mesh=init_device_mesh(self._device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
            parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)),
            mixed_precision="no",
            device=self._device,
            is_main_process=dist.get_rank() == 0,
        )


def shared_by_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return frozen weights that several layers share, which FSDP cannot cut, but for embeddings that are the head's too.

    Of encoder-decoders these are the embeddings, which both parts and the head have.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    embeddings = {*embeddings_of(without_adapters(model))}
    return [
        parameter
        for parameter, layers in owners.items()
        if len(layers) > 1 and not layers <= embeddings and not parameter.requires_grad
    ]


def kinds_of_layers(model: nn.Module) -> list[str]:
    """Return the names of the classes of layers that are gathered together, as the host names them for a model.

    Those that hold the embeddings are left out, as BERT's are: accelerate cuts embeddings by themselves.
    """
    base = without_adapters(model)
    embeddings = embeddings_of(base)
    kinds: dict[str, list[nn.Module]] = {}
    for module in base.modules():
        kinds.setdefault(type(module).__name__, []).append(module)
    named = [name for name in getattr(base, "_no_split_modules", None) or () if name in kinds]
    return [name for name in named if not any(each in embeddings for layer in kinds[name] for each in layer.modules())]


def embeddings_of(base: nn.Module) -> list[nn.Module]:
    """Return the embeddings of inputs and outputs of a model, as far as it has some."""
    if not isinstance(base, PreTrainedModel):
        return []
    return [module for module in (base.get_input_embeddings(), base.get_output_embeddings()) if module is not None]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what is to be saved of a model whose frozen weights are cut, on process 0; called by every process.

    Of a base under adapters these are its embeddings alone, which PEFT may save: the rest is where it was loaded from.
    """
    base = without_adapters(model)
    embeddings: set[str] = set()
    if base is not model:
        embeddings = {name for name, module in model.named_modules() if module in embeddings_of(base)}
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            if base is not model and name.rpartition(".")[0] not in embeddings:
                continue
            value = value.full_tensor()
        state[name] = value.cpu() if dist.get_rank() == 0 else value.new_empty(0)
    return state


def cut_what_is_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace the whole weights in a state that is loaded by this process's part of them (modified in place)."""
    for name, own in module.state_dict().items():
        value = state_dict.get(prefix + name)
        if isinstance(own, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            there = value.to(own.device)
            state_dict[prefix + name] = distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)


# --- torch's own parts, for which it has no public names; tests pin them --------------------------------------------------


def groups_of(model: Any) -> dict[Any, Any]:
    """Return the groups of weights that are gathered together, each with a module that gathers it, in a fixed order."""
    root = model._get_fsdp_state()
    root._lazy_init()  # so that all can be brought back to a beginning, before a pass as behind one
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {group: unit for unit in reversed(units) for group in unit._get_fsdp_state()._fsdp_param_groups}


def gathered_in_float32(groups: list[Any]) -> Callable[[bool], None]:
    """Return a function that lets weights of fewer bits be gathered in float32, or as they are."""

    def set_float32(is_wide: bool) -> None:
        for group in groups:
            group.mp_policy = MixedPrecisionPolicy(param_dtype=torch.float32 if is_wide else None)
            group._init_mp_dtypes()
            for parameter in group.fsdp_params:
                # Made anew by the next gathering, in the type of then.
                parameter.all_gather_outputs = []
                parameter.__dict__.pop("_unsharded_param", None)

    return set_float32
