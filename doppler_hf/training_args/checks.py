"""The checks of `DopplerTrainingArguments`: they refuse values out of range, unsafe combinations, and what has no effect.

Each message has the value, the reason and the mend. `args` is the host's class with our fields, since importing ours would
be circular.
"""

import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

from transformers import TrainingArguments
from transformers.trainer_utils import has_length
from transformers.training_args import OptimizerNames

from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.training_args.galore import GaloreArguments, check_target_modules


def check_choices(args: TrainingArguments) -> None:
    """Refuse a word that is not among an argument's choices."""
    hints = get_type_hints(type(args))
    for name in (
        "accountant", "clipping", "clipping_granularity", "grad_sample_engine",
        "base_optimizer", "report_train_loss", "noise_generator",
    ):  # fmt: skip
        if getattr(args, name) not in get_args(hints[name]):
            raise ValueError(f"{name} must be one of {', '.join(get_args(hints[name]))}, got {getattr(args, name)!r}.")


def refuse_privacy_without_dp(args: TrainingArguments) -> None:
    """Refuse what would have no effect with `disable_dp`."""
    for name in (
        "target_epsilon", "noise_multiplier", "noise_seed", "adam_bc_floor", "privacy_unit_column",
        "max_examples_per_unit", "per_sample_max_loss", "train_loss_budget",
    ):  # fmt: skip
        if getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)} has no effect with disable_dp=True, which trains without privacy. Leave one "
                "of them out."
            )
    if args.report_train_loss == "private":
        raise ValueError(
            "report_train_loss='private' has no effect with disable_dp=True, which trains without privacy. Leave one of "
            "them out."
        )
    if args.low_pass_filter != "none":
        raise ValueError(
            f"low_pass_filter={args.low_pass_filter!r} has no effect with disable_dp=True: the stock Trainer has no filter. "
            "For a filter without noise set noise_multiplier=0 instead."
        )

    if args.max_tokens_per_micro_batch is not None:
        raise ValueError(
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} has no effect with disable_dp=True: the stock "
            "Trainer cuts by the number of examples. Leave it out, and set per_device_train_batch_size."
        )


def check_privacy(args: TrainingArguments) -> None:
    """Refuse numbers of the mechanism out of range, and both or neither of `target_epsilon` and `noise_multiplier`."""
    if (args.target_epsilon is None) == (args.noise_multiplier is None):
        raise ValueError(
            f"Exactly one of target_epsilon and noise_multiplier must be set, got {args.target_epsilon} and "
            f"{args.noise_multiplier}. To train without privacy set disable_dp=True."
        )
    if args.target_epsilon is not None and not 0.0 < args.target_epsilon < math.inf:
        raise ValueError(
            f"target_epsilon must be a finite number > 0, got {args.target_epsilon}. To train without noise set "
            "noise_multiplier=0 instead."
        )
    if args.noise_multiplier is not None and not 0.0 <= args.noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {args.noise_multiplier}.")
    if args.target_delta is not None and not 0.0 < args.target_delta < 1.0:
        raise ValueError(f"target_delta must lie in (0, 1), got {args.target_delta}. Usual is less than 1/N.")
    if not 0.0 < args.per_sample_max_grad_norm < math.inf:
        raise ValueError(f"per_sample_max_grad_norm must be a finite number > 0, got {args.per_sample_max_grad_norm}.")
    if args.max_tokens_per_micro_batch is not None and args.max_tokens_per_micro_batch < 1:
        raise ValueError(
            f"max_tokens_per_micro_batch must be at least 1, got {args.max_tokens_per_micro_batch}. Leave it out for no "
            "limit."
        )
    if args.max_grad_norm:
        raise ValueError(
            f"max_grad_norm={args.max_grad_norm} would rescale the private gradient with its noise, so that adam_bc would "
            "correct for the wrong variance. Leave it unset: per_sample_max_grad_norm is the norm that privacy needs."
        )

    if args.max_examples_per_unit is not None and args.privacy_unit_column is None:
        raise ValueError(
            f"max_examples_per_unit={args.max_examples_per_unit} has no effect if every example is a unit. Set "
            "privacy_unit_column, or leave it out."
        )
    if args.max_examples_per_unit is not None and args.max_examples_per_unit < 1:
        raise ValueError(f"max_examples_per_unit must be at least 1, got {args.max_examples_per_unit}.")


def check_train_loss(args: TrainingArguments) -> None:
    """Refuse options of a private training loss that are out of range, or set without one."""
    if args.report_train_loss != "private":
        for name in ("per_sample_max_loss", "train_loss_budget"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"{name}={getattr(args, name)} has no effect with report_train_loss={args.report_train_loss!r}. Set "
                    "report_train_loss='private', or leave it out."
                )
        return
    assert args.per_sample_max_loss is not None
    assert args.train_loss_budget is not None
    if not 0.0 < args.per_sample_max_loss < math.inf:
        raise ValueError(f"per_sample_max_loss must be a finite number > 0, got {args.per_sample_max_loss}.")
    if not 0.0 < args.train_loss_budget < 1.0:
        raise ValueError(f"train_loss_budget must lie in (0, 1), got {args.train_loss_budget}. Usual is 0.01.")


def check_optimizer(args: TrainingArguments) -> None:
    """Refuse what would have no effect on the private optimizer."""
    if args.adam_bc_floor is not None and args.base_optimizer != "adam_bc":
        raise ValueError(
            f"adam_bc_floor={args.adam_bc_floor} has no effect with base_optimizer={args.base_optimizer!r}. Leave it out, "
            "or set base_optimizer='adam_bc'."
        )
    if args.adam_bc_floor is not None and not 0.0 < args.adam_bc_floor < math.inf:
        raise ValueError(f"adam_bc_floor must be a finite number > 0, got {args.adam_bc_floor}.")
    if args.optim != OptimizerNames(type(args).__dataclass_fields__["optim"].default):
        name = OptimizerNames(args.optim).value
        galore = ", and switch GaLore on with optim_target_modules" if "galore" in name else ""
        raise ValueError(
            f"optim={name!r} has no effect: DopplerTrainer builds its optimizer from base_optimizer and "
            f"low_pass_filter. Leave optim out{galore}."
        )
    if args.adam_beta1 != 0.9:
        raise ValueError(
            f"adam_beta1={args.adam_beta1} has no effect, because the filter computes the first moment. Set "
            f"low_pass_filter='b={1 - args.adam_beta1:.6g};a=1,{-args.adam_beta1:.6g}' instead."
        )


def check_galore(args: TrainingArguments) -> None:
    """Refuse GaLore's arguments where they would have no effect."""
    if args.optim_target_modules is None:
        if args.optim_args:
            raise ValueError(
                f"optim_args={args.optim_args!r} has no effect without GaLore. Switch GaLore on with optim_target_modules, "
                "for instance 'all-linear', or leave optim_args out."
            )
        return
    check_target_modules(args.optim_target_modules)
    if args.low_pass_filter.startswith("optimal-fir"):
        raise ValueError(
            f"low_pass_filter={args.low_pass_filter!r} cannot be used with GaLore (optim_target_modules): the gradients "
            "that it stores would be in the bases of different steps. Leave one of them out."
        )
    galore = GaloreArguments.parse(args.optim_args)
    if galore.projector_source == "filtered" and args.low_pass_filter == "none":
        raise ValueError(
            "projector_source=filtered in optim_args has no effect with low_pass_filter='none': the filtered gradient is "
            "the gradient itself. Leave it out, or set a filter."
        )
    if galore.basis_change != "rotate" and args.low_pass_filter == "none" and args.base_optimizer == "sgd":
        raise ValueError(
            f"basis_change={galore.basis_change} in optim_args has no effect with base_optimizer='sgd' and "
            "low_pass_filter='none', which keep no state. Leave it out."
        )


def refuse_what_breaks_privacy(args: TrainingArguments) -> None:
    """Refuse those of the host's arguments that would void the guarantee, with the reason."""
    refusals = (
        (args.fp16, "fp16", "its gradient scaler skips steps depending on the data"),
        (args.n_gpu > 1, "nn.DataParallel", "it splits the batch where the engine cannot see it"),
        (bool(args.deepspeed), "deepspeed", "it keeps gradients out of the engine's reach"),
        (bool(args.fsdp), "fsdp", "it shards the parameters that per-sample clipping needs whole"),
        (args.parallelism_config is not None, "parallelism_config", "one process must see an example whole"),
        (args.torch_compile, "torch_compile", "per-sample gradient hooks do not survive compilation"),
        (args.use_liger_kernel, "use_liger_kernel", "its fused layers have no per-sample gradients"),
        (
            args.train_sampling_strategy != "random",
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "the accountant assumes Poisson sampling, whose draws are sorted by length already",
        ),
        (
            args.label_smoothing_factor != 0,
            "label_smoothing_factor",
            "HF's smoother averages over the batch's tokens",
        ),
        (
            args.neftune_noise_alpha is not None,
            "neftune_noise_alpha",
            "it hooks the embeddings of the whole batch",
        ),
        (args.dataloader_drop_last, "dataloader_drop_last", "a Poisson draw has no last batch"),
        (args.auto_find_batch_size, "auto_find_batch_size", "it repeats steps whose outcome depends on the data"),
        (
            args.torch_empty_cache_steps is not None,
            "torch_empty_cache_steps",
            "the private step does not implement it",
        ),
        (
            args.include_num_input_tokens_seen != "no",
            "include_num_input_tokens_seen",
            "the number of tokens drawn depends on the data and would be logged without noise",
        ),
        (args.ignore_data_skip, "ignore_data_skip", "it makes the steps run differ from the steps planned"),
    )
    mends = {
        "fp16": "Use bf16",
        "nn.DataParallel": "Start with `accelerate launch`",
        "deepspeed": "Use plain multi-process training",
    }
    for refused, name, reason in refusals:
        if refused:
            mend = mends.get(name, "Leave it out")
            raise ValueError(f"{name} cannot be used with differential privacy: {reason}. {mend}.")


def refuse_of_trainer(compute_loss_func: Any, optimizer: Any, train_dataset: Any) -> None:
    """Refuse those of the trainer's own arguments that would void the guarantee, or have no effect."""
    if compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func sees the whole batch, so an example's gradient could depend on the others. Override "
            "compute_per_sample_loss instead, which returns one loss per example."
        )
    if optimizer is not None:
        raise ValueError(
            "An optimizer of your own would bypass low_pass_filter and base_optimizer. Leave `optimizers` to its "
            "scheduler alone, (None, scheduler), and set base_optimizer."
        )
    if train_dataset is not None and not has_length(train_dataset):
        raise ValueError(
            f"{type(train_dataset).__name__} has no length, so it cannot be Poisson-sampled. Load it without streaming."
        )


def refuse_loss_of_batch(trainer: Any, *, base: Any) -> None:
    """Refuse a trainer with a loss of its own for the whole batch, which a private run would never call."""
    if trainer.compute_loss is not base.compute_loss and trainer.compute_per_sample_loss is base.compute_per_sample_loss:
        raise ValueError(
            f"{trainer.__name__}.compute_loss has no effect on a private training, which needs one loss per example. "
            "Override compute_per_sample_loss instead (or as well, if compute_loss is for evaluation)."
        )


def refuse_seeded_collator(collator: Any) -> None:
    """Refuse a collator with a seed of its own, such as that of masked language modeling."""
    if getattr(collator, "seed", None) is not None:
        raise ValueError(
            f"The seed of {type(collator).__name__} must be None in a private run, got {collator.seed}: what it draws would "
            "follow a public seed in the order of the draw, so that one example more changes the others. Leave it out."
        )


def refuse_a_run_without_data(args: TrainingArguments, train_dataset: Any) -> None:
    """Refuse a private run of which nothing can be said: without privacy, or without a training set."""
    if args.disable_dp:
        raise ValueError("disable_dp must be False for a private run, got True. Set target_epsilon instead.")
    if train_dataset is None:
        raise ValueError("train_dataset must be a data set with a length, got None. Pass one to DopplerTrainer.")


def refuse_another_privacy(args: TrainingArguments, *, was_disabled: bool, checkpoint: str | None) -> None:
    """Refuse to train with privacy where the trainer or the checkpoint was made without, or the other way round."""
    if args.disable_dp != was_disabled:
        raise ValueError(
            f"disable_dp must stay {was_disabled} in the life of a trainer, got {args.disable_dp}. Its ledger would speak "
            "for other weights. Make a new DopplerTrainer."
        )
    if checkpoint is not None and args.disable_dp == (Path(checkpoint) / LEDGER_NAME).exists():
        if args.disable_dp:
            raise ValueError(
                f"disable_dp must be False to resume from {checkpoint}, which holds a privacy ledger, got True. Leave it "
                "out, or load the weights with from_pretrained to train them on without privacy."
            )
        raise ValueError(
            f"There is no {LEDGER_NAME} in {checkpoint}, which was saved without privacy, or has lost it, so that it is "
            "unknown what was spent. Train from the start, put the ledger back, or set disable_dp=True."
        )


def refuse_search(args: TrainingArguments) -> None:
    """Refuse a search of hyper-parameters with privacy."""
    if not args.disable_dp:
        raise ValueError(
            "hyperparameter_search trains on the same data again and again: every trial would cost its own ε, and the "
            "choice among them is not accounted for. Search with disable_dp=True on public data, or start one run for "
            "each setting and add their ε up."
        )
