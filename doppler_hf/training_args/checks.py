"""The checks of `DopplerTrainingArguments`: they refuse values out of range, unsafe combinations, and what has no effect.

`args` is Transformers' class with our fields: importing ours would be circular.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from doppler_hf.errors import Refusal
from doppler_hf.filters.grammar import did_you_mean
from doppler_hf.privacy.accounting.composition import SMALLEST_DELTA
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN

# Sensitivity: gradients of nothing but rounding, some 1e-7 that follow others' padding, are not to be clipped up to C.
_SMALLEST_CLIP_NORM: Final = 1e-4
_Range = tuple[str, Callable[[float], bool]]
_POSITIVE: Final[_Range] = ("be a finite number > 0", lambda value: 0.0 < value < math.inf)
_COUNT: Final[_Range] = ("be at least 1", lambda value: value >= 1)

# The kind of an argument → the values that are of it, in words, and the fix.
_KINDS: Final[dict[type, tuple[type, str, str]]] = {
    float: (Real, "a number", "Write it without quotes, in YAML with a point, as 1.0e-5"),
    int: (Integral, "a whole number", "Write it without quotes"),
    bool: (bool, "True or False", "Set one of them"),
    str: (str, "a string", "Write it in quotes"),
}

# Argument → its range, and the fix.
_RANGES: Final[dict[str, tuple[_Range, str]]] = {
    "target_epsilon": (_POSITIVE, "To train without noise set noise_multiplier=0 instead."),
    "noise_multiplier": (("be a finite number ≥ 0", lambda value: 0.0 <= value < math.inf), "Set 0 for no noise."),
    "target_delta": (
        (f"lie in [{SMALLEST_DELTA:g}, 1)", lambda value: SMALLEST_DELTA <= value < 1.0),
        "Set a little less than 1/N, or leave it out.",
    ),
    "per_sample_max_grad_norm": (
        (f"be a finite number ≥ {_SMALLEST_CLIP_NORM:g}", lambda value: _SMALLEST_CLIP_NORM <= value < math.inf),
        "Usual is 1. Far below that, rounding errors would count as much as gradients.",
    ),
    "learning_rate": (("be a finite number ≥ 0", lambda value: 0.0 <= value < math.inf), "Leave it out for one that fits."),
    "augmentation_multiplicity": (_COUNT, "Leave it out for one view of each example."),
    "max_tokens_per_micro_batch": (_COUNT, "Leave it out for no limit."),
    "max_examples_per_unit": (_COUNT, "Leave it out for no limit."),
    "per_sample_max_loss": (_POSITIVE, "Leave it out for twice the loss of an untrained model."),
    "train_loss_budget": (("lie in (0, 1)", lambda value: 0.0 < value < 1.0), "Usual is 0.01."),
    "adam_bc_floor": (_POSITIVE, "Leave it out for a fraction of the noise's variance."),
    # Transformers trains one step then, at a learning rate of a schedule of none.
    "gradient_accumulation_steps": (
        ("be a whole number ≥ 1", lambda value: value >= 1 and value == int(value)),
        "Usual is 1.",
    ),
    "per_device_train_batch_size": (_COUNT, "Take a hundred or more: large batches need less noise."),
    "max_steps": (("be positive, or -1", lambda value: value != 0), "Leave it out to train for num_train_epochs."),
}

# Transformers' argument → the reason why it would void the guarantee.
_BREAKS_PRIVACY: Final = {
    "fp16": "its gradient scaler skips steps depending on the data",
    "deepspeed": "it keeps gradients out of the engine's reach",
    "parallelism_config": "one process must see an example whole",
    "torch_compile": "torch compiles no layer that notes per-sample gradients (frozen modules you may compile yourself)",
    "use_liger_kernel": "its fused layers have no per-sample gradients",
    "train_sampling_strategy": "the accountant assumes random allocation (batches are sorted by length already)",
    "label_smoothing_factor": "Trainer's smoother averages over the batch's tokens",
    "neftune_noise_alpha": "it hooks the embeddings of the whole batch",
    "dataloader_drop_last": "random allocation has no last batch",
    "auto_find_batch_size": "it repeats steps whose outcome depends on the data",
    "debug": "it prints layer outputs of training examples without noise",
    "include_num_input_tokens_seen": "the number of tokens in a batch depends on the data and would be logged without noise",
    "ignore_data_skip": "it makes the steps run differ from the steps planned",
}
# Variables by which a launcher asks for what cuts a model or an example into parts → its name.
_OF_THE_LAUNCHER: Final = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Tensor, context or sequence parallelism",
    "ACCELERATE_USE_TP": "Tensor parallelism",
}
# Mixed precision → why a private run cannot have it.
IMPRECISE: Final = {
    "fp16": _BREAKS_PRIVACY["fp16"],
    "fp8": "its scales come from the whole batch, so that an example's gradient depends on the others",
}
_FIXES: Final = {
    "fp16": "Use bf16, or leave it out",
    "deepspeed": "To have weights in shards use FSDP (recipes/accelerate/fsdp2.yaml)",
}
# Transformers' argument, or one of its `accelerator_config` → the reason why it has no effect.
_WITHOUT_EFFECT: Final = {
    "data_seed": "because batches come from the operating system's entropy",
    "split_batches": "because each process samples for itself",
    "use_seedable_sampler": "because batches come from the operating system's entropy",
    "dataloader_in_order": "because a batch is sampled at the step that accounts for it",
    "length_column_name": f"because batches are sorted by the lengths of {LENGTH_COLUMN!r}",
    "average_tokens_across_devices": "because no loss is scaled by a number of tokens",
    "torch_empty_cache_steps": "because the private step leaves the cache to torch",
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "because processes add their clipped sums without DistributedDataParallel",
    ),
}


def own_fields(base: type[TrainingArguments]) -> list[Field[Any]]:
    """Return the fields of our class that Transformers' does not have; a subclass of ours may have more."""
    theirs = {field.name for field in fields(TrainingArguments)}
    return [field for field in fields(base) if field.name not in theirs]


def default_of(args: TrainingArguments | AcceleratorConfig, name: str) -> Any:
    """Return the value that an argument has if it is left out."""
    return type(args).__dataclass_fields__[name].default


def check_kinds(args: TrainingArguments, *, base: type[TrainingArguments]) -> None:
    """Refuse a word that is not among an argument's choices, and a value of another kind, such as a number in quotes."""
    hints = get_type_hints(base)
    numbers = ("learning_rate", "max_grad_norm", "per_device_train_batch_size", "max_steps")
    for field in own_fields(base) + [field for field in fields(base) if field.name in numbers]:
        hint, value = hints[field.name], getattr(args, field.name)
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise Refusal(
                    "unknown-value",
                    f"{field.name} must be one of {', '.join(get_args(hint))}, got {value!r}"
                    f"{did_you_mean(str(value), get_args(hint))}.",
                )
            continue
        kind, *none = get_args(hint) or (hint,)
        allowed, words, fix = _KINDS[kind]
        is_bool = isinstance(value, bool)  # which Python takes for a number
        if not isinstance(value, (allowed, *none)) or (is_bool and kind is not bool):
            raise Refusal(
                "wrong-type", f"{field.name} must be {words}, got {value!r}. {fix}, or leave it out for {field.default!r}."
            )


class NoEffectError(Refusal):
    """An argument has no effect because of another one."""

    def __init__(self, name: str, value: Any, *, beside: str, because: str, fix: str) -> None:
        super().__init__("no-effect", f"{name}={value!r} has no effect with {beside}={because}. {fix}.")
        self.name, self.beside = name, beside


def refuse_privacy_without_dp(args: TrainingArguments, *, base: type[TrainingArguments]) -> None:
    """Refuse what has no effect with `disable_dp`: all of our own arguments."""
    for field in own_fields(base):
        value = getattr(args, field.name)
        if field.name != "disable_dp" and value != field.default:
            raise NoEffectError(
                field.name, value, beside="disable_dp", because="True, which is the stock Trainer",
                fix="Leave one of them out. For a filter without noise set noise_multiplier=0 instead of disable_dp",
            )  # fmt: skip


def check_ranges(args: TrainingArguments) -> None:
    """Refuse numbers out of range, and both or neither of `target_epsilon` and `noise_multiplier`."""
    if (args.target_epsilon is None) == (args.noise_multiplier is None):
        raise Refusal(
            "one-of-two",
            f"Exactly one of target_epsilon and noise_multiplier must be set, got {args.target_epsilon} and "
            f"{args.noise_multiplier}. Set target_epsilon=3, for example, or disable_dp=True to train without privacy.",
        )
    for name, ((words, holds), fix) in _RANGES.items():
        value = getattr(args, name)
        if value is not None and not holds(value):
            raise Refusal("out-of-range", f"{name} must {words}, got {value}. {fix}")
    if args.max_grad_norm:
        raise Refusal(
            "gradient-rescaled",
            f"max_grad_norm={args.max_grad_norm} would rescale the private gradient with its noise. Leave it unset: "
            "per_sample_max_grad_norm is the norm that privacy needs.",
        )


def without_rate_rule(base_optimizer: str, optim_target_modules: object) -> str | None:
    """Return which of these has no default learning rate, or None if there is a default."""
    if base_optimizer == "sgd":
        return "base_optimizer='sgd'"
    return "GaLore" if optim_target_modules else None


def refuse_no_learning_rate(args: TrainingArguments) -> None:
    """Refuse to leave the learning rate out where there is no default."""
    what = without_rate_rule(args.base_optimizer, args.optim_target_modules)
    if args.learning_rate is None and what is not None:
        raise Refusal(
            "no-learning-rate",
            f"learning_rate must be set with {what}, got None: Adam and Muon have a default. Set it, or leave {what} out.",
        )


@contextlib.contextmanager
def kept_without_effect(args: TrainingArguments) -> Iterator[None]:
    """Take back what another library's class of arguments sets by itself in the block, and no private run has.

    sentence-transformers' arguments set `ddp_broadcast_buffers`, and in several processes `dataloader_drop_last`. A value
    that the user gave stays, and is refused.
    """
    names = [name for name in (*_WITHOUT_EFFECT, "dataloader_drop_last") if name in type(args).__dataclass_fields__]
    left_out = [name for name in names if getattr(args, name) == default_of(args, name)]
    yield
    for name in left_out if not args.disable_dp else ():
        setattr(args, name, default_of(args, name))


def unused(args: TrainingArguments) -> frozenset[str]:
    """Return the names of Transformers' arguments whose values a private run does not use, though they have defaults."""
    of_adam = {"adam_beta2", "adam_epsilon"} if args.base_optimizer == "sgd" else set()
    if args.adam_bc_floor is not None:
        of_adam.add("adam_epsilon")
    return frozenset({*_WITHOUT_EFFECT, *of_adam, "adam_beta1", "max_grad_norm", "full_determinism"})


def refuse_without_effect(args: TrainingArguments) -> None:
    """Refuse what would have no effect in this private run."""
    adam = f"with base_optimizer={args.base_optimizer!r}"
    no_noise = (args.noise_multiplier != 0.0, "with noise_multiplier=0", "Set target_epsilon")
    no_units = (args.privacy_unit_column, "if every example is a unit", "Set privacy_unit_column")
    raw_loss = (
        args.report_train_loss == "private", f"with report_train_loss={args.report_train_loss!r}",
        "Set report_train_loss='private'",
    )  # fmt: skip
    no_adam = (args.base_optimizer != "sgd", adam, "Set base_optimizer='adam'")
    # Argument → whether it has an effect, the reason if not, and the fix.
    effects = {
        **{name: (False, reason, "") for name, reason in _WITHOUT_EFFECT.items()},
        **dict.fromkeys(("noise_shape", "floating_point_safe"), no_noise),
        **dict.fromkeys(("max_examples_per_unit", "clip_unit_mean"), no_units),
        **dict.fromkeys(("per_sample_max_loss", "train_loss_budget"), raw_loss),
        "adam_bc_floor": (args.base_optimizer in ("adam_bc", "muon"), adam, "Set base_optimizer='adam_bc'"),
        "full_determinism": (
            args.noise_seed is not None,
            "here: batches come from the operating system's entropy, and so do noise and dropout",
            "Set noise_seed for a test, which is not private then",
        ),
        "adam_beta1": (
            False, "because the filter computes the first moment",
            f"Set low_pass_filter='momentum:beta={args.adam_beta1:g}'",
        ),
        "adam_beta2": no_adam,
        "adam_epsilon": no_adam if args.adam_bc_floor is None else (False, f"with adam_bc_floor={args.adam_bc_floor}", ""),
    }  # fmt: skip
    for name, (has_effect, reason, fix) in effects.items():
        owner = args if name in type(args).__dataclass_fields__ else args.accelerator_config
        value = getattr(owner, name)
        if value != default_of(owner, name) and not has_effect:
            raise Refusal(
                "no-effect",
                f"{name}={value!r} has no effect {reason}. {f'{fix}, or leave it out' if fix else 'Leave it out'}.",
            )
    if args.sampling == "poisson" and args.noise_shape not in ("auto", "white"):
        raise Refusal(
            "poisson-with-shaped-noise",
            f"sampling='poisson' cannot be used with noise_shape={args.noise_shape!r}: shaped noise protects records that "
            "rest for some steps, and Poisson sampling may draw one at every step. Leave one of them out.",
        )


def refuse_optim(args: TrainingArguments) -> None:
    """Refuse an `optim` other than Transformers' default."""
    name = OptimizerNames(args.optim).value
    if name != default_of(args, "optim"):
        galore = ", and switch GaLore on with optim_target_modules" if "galore" in name else ""
        raise Refusal(
            "no-effect",
            f"optim={name!r} has no effect: DopplerTrainer builds its optimizer from base_optimizer and low_pass_filter. "
            f"Leave optim out{galore}.",
        )


def refuse_what_breaks_privacy(args: TrainingArguments) -> None:
    """Refuse Transformers' arguments that would void the guarantee, with the reason."""
    if args.n_gpu > 1:
        raise Refusal(
            "several-gpus",
            f"One process must see one GPU, got {args.n_gpu}: nn.DataParallel splits batches where the engine cannot see "
            "it. Start the script with `accelerate launch`, or with CUDA_VISIBLE_DEVICES=0.",
        )
    launched = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise Refusal(
            "breaks-privacy",
            f"DeepSpeed cannot be used with differential privacy: {_BREAKS_PRIVACY['deepspeed']}. {_FIXES['deepspeed']}.",
        )
    for name, what in _OF_THE_LAUNCHER.items():
        if os.environ.get(name, "false").lower() == "true":
            raise Refusal(
                "breaks-privacy",
                f"{what} cannot be used with differential privacy, and the launcher asks for it ({name}): one process must "
                "see an example whole, and each layer as torch has it. Start the script with a configuration without it.",
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision in IMPRECISE and not (args.fp16 or args.bf16):  # which come before it
        raise Refusal(
            "mixed-precision",
            f"The launcher's mixed precision {precision} cannot be used with differential privacy: {IMPRECISE[precision]}. "
            "It comes from `accelerate launch --mixed_precision`, accelerate's configuration file or "
            "ACCELERATE_MIXED_PRECISION. Set bf16 or no there.",
        )
    if args.world_size == 1 != int(launched):
        # As Transformers does where it finds no accelerator.
        raise Refusal(
            "processes-sample-alone",
            f"The processes of a launcher must train together, got {launched} (WORLD_SIZE) that would each train alone, on "
            "all data and with its own ε. On a CPU set use_cpu=True.",
        )
    if not args.skip_memory_metrics:
        raise Refusal(
            "memory-is-logged",
            "skip_memory_metrics must be True with differential privacy, got False: the memory that a step takes depends on "
            "its batch, and would be logged and saved without noise. Leave it out.",
        )
    refuse_each(args, _BREAKS_PRIVACY)


def refuse_each(args: TrainingArguments, reasons: Mapping[str, str]) -> None:
    """Refuse arguments that are set, each with the reason why a private run cannot have it."""
    for name, reason in reasons.items():
        value = getattr(args, name)
        # Transformers takes an empty value and False for no as well.
        if value != default_of(args, name) and value is not False and value not in ("", [], {}):
            fix = _FIXES.get(name, "Leave it out")
            raise Refusal("breaks-privacy", f"{name}={value!r} cannot be used with differential privacy: {reason}. {fix}.")
