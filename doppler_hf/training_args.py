"""`DopplerTrainingArguments`: HF's `TrainingArguments`, plus how much privacy and which filter.

Names are the field's: Opacus's and dp-transformers' for privacy, torch's and HF's for the rest. What would break the
guarantee, or would have no effect, is refused here rather than ignored during the run.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from doppler_hf.filters import LowPassFilter
from doppler_hf.galore_args import GaloreArguments, check_target_modules
from doppler_hf.optim.state import Base
from doppler_hf.privacy.accounting import Accountant
from doppler_hf.privacy.clipping import Clipping, Engine, Granularity
from doppler_hf.privacy.gradients import NormRule


@dataclass
class DopplerTrainingArguments(TrainingArguments):
    """Arguments of `DopplerTrainer`.

    Exactly one of `target_epsilon` and `noise_multiplier` says how much privacy, unless `disable_dp` is set. The batch
    size of the guarantee is per_device_train_batch_size × gradient_accumulation_steps × processes, the *expected* size
    of one Poisson draw.

    Raises:
        ValueError: A value outside its range, or a combination that breaks privacy or would be without effect; with the
            value and what to do instead.

    Example:
        >>> args = DopplerTrainingArguments(output_dir="out", target_epsilon=3.0, low_pass_filter="first-order-v1")
    """

    target_epsilon: float | None = field(
        default=None,
        metadata={"help": "ε to be spent by the end of training; the noise multiplier is computed from it."},
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "σ, the noise's standard deviation in units of the clip norm, instead of target_epsilon. 0 keeps "
            "sampling, clipping, filter and optimizer and adds no noise: nothing is private then."
        },
    )
    target_delta: float | None = field(
        default=None, metadata={"help": "δ of the guarantee. Default: N^-1.1 for N training examples."}
    )
    accountant: Accountant = field(default="prv", metadata={"help": "Which accountant bounds ε: prv (tight) or rdp."})
    per_sample_max_grad_norm: float = field(
        default=1.0, metadata={"help": "C, the norm to which each example's gradient is clipped."}
    )
    clipping: Clipping = field(
        default="automatic",
        metadata={
            "help": "automatic scales every example's gradient to about C; vanilla shortens only what exceeds C.",
        },
    )
    clipping_granularity: Granularity = field(
        default="flat",
        metadata={
            "help": "flat: one norm over all trainable parameters; per_layer: each of L layers is clipped to C/√L.",
        },
    )
    grad_sample_engine: Engine = field(
        default="book_keeping",
        metadata={
            "help": "Where per-sample gradients come from: book_keeping, at about the price of ordinary ones, or opacus, a "
            "slow reference.",
        },
    )
    grad_sample_norm_rule: NormRule = field(
        default="auto",
        metadata={
            "help": "How book_keeping has the norm of a matrix's gradient: ghost from Gram matrices, direct from the "
            "matrix, auto the cheaper one for each layer and sequence length.",
        },
    )
    grad_sample_self_check: bool = field(
        default=True,
        metadata={
            "help": "Before the first step, hold the per-sample gradients of two examples against plain autograd, and stop "
            "if they differ.",
        },
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "The most padded tokens, examples × longest length, that one forward pass gets: each of the "
            "gradient_accumulation_steps pieces of a draw is cut further to fit. Lengths count before the collator rounds "
            "them up (pad_to_multiple_of). Default: no limit, a piece is one forward pass."
        },
    )
    low_pass_filter: str = field(
        default="none",
        metadata={
            "help": "Filter over time on the private gradient: none, momentum, first-order-v1, first-order-v2, "
            "second-order, f1 … f6, or coefficients such as 'b=0.1,0.1;a=1,-0.8'."
        },
    )
    base_optimizer: Base = field(
        default="adam_bc",
        metadata={
            "help": "What the filtered gradient is fed to: sgd, adam, or adam_bc (Adam whose second moment is corrected "
            "for the noise).",
        },
    )
    adam_bc_floor: float | None = field(
        default=None,
        metadata={
            "help": "Smallest corrected second moment of adam_bc, in squared gradient units. Default: a fraction of the "
            "noise's variance."
        },
    )
    report_train_loss: Literal["raw", "none"] = field(
        default="raw",
        metadata={
            "help": "raw logs the training loss, which is not private; none leaves it out of the logs.",
        },
    )
    disable_dp: bool = field(
        default=False,
        metadata={"help": "Train with the stock Trainer, optimizer and sampler: the non-private baseline."},
    )
    noise_seed: int | None = field(
        default=None,
        metadata={"help": "For tests only: makes noise and draws reproducible, and so not private."},
    )
    max_grad_norm: float | None = field(
        default=None,
        metadata={
            "help": "Clipping of the whole gradient. Without privacy HF's default of 1.0; with privacy it must stay "
            "unset or 0, see per_sample_max_grad_norm."
        },
    )

    def __post_init__(self) -> None:
        """Validate, then let HF do the same."""
        if self.max_grad_norm is None:
            self.max_grad_norm = 1.0 if self.disable_dp else 0.0
        self.low_pass_filter = str(LowPassFilter.parse(self.low_pass_filter))
        super().__post_init__()
        self._check_choices()
        if self.disable_dp:
            self._refuse_privacy_without_dp()
        else:
            self._check_privacy()
            self._check_optimizer()
            self._check_galore()
            self._refuse_what_breaks_privacy()

    def _check_choices(self) -> None:
        hints = get_type_hints(DopplerTrainingArguments)
        for name in (
            "accountant", "clipping", "clipping_granularity", "grad_sample_engine", "grad_sample_norm_rule",
            "base_optimizer", "report_train_loss",
        ):  # fmt: skip
            if getattr(self, name) not in get_args(hints[name]):
                raise ValueError(f"{name} must be one of {', '.join(get_args(hints[name]))}, got {getattr(self, name)!r}.")

    def _refuse_privacy_without_dp(self) -> None:
        for name in ("target_epsilon", "noise_multiplier", "noise_seed", "adam_bc_floor"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"disable_dp=True trains without privacy, but {name}={getattr(self, name)} asks for it. Leave one "
                    "of them out."
                )
        if self.low_pass_filter != "none":
            raise ValueError(
                f"disable_dp=True is the stock Trainer, which has no filter, but low_pass_filter is "
                f"{self.low_pass_filter!r}. For a filter without noise use noise_multiplier=0."
            )

        if self.max_tokens_per_micro_batch is not None:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} is without effect with disable_dp=True: "
                "the stock Trainer cuts by count. Leave it out, and set per_device_train_batch_size."
            )

    def _check_privacy(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"Give exactly one of target_epsilon (got {self.target_epsilon}) and noise_multiplier (got "
                f"{self.noise_multiplier}); disable_dp=True trains without privacy."
            )
        if self.target_epsilon is not None and not 0.0 < self.target_epsilon < math.inf:
            raise ValueError(
                f"target_epsilon must be a finite number > 0, got {self.target_epsilon}; noise_multiplier=0 trains "
                "without noise."
            )
        if self.noise_multiplier is not None and not 0.0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {self.noise_multiplier}.")
        if self.target_delta is not None and not 0.0 < self.target_delta < 1.0:
            raise ValueError(f"target_delta must lie in (0, 1), got {self.target_delta}; about 1/N or less is usual.")
        if not 0.0 < self.per_sample_max_grad_norm < math.inf:
            raise ValueError(f"per_sample_max_grad_norm must be a finite number > 0, got {self.per_sample_max_grad_norm}.")
        if self.max_tokens_per_micro_batch is not None and self.max_tokens_per_micro_batch < 1:
            raise ValueError(
                f"max_tokens_per_micro_batch must be at least 1, got {self.max_tokens_per_micro_batch}; leave it out for "
                "no limit."
            )
        if self.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} would rescale the private gradient and its noise as a whole, which "
                "adam_bc then misjudges. Leave it unset; per_sample_max_grad_norm is the norm that privacy needs."
            )

    def _check_optimizer(self) -> None:
        if self.adam_bc_floor is not None and self.base_optimizer != "adam_bc":
            raise ValueError(
                f"adam_bc_floor={self.adam_bc_floor} is without effect for base_optimizer={self.base_optimizer!r}; leave "
                "it out or use adam_bc."
            )
        if self.adam_bc_floor is not None and not 0.0 < self.adam_bc_floor < math.inf:
            raise ValueError(f"adam_bc_floor must be a finite number > 0, got {self.adam_bc_floor}.")
        if self.optim != OptimizerNames(type(self).__dataclass_fields__["optim"].default):
            name = OptimizerNames(self.optim).value
            galore = "; optim_target_modules, with optim_args, is what switches GaLore on" if "galore" in name else ""
            raise ValueError(
                f"optim={name!r} is without effect: DopplerTrainer builds its optimizer from base_optimizer and "
                f"low_pass_filter. Leave optim out{galore}."
            )
        if self.adam_beta1 != 0.9:
            raise ValueError(
                f"adam_beta1={self.adam_beta1} is without effect: the first moment is the filter's. Use low_pass_filter="
                f"'b={1 - self.adam_beta1:.6g};a=1,{-self.adam_beta1:.6g}' instead."
            )

    def _check_galore(self) -> None:
        if self.optim_target_modules is None:
            if self.optim_args:
                raise ValueError(
                    f"optim_args={self.optim_args!r} is without effect: it is about GaLore, which optim_target_modules "
                    "switches on. Set that, e.g. to 'all-linear', or leave optim_args out."
                )
            return
        check_target_modules(self.optim_target_modules)
        galore = GaloreArguments.parse(self.optim_args)
        if galore.projector_source == "filtered" and self.low_pass_filter == "none":
            raise ValueError(
                "optim_args has projector_source=filtered, which is without effect for low_pass_filter='none': the "
                "filtered gradient is the gradient itself. Leave it out, or set a filter."
            )
        if galore.basis_change != "rotate" and self.low_pass_filter == "none" and self.base_optimizer == "sgd":
            raise ValueError(
                f"optim_args has basis_change={galore.basis_change}, which is without effect for base_optimizer='sgd' and "
                "low_pass_filter='none': they keep no state that a new basis could change. Leave it out."
            )

    def _refuse_what_breaks_privacy(self) -> None:
        refusals = (
            (self.fp16, "fp16", "its gradient scaler skips steps depending on the data; use bf16"),
            (
                self.n_gpu > 1,
                "nn.DataParallel",
                "it splits the batch behind the engine's back; start with `accelerate launch`",
            ),
            (bool(self.deepspeed), "deepspeed", "it keeps the gradients to itself; use plain multi-process training"),
            (bool(self.fsdp), "fsdp", "it shards the parameters that per-sample clipping needs whole"),
            (self.parallelism_config is not None, "parallelism_config", "one process must see an example whole"),
            (self.torch_compile, "torch_compile", "per-sample gradient hooks do not survive compilation"),
            (self.use_liger_kernel, "use_liger_kernel", "its fused layers have no per-sample gradients"),
            (
                self.train_sampling_strategy != "random",
                f"train_sampling_strategy={self.train_sampling_strategy!r}",
                "the accountant assumes Poisson sampling; draws are sorted by length anyway",
            ),
            (
                self.label_smoothing_factor != 0,
                "label_smoothing_factor",
                "HF's smoother averages over the batch's tokens",
            ),
            (
                self.neftune_noise_alpha is not None,
                "neftune_noise_alpha",
                "it hooks the embeddings of the whole batch",
            ),
            (self.dataloader_drop_last, "dataloader_drop_last", "a Poisson draw has no last batch"),
            (self.auto_find_batch_size, "auto_find_batch_size", "it repeats steps whose outcome depends on the data"),
            (
                self.torch_empty_cache_steps is not None,
                "torch_empty_cache_steps",
                "the private step does not implement it",
            ),
            (
                self.include_num_input_tokens_seen != "no",
                "include_num_input_tokens_seen",
                "the number of tokens drawn depends on the data and would be logged without noise",
            ),
            (self.ignore_data_skip, "ignore_data_skip", "it makes the steps run differ from the steps planned"),
        )
        for refused, name, reason in refusals:
            if refused:
                raise ValueError(f"{name} cannot be used with differential privacy: {reason}.")
