"""Shard weights over all processes with torch's FSDP2 (`fully_shard`), as accelerate applies it.

Frozen weights are always sharded. A small trained part, such as adapters and heads, stays whole on every process. A large
trained part is sharded too, with its noise and optimizer. Clipped sums are whole in both cases, like gradients that FSDP2
accumulates, and each process gets its rows of the noisy total. FSDP reduces no gradient itself. The use of FSDP is hidden
from `Trainer`, for which it would mean that the backward pass averages gradients.

All processes must gather weights equally often. Before a step they agree on the largest number of passes of any process. The
other processes make additional passes of weight 0 (`PrivateRun.release`), and FSDP2 itself does the gathering.

Sensitivity: a gathered weight has the same bits as before it was cut, and contains nothing of an example.
"""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, final

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

from doppler_hf.errors import Refusal
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.run.digests import note_shards
from doppler_hf.run.interruptions import Terminated, Termination
from doppler_hf.run.processes.processes import broadcast_weights
from doppler_hf.run.processes.sharded_states import embeddings_of, shard_loaded_state
from doppler_hf.shards import remember_keeper
from doppler_hf.training_args import DopplerTrainingArguments

_BY_LAUNCHER: Final = "ACCELERATE_USE_FSDP"
# The share of all weights above which trained weights are sharded too. Trained weights with their noise and optimizer states
# take three to four times the memory of frozen weights.
LARGEST_WHOLE: Final = 0.1
_DDP: Final = "use recipes/accelerate/ddp.yaml, with which each process has all weights"
# A setting of FSDP → its only possible value in a private run, the reason, and the fix.
_SETTINGS: Final[dict[str, tuple[Any, str, str]]] = {
    "fsdp_version": (2, "version 1 joins trained and frozen weights in one tensor", "Set fsdp_version: 2"),
    "reshard_after_forward": (
        True, "otherwise each process would keep all gathered weights", f"Set fsdp_reshard_after_forward: true, or {_DDP}",
    ),
    "cpu_ram_efficient_loading": (
        False, "every process shards the model that it has loaded", "Set fsdp_cpu_ram_efficient_loading: false",
    ),
    "activation_checkpointing": (
        False, "it wraps layers for which per-sample gradients are computed", "Set gradient_checkpointing=True instead",
    ),
    "ignored_modules": (
        None, "the library itself chooses which weights stay whole", "Leave fsdp_ignored_modules out",
    ),
    "cpu_offload": (None, "offloading is untested", "Leave fsdp_offload_params out, or use more processes"),
}  # fmt: skip


@contextlib.contextmanager
def hidden_from_trainer(args: DopplerTrainingArguments) -> Iterator[FullyShardedDataParallelPlugin | None]:
    """Let Transformers make its accelerator in the block as if FSDP were not set."""
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
    """Refuse settings of FSDP, and other arguments, that do not work in a private run with FSDP."""
    for name, (only, reason, fix) in _SETTINGS.items():
        value = getattr(plugin, name)
        is_fit = not isinstance(value, CPUOffloadPolicy) if name == "cpu_offload" else value == only
        if not is_fit:
            raise Refusal("fsdp-option", f"FSDP needs {name}={only} in a private run, because {reason}; got {value}. {fix}.")
    if args.world_size == 1:
        raise Refusal(
            "fsdp-in-one-process",
            "FSDP needs at least two processes; this run has only one. Start several processes with `accelerate launch "
            "--num_processes`, or leave fsdp out.",
        )
    if args.optim_target_modules is not None:
        raise Refusal(
            "fsdp-option",
            f"optim_target_modules={args.optim_target_modules!r} cannot be used with FSDP: GaLore needs whole gradients of "
            f"weights that FSDP shards. Train adapters, or {_DDP}.",
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise Refusal(
                "fsdp-option",
                f"{name}=True cannot be used with FSDP, because the weights that FSDP has sharded cannot be converted to "
                f"another precision. Leave {name} out. To evaluate in bfloat16, load the model with dtype=torch.bfloat16.",
            )


@final
class Sharding:
    """Shards a model's weights at the first use and gathers them for each pass; without a plugin, it does nothing."""

    def __init__(self, plugin: FullyShardedDataParallelPlugin | None, *, device: torch.device) -> None:
        self._plugin, self._device, self.is_asked_for = plugin, device, plugin is not None
        self.termination = Termination()
        self._group: dist.ProcessGroup | None = None
        self._trained: set[str] = set()

    @property
    def is_cut(self) -> bool:
        """Whether weights are sharded."""
        return self._group is not None

    def cut(self, model: nn.Module) -> None:
        """Give each process its part of process 0's weights, and all trained weights if these are a small share."""
        if self._plugin is None:
            return
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        thawed = [name for name, value in trained.items() if isinstance(value, DTensor) and name not in self._trained]
        if thawed:
            raise Refusal(
                "unfrozen-shards",
                f"{thawed[0]!r} was unfrozen after FSDP had sharded the model, which happens at the first training or "
                "evaluation. Set requires_grad before that, or make a new trainer.",
            )
        if isinstance(model, FSDPModule):
            return
        self._trained = {*trained}
        # The model is still in CPU memory, where it fits as a whole.
        self._group = dist.new_group(backend="gloo")
        broadcast_weights(model, group=self._group)
        uncut = {*shared_by_layers(model), *(value for value in model.parameters() if value.ndim == 0)}
        of_all = sum(value.numel() for value in model.parameters())
        if sum(value.numel() for value in trained.values()) <= LARGEST_WHOLE * of_all:
            uncut |= {*trained.values()}
        types = {str(value.dtype) for value in trained.values() if value not in uncut}
        if len(types) > 1:
            raise Refusal(
                "types-of-shards",
                f"Expected trained weights of a single dtype, because FSDP gathers several of them together; got "
                f"{' and '.join(sorted(types))}. Load the model in one dtype, or {_DDP}.",
            )
        for parameter in uncut:
            parameter.data = parameter.data.to(self._device)
        # accelerate reads only the parameters of an ignored module, so a new module that has them is enough.
        self._plugin.ignored_modules = [nn.ParameterList([*uncut])]
        # FSDP casts nothing, because autocast does, as with one process.
        self._plugin.mixed_precision_policy = MixedPrecisionPolicy()
        if self._plugin.transformer_cls_names_to_wrap is None:
            self._plugin.transformer_cls_names_to_wrap = kinds_of_layers(model)
        fsdp2_prepare_model(self._as_accelerator(), model)
        assert isinstance(model, FSDPModule)
        # Between two passes all weights must be sharded, so that no gathered weight is mistaken for a whole one.
        model.set_reshard_after_forward(True)
        # Sensitivity: ordinary gradients are neither clipped nor noised. They stay on their process, where they are dropped.
        model.set_requires_gradient_sync(False)
        for group in groups_of(model):
            for keeper in group.fsdp_params:
                remember_keeper(keeper.sharded_param, keeper)
        note_shards(model.parameters())
        model.register_load_state_dict_pre_hook(shard_loaded_state)
        if hasattr(model, "generate"):  # a PEFT model has its own `generate`, which calls the model inside it
            register_fsdp_forward_method(model, "generate")
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # Transformers then lets all processes generate equally many tokens.
                module._is_fsdp_managed_module = True

    def most_passes(self, number: int) -> int:
        """Return the largest number of passes of any process in a batch; every process must call this with its number.

        Raises:
            Terminated: If one process was asked to end. It is raised in all of them, since they can save only together.
        """
        most = torch.tensor([number, self.termination.is_asked_for], device="cpu")
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        number, is_asked_for = most.tolist()
        if is_asked_for:
            raise Terminated
        return int(number)

    def _as_accelerator(self) -> Any:
        """Return the attributes that `fsdp2_prepare_model` reads, since an accelerator on a CPU has no FSDP."""
        return SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=self._plugin),
            torch_device_mesh=init_device_mesh(self._device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
            parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)),
            mixed_precision="no",
            device=self._device,
            is_main_process=dist.get_rank() == 0,
        )


class ShardedTrainer(Trainer):
    """`Trainer` whose model is placed by `Sharding`."""

    args: DopplerTrainingArguments
    _sharding: Sharding

    def create_accelerator_and_postprocess(self) -> None:
        """Make Transformers' accelerator without FSDP, which `Sharding` applies itself."""
        with contextlib.nullcontext() if self.args.disable_dp else hidden_from_trainer(self.args) as plugin:
            super().create_accelerator_and_postprocess()
        self._sharding = Sharding(plugin, device=self.args.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self._sharding.is_asked_for:  # with FSDP the whole model may not fit there
            super()._move_model_to_device(model, device)

    def _prepare_model(self) -> None:
        self._sharding.cut(self.model)
        # Prepare autocast and placement as for training, but without DDP, which would all-reduce raw gradients that are
        # discarded anyway. `prepare` does not change a model that has been prepared.
        placement = False if self._sharding.is_asked_for else None
        self.accelerator.prepare_model(self.model, device_placement=placement, evaluation_mode=True)


def shared_by_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return weights that several layers share, which FSDP cannot shard, except embeddings that only the head shares.

    In encoder-decoders these weights are the embeddings, which both parts and the head share.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    embeddings = {*embeddings_of(without_adapters(model))}
    return [parameter for parameter, layers in owners.items() if len(layers) > 1 and not layers <= embeddings]


def kinds_of_layers(model: nn.Module) -> list[str]:
    """Return the names of the classes of layers whose weights are gathered together, as Transformers lists them.

    Classes that contain the embeddings, as in BERT, are left out, because accelerate shards embeddings separately.
    """
    base = without_adapters(model)
    embeddings = embeddings_of(base)
    kinds: dict[str, list[nn.Module]] = {}
    for module in base.modules():
        kinds.setdefault(type(module).__name__, []).append(module)
    named = [name for name in getattr(base, "_no_split_modules", None) or () if name in kinds]
    return [name for name in named if not any(each in embeddings for layer in kinds[name] for each in layer.modules())]


# --- private parts of torch, which tests pin ------------------------------------------------------------------------------


def groups_of(model: Any) -> list[Any]:
    """Return the groups of weights that are gathered together."""
    model._get_fsdp_state()._lazy_init()
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
