"""The checks of `DopplerTrainingArguments`: they refuse values out of range, unsafe combinations, and useless arguments.

`args` is typed as Transformers' class, because importing ours would be circular.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from transformers import SchedulerType, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from doppler_hf.errors import Refusal, TypeRefusal
from doppler_hf.filters.grammar import did_you_mean
from doppler_hf.privacy.accounting.composition import SMALLEST_DELTA
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN

# Sensitivity: gradients that are nothing but rounding, of some 1e-7, depend on the padding by other examples. They must not
# be scaled up to C.
_SMALLEST_CLIP_NORM: Final = 1e-4
_Range = tuple[str, Callable[[float], bool]]
_POSITIVE: Final[_Range] = ("be positive and finite", lambda value: 0.0 < value < math.inf)
_NOT_NEGATIVE: Final[_Range] = ("be finite and at least 0", lambda value: 0.0 <= value < math.inf)
_COUNT: Final[_Range] = ("be at least 1", lambda value: value >= 1)

# The type of an argument → the class of its values, its name in a message, and the fix.
_KINDS: Final[dict[type, tuple[type, str, str]]] = {
    float: (Real, "a number", "Write it without quotes, and in YAML with a point, such as 1.0e-5"),
    int: (Integral, "a whole number", "Write it without quotes"),
    bool: (bool, "True or False", "Set one of these"),
    str: (str, "a string", "Write it in quotes"),
}

# Argument → its range, and the fix.
_RANGES: Final[dict[str, tuple[_Range, str]]] = {
    "target_epsilon": (_POSITIVE, "To train without noise set noise_multiplier=0 instead."),
    "noise_multiplier": (_NOT_NEGATIVE, "Set 0 for no noise."),
    "target_delta": (
        (f"be in [{SMALLEST_DELTA:g}, 1)", lambda value: SMALLEST_DELTA <= value < 1.0),
        "Set a value a little below 1/N, or leave it out.",
    ),
    "per_sample_max_grad_norm": (
        (f"be finite and at least {_SMALLEST_CLIP_NORM:g}", lambda value: _SMALLEST_CLIP_NORM <= value < math.inf),
        "A usual value is 1. Far below that, rounding errors would count as much as gradients.",
    ),
    "learning_rate": (_NOT_NEGATIVE, "Leave it out to have it chosen automatically."),
    "augmentation_multiplicity": (_COUNT, "Leave it out for one view of each record."),
    "max_tokens_per_micro_batch": (_COUNT, "Leave it out for the default, which fits the device."),
    "max_examples_per_unit": (_COUNT, "Leave it out for no limit."),
    "per_sample_max_loss": (_POSITIVE, "Leave it out for twice the loss of an untrained model."),
    "train_loss_budget": (("be in (0, 1)", lambda value: 0.0 < value < 1.0), "A usual value is 0.01."),
    "weight_decay": (_NOT_NEGATIVE, "Set 0 for no weight decay."),
    "adam_beta2": (("be at least 0 and below 1", lambda value: 0.0 <= value < 1.0), "A usual value is 0.999."),
    "adam_epsilon": (_POSITIVE, "A usual value is 1e-8."),
    "adam_bc_floor": (_POSITIVE, "Leave it out for a fraction of the variance of the noise."),
    "gradient_accumulation_steps": (
        ("be a whole number of at least 1", lambda value: value >= 1 and value == int(value)),
        "A usual value is 1.",
    ),
    "per_device_train_batch_size": (_COUNT, "A hundred or more is usual, since large batches need less noise."),
    # With max_steps=0, Transformers would train one step, with the learning rate of a schedule without steps.
    "max_steps": (("be positive, or -1", lambda value: value != 0), "Leave it out to train for num_train_epochs."),
}

# Transformers' argument → the reason why it would break the guarantee.
_BREAKS_PRIVACY: Final = {
    "fp16": "its gradient scaler skips steps depending on the data",
    "deepspeed": "DeepSpeed computes gradients where they cannot be clipped per record",
    "parallelism_config": "it splits a record over several processes, and clipping needs a whole record in one process",
    "torch_compile": "per-sample gradients cannot be computed in compiled layers (you may compile frozen modules yourself)",
    "use_liger_kernel": "its fused layers have no per-sample gradients",
    "train_sampling_strategy": "ε is computed for random allocation (batches are already sorted by length)",
    "label_smoothing_factor": "Trainer's label smoothing averages over the tokens of the whole batch",
    "neftune_noise_alpha": "the size of its noise depends on the length of the longest record in the batch",
    "dataloader_drop_last": "random allocation has no last batch",
    "auto_find_batch_size": "it repeats steps depending on the data",
    "debug": "it prints layer outputs of training records without noise",
    "include_num_input_tokens_seen": "the number of tokens in a batch depends on the data and would be logged without noise",
    "ignore_data_skip": "the steps that are run would differ from the planned steps",
}
# Environment variable by which a launcher asks for a method that splits a model or an example → the method's name.
_OF_THE_LAUNCHER: Final = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Tensor, context or sequence parallelism",
    "ACCELERATE_USE_TP": "Tensor parallelism",
}
# Mixed precision → the reason why a private run cannot use it.
IMPRECISE: Final = {
    "fp16": _BREAKS_PRIVACY["fp16"],
    "fp8": "its scales come from the whole batch, so the gradient of one record depends on the other records",
}
_FIXES: Final = {
    "fp16": "Leave fp16 out, or set bf16=True in its place (on a CPU, together with use_cpu=True)",
    "deepspeed": "To shard the weights, use FSDP (recipes/accelerate/fsdp2.yaml)",
    "label_smoothing_factor": "Leave label_smoothing_factor out. For a classifier you may override compute_per_sample_loss: "
    "return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction='none')",
}
# Transformers' argument, or an argument of its `accelerator_config` → the reason why it has no effect.
_WITHOUT_EFFECT: Final = {
    "data_seed": "because batches are drawn with secret random numbers of the operating system",
    "split_batches": "because each process draws its own part of a batch",
    "use_seedable_sampler": "because batches are drawn with secret random numbers of the operating system",
    "dataloader_in_order": "because each batch is drawn at its own step",
    "length_column_name": f"because batches are sorted by the lengths of {LENGTH_COLUMN!r}",
    "average_tokens_across_devices": "because no loss is scaled by a number of tokens",
    "sortish_sampler": "because texts are sorted by length within each random batch",
    "torch_empty_cache_steps": "because the private step leaves the cache to torch",
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "because processes add their clipped sums without DistributedDataParallel",
    ),
}


# Another library's name of an argument → ours, where the two are too different to be found by their letters.
_ELSEWHERE: Final = {
    "epsilon": "target_epsilon",
    "eps": "target_epsilon",
    "delta": "target_delta",
    "sigma": "noise_multiplier",
    "clip_norm": "per_sample_max_grad_norm",
    "l2_norm_clip": "per_sample_max_grad_norm",
}
# Arguments of Transformers that are read before the first step.
_PLANNED_FROM: Final = (
    "max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "optim", "optim_args", "optim_target_modules", "bf16", "fp16",
)  # fmt: skip
# Schedules of Transformers that ignore a warmup.
_WITHOUT_WARMUP: Final = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


C = TypeVar("C", bound=type)


def with_known_arguments(cls: C) -> C:
    """Make a class of training arguments refuse a name that it does not have, and propose the name that may be meant."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in options.keys() - known.keys():
            meant = f" (did you mean {_ELSEWHERE[name]!r}?)" if name in _ELSEWHERE else did_you_mean(name, known)
            raise TypeRefusal(
                "unknown-argument",
                f"{cls.__name__} got an unexpected keyword argument {name!r}{meant}. Correct the name, or leave it out.",
            )
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def added_fields(base: type[TrainingArguments]) -> list[Field[Any]]:
    """Return the fields of `base` that `TrainingArguments` does not have."""
    theirs = {field.name for field in fields(TrainingArguments)}
    return [field for field in fields(base) if field.name not in theirs]


def planned_from(base: type[TrainingArguments]) -> list[str]:
    """Return the names of the arguments from which a run is planned: all that `base` adds, and some of Transformers."""
    return [*(field.name for field in added_fields(base)), *_PLANNED_FROM]


def default_of(args: TrainingArguments | AcceleratorConfig, name: str) -> Any:
    """Return the default value of an argument."""
    return type(args).__dataclass_fields__[name].default


def check_kinds(args: TrainingArguments, *, base: type[TrainingArguments]) -> None:
    """Refuse a value that is not among an argument's choices, or has the wrong type, such as a number in quotes."""
    hints = get_type_hints(base)
    numbers = ("learning_rate", "max_grad_norm", "per_device_train_batch_size", "max_steps", "num_train_epochs", "seed")
    for field in added_fields(base) + [field for field in fields(base) if field.name in numbers]:
        hint, value = hints[field.name], getattr(args, field.name)
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise Refusal(
                    "unknown-value",
                    f"{field.name} must be one of {', '.join(get_args(hint))}; got {value!r}"
                    f"{did_you_mean(str(value), get_args(hint))}.",
                )
            continue
        kind, *none = get_args(hint) or (hint,)
        allowed, words, fix = _KINDS[kind]
        is_bool = isinstance(value, bool)  # Python counts a bool as a number.
        if not isinstance(value, (allowed, *none)) or (is_bool and kind is not bool):
            raise Refusal(
                "wrong-type",
                f"{field.name} must be {words}; got {value!r}. {fix}, or leave it out for the default, {field.default!r}.",
            )


class NoEffectError(Refusal):
    """An argument has no effect because of another one."""

    def __init__(self, name: str, value: Any, *, beside: str, because: str, fix: str) -> None:
        super().__init__("no-effect", f"{name}={value!r} has no effect with {beside}={because}. {fix}.")
        self.name, self.beside = name, beside


def refuse_bases_in_front(cls: type, *, ours: type, stock: type, why: str) -> None:
    """Refuse a class in which another class of Transformers' kind comes before ours in Python's order of bases.

    Args:
        cls: The class.
        ours: Our class, `DopplerTrainer` or `DopplerTrainingArguments`.
        stock: The class of Transformers from which ours derives.
        why: What goes wrong in the other order, with "{other}" for the name of the other class.
    """
    first = next(place for place, each in enumerate(cls.__mro__) if each.__module__.partition(".")[0] == "doppler_hf")
    other = next((each for each in cls.__mro__[:first] if issubclass(each, stock) and not issubclass(each, ours)), None)
    if other is None:
        return
    private = [base.__name__ for base in cls.__bases__ if issubclass(base, ours)]
    others = [base.__name__ for base in cls.__bases__ if not issubclass(base, ours)]
    raise TypeRefusal(
        "order-of-bases",
        f"{other.__name__} comes before {cls.__mro__[first].__name__} among the bases of {cls.__name__}, so "
        f"{why.format(other=other.__name__)}. Write `class {cls.__name__}({', '.join([*private, *others])})`.",
    )


def refuse_privacy_without_dp(args: TrainingArguments, *, base: type[TrainingArguments]) -> None:
    """Refuse arguments that have no effect with `disable_dp`: all that `TrainingArguments` does not have."""
    for field in added_fields(base):
        value = getattr(args, field.name)
        # plot_training_curve=False is accepted, because without privacy no curve is drawn anyway.
        if field.name not in ("disable_dp", "plot_training_curve") and value != field.default:
            raise NoEffectError(
                field.name, value, beside="disable_dp", because="True, which trains with the stock Trainer",
                fix="Leave one of them out. For a filter without noise, set noise_multiplier=0 instead of disable_dp",
            )  # fmt: skip


def refuse_file_as_folder(args: TrainingArguments) -> None:
    """Refuse an `output_dir` that cannot be made, because it or a path above it is a file."""
    folder = Path(str(args.output_dir)).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise Refusal(
            "output-dir-is-a-file",
            f"output_dir={args.output_dir!r} cannot be a folder, because {there} is not one. Set output_dir to a folder, "
            "which need not exist yet.",
        )


def check_ranges(args: TrainingArguments) -> None:
    """Refuse numbers out of range, and both or neither of `target_epsilon` and `noise_multiplier`."""
    if (args.target_epsilon is None) == (args.noise_multiplier is None):
        raise Refusal(
            "one-of-two",
            "Set either target_epsilon or noise_multiplier, for example target_epsilon=3; got "
            f"target_epsilon={args.target_epsilon} and noise_multiplier={args.noise_multiplier}. To train without privacy, "
            "or to evaluate only, set disable_dp=True.",
        )
    for name, ((words, holds), fix) in _RANGES.items():
        value = getattr(args, name)
        if value is not None and not holds(value):
            raise Refusal("out-of-range", f"{name} must {words}; got {value}. {fix}")


def setting_without_default_rate(base_optimizer: str, optim_target_modules: object) -> str | None:
    """Return the name of the setting that has no default learning rate, or None if there is a default."""
    if base_optimizer == "sgd":
        return "base_optimizer='sgd'"
    return "GaLore" if optim_target_modules else None


def refuse_no_learning_rate(args: TrainingArguments) -> None:
    """Refuse arguments without a learning rate if there is no default."""
    what = setting_without_default_rate(args.base_optimizer, args.optim_target_modules)
    if args.learning_rate is None and what is not None:
        raise Refusal(
            "no-learning-rate",
            f"learning_rate has no default with {what}; only Adam and Muon have one. Set learning_rate, or leave "
            f"{what} out.",
        )


@contextlib.contextmanager
def undo_settings_without_effect(args: TrainingArguments) -> Iterator[None]:
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


def _without_effect(args: TrainingArguments) -> Iterator[Refusal]:
    """Yield refusals of the arguments that would have no effect in this private run."""
    adam = f"with base_optimizer={args.base_optimizer!r}"
    no_noise = (args.noise_multiplier != 0.0, "with noise_multiplier=0", "Set target_epsilon")
    no_units = (args.privacy_unit_column, "without privacy_unit_column", "Set privacy_unit_column")
    raw_loss = (
        args.report_train_loss == "private", f"with report_train_loss={args.report_train_loss!r}",
        "Set report_train_loss='private'",
    )  # fmt: skip
    no_adam = (args.base_optimizer != "sgd", adam, "Set base_optimizer='adam'")
    # Argument → whether it has an effect, the reason if not, and the fix.
    effects = {
        **{name: (False, reason, "") for name, reason in _WITHOUT_EFFECT.items()},
        **dict.fromkeys(("noise_shape", "floating_point_safe"), no_noise),
        **dict.fromkeys(("max_examples_per_unit", "clip_unit_mean", "metrics_per_user"), no_units),
        **dict.fromkeys(("per_sample_max_loss", "train_loss_budget"), raw_loss),
        "adam_bc_floor": (args.base_optimizer in ("adam_bc", "muon"), adam, "Set base_optimizer='adam_bc'"),
        "full_determinism": (
            args.noise_seed is not None,
            "in a private run, because batches, noise and dropout follow secret random numbers of the operating system",
            "Set noise_seed for a test, which is then not private",
        ),
        "adam_beta1": (
            False, "because the filter computes the first moment",
            f"Set low_pass_filter='momentum:beta={args.adam_beta1:g}'",
        ),
        "warmup_steps": (
            args.lr_scheduler_type not in _WITHOUT_WARMUP,
            f"with lr_scheduler_type={str(SchedulerType(args.lr_scheduler_type).value)!r}",  # a string where it was assigned
            "Set lr_scheduler_type='constant_with_warmup'",
        ),
        "adam_beta2": no_adam,
        "adam_epsilon": no_adam if args.adam_bc_floor is None else (False, f"with adam_bc_floor={args.adam_bc_floor}", ""),
    }  # fmt: skip
    for name, (has_effect, reason, fix) in effects.items():
        # Transformers may not have made an object of `accelerator_config` yet. Only some arguments have `sortish_sampler`.
        owners = (args, args.accelerator_config) if isinstance(args.accelerator_config, AcceleratorConfig) else (args,)
        owner = next((each for each in owners if name in type(each).__dataclass_fields__), None)
        if owner is None:
            continue
        value = getattr(owner, name)
        if value != default_of(owner, name) and not has_effect:
            yield Refusal(
                "no-effect",
                f"{name}={value!r} has no effect {reason}. {f'{fix}, or leave {name} out' if fix else f'Leave {name} out'}.",
            )
    name = OptimizerNames(args.optim).value
    if name != default_of(args, "optim"):
        galore = ", and switch GaLore on with optim_target_modules" if "galore" in name else ""
        yield Refusal(
            "no-effect",
            f"optim={name!r} has no effect: DopplerTrainer builds its optimizer from base_optimizer and low_pass_filter. "
            f"Leave optim out{galore}.",
        )


def refuse_shaped_noise_with_poisson(args: TrainingArguments) -> None:
    """Refuse noise that is shaped over the steps with Poisson sampling, for which it has no guarantee."""
    if args.sampling == "poisson" and args.noise_shape not in ("auto", "white"):
        raise Refusal(
            "poisson-with-shaped-noise",
            f"sampling='poisson' cannot be used with noise_shape={args.noise_shape!r}. Such noise protects a record only if "
            "some steps pass before the record is in another batch, but Poisson sampling may choose a record at every step. "
            "Leave out noise_shape, or sampling.",
        )


def refuse_launcher(args: TrainingArguments) -> None:
    """Refuse what a launcher asks for in the environment and a private run cannot have."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise Refusal(
            "breaks-privacy",
            f"DeepSpeed cannot be used with differential privacy: {_BREAKS_PRIVACY['deepspeed']}. {_FIXES['deepspeed']}.",
        )
    for name, what in _OF_THE_LAUNCHER.items():
        if os.environ.get(name, "false").lower() == "true":
            raise Refusal(
                "breaks-privacy",
                f"{what} cannot be used with differential privacy, and the launcher asks for it ({name}). Clipping needs "
                "each record whole in one process, and unmodified layers. Turn it off in accelerate's configuration, or "
                f"unset {name}.",
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision in IMPRECISE and not (args.fp16 or args.bf16):  # Arguments have priority over the launcher.
        raise Refusal(
            "mixed-precision",
            f"The launcher's mixed precision {precision!r} cannot be used with differential privacy: "
            f"{IMPRECISE[precision]}. It comes from `accelerate launch --mixed_precision`, accelerate's configuration file "
            "or ACCELERATE_MIXED_PRECISION. Set it to 'bf16' or 'no' there.",
        )


def refuse_devices(args: TrainingArguments) -> None:
    """Refuse several devices of one process, and processes that nothing connects."""
    if args.n_gpu > 1:
        raise Refusal(
            "several-gpus",
            f"This process sees {args.n_gpu} GPUs, and Trainer would split each batch over them with nn.DataParallel, where "
            "per-sample gradients cannot be computed. Start the script with `accelerate launch`, or with "
            "CUDA_VISIBLE_DEVICES=0.",
        )
    launched = os.environ.get("WORLD_SIZE", "1")
    if args.world_size == 1 != int(launched):
        # Transformers starts such processes if it finds no accelerator.
        raise Refusal(
            "processes-sample-alone",
            f"The launcher started {launched} processes (WORLD_SIZE), but Transformers does not connect them: each would "
            "train alone on all data and spend its own ε. On a CPU, set use_cpu=True.",
        )


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuse Transformers' arguments that a private run cannot have, all together."""
    refuse_all([*_breaking_privacy(args), *_without_effect(args), *_not_needed(args)])


def refuse_all(refusals: Sequence[Refusal]) -> None:
    """Raise the first of these refusals, if there are any, with the messages of all, so that one change corrects all."""
    if refusals:
        first = refusals[0]
        first.args = (first.code, "\n".join(str(each) for each in refusals))
        raise first


def _breaking_privacy(args: TrainingArguments) -> Iterator[Refusal]:
    """Yield refusals of the arguments that would break the guarantee."""
    yield from breaking_privacy(args, _BREAKS_PRIVACY)
    if not args.skip_memory_metrics:
        yield Refusal(
            "memory-is-logged",
            "skip_memory_metrics=False cannot be used with differential privacy: the memory of a step depends on its batch, "
            "and would be logged and saved without noise. Leave skip_memory_metrics out.",
        )
    if args.max_grad_norm:
        yield Refusal(
            "gradient-rescaled",
            f"max_grad_norm={args.max_grad_norm} would rescale the private gradient together with its noise. Leave "
            "max_grad_norm out. A private run clips the gradient of each record instead; its clip norm is "
            "per_sample_max_grad_norm.",
        )


def _not_needed(args: TrainingArguments) -> Iterator[Refusal]:
    """Yield a refusal of Transformers' checkpoint after SIGTERM, since a private run saves one itself."""
    if args.enable_jit_checkpoint:
        yield Refusal(
            "jit-checkpoint",
            "enable_jit_checkpoint=True is not needed, because DopplerTrainer itself saves a checkpoint when SIGTERM "
            "arrives. The one of Transformers can lack the last step, and repeating that step would cost further ε. Leave "
            "enable_jit_checkpoint out.",
        )


def breaking_privacy(args: TrainingArguments, reasons: Mapping[str, str]) -> Iterator[Refusal]:
    """Yield refusals of those of these arguments that are set, each with the reason why a private run cannot have it."""
    for name, reason in reasons.items():
        value = getattr(args, name)
        # An empty value, None or False means "not set" in Transformers too.
        if value != default_of(args, name) and value is not False and value not in (None, "", [], {}):
            fix = _FIXES.get(name, f"Leave {name} out")
            yield Refusal("breaks-privacy", f"{name}={value!r} cannot be used with differential privacy: {reason}. {fix}.")
