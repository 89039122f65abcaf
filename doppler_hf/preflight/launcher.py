"""Settings that come from `accelerate launch`, its configuration file, or an Accelerator of the script's own.

These settings bypass the arguments, so the checks ask the accelerator what it will do.
"""

import os
from typing import Any, Final

import torch
from accelerate.utils import DistributedType, DynamoBackend

from doppler_hf.errors import Refusal
from doppler_hf.run.callback import another_arguments
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import IMPRECISE

_ACCUMULATION: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_IN_PARTS: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP)


def refuse_autocast_around_training(args: DopplerTrainingArguments) -> None:
    """Refuse a `torch.autocast` block around `train`, since the engine's sums and the optimizer would run in it, too."""
    if torch.is_autocast_enabled(args.device.type):
        dtype = str(torch.get_autocast_dtype(args.device.type)).removeprefix("torch.")
        raise Refusal(
            "autocast-around-training",
            f"train() was called inside torch.autocast ({dtype}), which would round the sums of gradients and the noise as "
            "well as the model. Call train() outside of it, and set bf16=True in the arguments: then only the model "
            "computes in bfloat16.",
        )


def refuse_settings_of_the_launcher(args: DopplerTrainingArguments, accelerator: Any) -> None:
    """Refuse settings that break or do not affect a private run, wherever they were set."""
    if not hasattr(accelerator.state, "mixed_precision"):
        raise another_arguments()
    state, precision = accelerator.state, accelerator.mixed_precision
    if precision in IMPRECISE or accelerator.scaler is not None:
        precision = precision if precision in IMPRECISE else "fp16"
        raise Refusal(
            "launcher-precision",
            f"Mixed precision {precision!r} cannot be used with differential privacy: {IMPRECISE[precision]}. It was set "
            "by `accelerate launch --mixed_precision`, accelerate's configuration file, ACCELERATE_MIXED_PRECISION, or an "
            "Accelerator that the script made. Set it to 'bf16' or 'no' there.",
        )
    if args.bf16 and precision != "bf16":
        raise Refusal(
            "launcher-precision",
            f"bf16=True has no effect, because accelerate's Accelerator already has mixed_precision={precision!r}. Set "
            "bf16=True before the trainer is made, or set mixed_precision in accelerate's configuration or in "
            "ACCELERATE_MIXED_PRECISION.",
        )
    if state.dynamo_plugin is not None and state.dynamo_plugin.backend != DynamoBackend.NO:
        raise Refusal(
            "launcher-compiles",
            f"The launcher's dynamo backend {state.dynamo_plugin.backend.value.lower()} cannot be used with differential "
            "privacy: torch cannot compile layers that compute per-sample gradients. Leave out --dynamo_backend and "
            "ACCELERATE_DYNAMO_BACKEND. You may still compile frozen modules yourself.",
        )
    if (
        accelerator.distributed_type in _IN_PARTS
        or state.parallelism_config is not None
        or state.torch_tp_plugin is not None
    ):
        what = accelerator.distributed_type.value if accelerator.distributed_type in _IN_PARTS else "a parallelism_config"
        raise Refusal(
            "launcher-parallelism",
            f"The accelerator uses {what}, which cannot be used with differential privacy: clipping needs the whole "
            "gradient of a record in one process. Launch with recipes/accelerate/ddp.yaml, or with "
            "recipes/accelerate/fsdp2.yaml to shard the weights.",
        )
    if getattr(state, "downcast_bfloat", False):
        raise Refusal(
            "launcher-precision",
            "The launcher's downcast_bf16 cannot be used with differential privacy: the noise would be rounded to bfloat16. "
            "Turn it off in accelerate's configuration (run `accelerate config` again), leave --downcast_bf16 out of "
            "`accelerate launch`, and unset ACCELERATE_DOWNCAST_BF16.",
        )
    steps = os.environ.get(_ACCUMULATION, "1")
    if steps not in ("1", "auto", str(args.gradient_accumulation_steps)):
        raise Refusal(
            "launcher-accumulation",
            f"The launcher sets gradient_accumulation_steps={steps}, but a private run uses the value of the arguments "
            f"({args.gradient_accumulation_steps}), so the batch would be smaller than you expect. Set "
            f"gradient_accumulation_steps={steps} in the arguments, or remove it from the launcher's configuration.",
        )
