"""`DopplerTrainingArguments`: Transformers' `TrainingArguments`, plus arguments for privacy and the filter.

Names for privacy follow Opacus and dp-transformers; other names follow torch and Transformers. `checks` refuses arguments
that would break the guarantee or have no effect.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal

from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from doppler_hf.deprecated import with_earlier_arguments
from doppler_hf.errors import Refusal, page
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.filters.grammar import AUTO
from doppler_hf.privacy.accounting.accounting import Sampling
from doppler_hf.privacy.clipping.clipped_gradients import Clipping, Engine, Granularity
from doppler_hf.training_args import checks, galore

# The arguments with which a `DopplerTrainer` is being made. This is not a field of the arguments, because copies of the
# arguments would get it too.
_BEING_USED: Final = ContextVar[object]("_BEING_USED", default=None)
# The arguments of the current run, and the values that trackers get in addition. The values are not fields, so that the
# arguments stay as they were given.
_SHOWN: Final = ContextVar[tuple[object, Mapping[str, Any]]]("_SHOWN", default=(None, {}))


@contextlib.contextmanager
def allow_private_arguments(args: object) -> Iterator[None]:
    """Allow a trainer to be made with private arguments inside the block; outside of it, they refuse to be used."""
    token = _BEING_USED.set(args)
    try:
        yield
    finally:
        _BEING_USED.reset(token)


@contextlib.contextmanager
def shown_with(args: object, terms: Mapping[str, Any]) -> Iterator[None]:
    """Add the terms of a run, which may still change, to the arguments that trackers receive inside the block."""
    token = _SHOWN.set((args, terms))
    try:
        yield
    finally:
        _SHOWN.reset(token)


def _is_helper(maker: FrameType) -> bool:
    """Return whether a trainer that is being made by this frame of `Trainer.__init__` belongs to a run and cannot train."""
    return _SHOWN.get()[0] is not None and maker.f_locals.get("train_dataset", maker) is None


class UnsetValue(float):
    """The default of an argument that was left out. A copy of the arguments (`dataclasses.replace`) chooses it again."""


@with_earlier_arguments
@checks.with_known_arguments
@dataclass
class DopplerTrainingArguments(TrainingArguments):
    """Arguments of `DopplerTrainer`.

    Set exactly one of `target_epsilon` and `noise_multiplier`, unless `disable_dp` is set. The batch size of the guarantee
    is per_device_train_batch_size × gradient_accumulation_steps × processes. It is the *expected* size of a random batch, in
    records, or with `privacy_unit_column` in users.

    Raises:
        ValueError: If a value is out of range, or a combination breaks privacy or would have no effect. The message names
            the value and says what to do.

    Example:
        >>> args = DopplerTrainingArguments(output_dir="out", target_epsilon=3.0, low_pass_filter="first-order-v1")
    """

    target_epsilon: float | None = HfArg(
        default=None, help="ε at the end of training. The noise multiplier is computed from it."
    )
    noise_multiplier: float | None = HfArg(
        default=None,
        help="σ, the standard deviation of the noise in units of the clip norm, instead of target_epsilon. With 0, "
        "sampling, clipping, filter and optimizer stay, but there is no noise: the run is then not private.",
    )
    target_delta: float | None = HfArg(
        default=None, help="δ of the guarantee. Default: N^-1.1 for N training records (or users)."
    )
    allow_large_delta: bool = HfArg(
        default=False,
        help="Allow a target_delta of 1/N or more, for studies. The run is then not private and says so.",
    )
    per_sample_max_grad_norm: float = HfArg(default=1.0, help="C, the norm to which each per-sample gradient is clipped.")
    privacy_unit_column: str | None = HfArg(
        default=None,
        help="Column of the training set with the user ID. ε then covers all records of a user together, and batch sizes "
        "count users. Default: ε covers one record.",
    )
    max_examples_per_unit: int | None = HfArg(
        default=None,
        help="With privacy_unit_column, the largest number of records of one user in a step, chosen at random. Default: no "
        "limit.",
    )
    clip_unit_mean: bool = HfArg(
        default=True,
        help="With privacy_unit_column, average the gradients of a user's records and clip the mean, instead of averaging "
        "clipped gradients. All records of a user in a step must fit into memory together.",
    )
    metrics_per_user: bool = HfArg(
        default=False,
        help="With privacy_unit_column, also report each metric of compute_metrics as the mean over the users of "
        "eval_dataset, by its name with _per_user. Metrics count rows otherwise, while training counts users.",
    )
    clipping: Clipping = HfArg(
        default="automatic",
        help="automatic: scale every per-sample gradient to norm C; in a classifier also multiply it by min(1, 2(1 - p)), "
        "with p the probability of the correct class. vanilla: shorten only gradients with a norm above C.",
    )
    clipping_granularity: Granularity = HfArg(
        default="flat",
        help="flat: one norm over all trainable parameters; per_layer: each of L layers is clipped to C/√L. With automatic "
        "clipping, gradients below the norm 0.01 are not scaled to the full clip norm. With per_layer this holds for each "
        "layer, so layers with small gradients learn less than others.",
    )
    augmentation_multiplicity: int = HfArg(
        default=1,
        help="K, the number of views of each record in a step, made by a random transform or collator. The mean gradient of "
        "the views is clipped, so ε stays the same. Batch sizes count records; memory and time grow K-fold.",
    )
    grad_sample_engine: Engine = HfArg(
        default="book_keeping",
        help="How per-sample gradients are computed: book_keeping, or opacus, a slow reference.",
    )
    grad_sample_self_check: bool = HfArg(
        default=True,
        help="Before the first step, compute losses and per-sample gradients of a few records together and one by one. Stop "
        "if they differ, or if the loss does not reach a trained parameter.",
    )
    train_unreached_parameters: bool = HfArg(
        default=False, help="Also train parameters that the loss does not reach. Only noise moves them."
    )
    rehearse: bool = HfArg(
        default=True,
        help="Before any ε is spent, evaluate two rows of each evaluation set, also if only trainer.evaluate() will use it, "
        "and save the model without weights. Errors then cost no ε. Takes 0.3 s for RoBERTa-base. Without it, any learning "
        "rate is allowed too.",
    )
    allow_any_learning_rate: bool = HfArg(
        default=False,
        help="Allow a learning rate that differs by a factor of a hundred from the automatic value, or a warmup longer than "
        "the run. Otherwise both are refused, since the run would spend its ε without learning.",
    )
    max_tokens_per_micro_batch: int | None = HfArg(
        default=None,
        help="Largest number of padded tokens (rows × longest length) in one micro-batch, before the collator rounds "
        "lengths up (pad_to_multiple_of). Default, where lengths are known: on a GPU what an ordinary step of "
        "per_device_train_batch_size rows needs, on a CPU at most what fits its cache.",
    )
    sampling: Sampling = HfArg(
        default="allocation",
        help="allocation: in each round of about one epoch, every record joins at most one batch, which is kept secret. "
        "poisson: each step draws every record with probability B/N. Poisson sampling needs more noise, which is white; "
        "use it to compare with other libraries.",
    )
    noise_shape: str = HfArg(
        default="auto",
        help="Noise over the steps. white: independent in each step. banded:bands=4: each step cancels part of the noise of "
        "the three steps before, and bands - 1 gradients stay in memory. auto: the shape with the smallest expected loss "
        "within 2 GiB; white with noise_multiplier, GaLore or Poisson sampling.",
    )
    low_pass_filter: str = HfArg(
        default="auto",
        help="Low-pass filter over the private gradients of successive steps. It costs no ε. One of none, momentum, "
        "first-order-v1, first-order-v2, second-order, f1 … f6; a design such as butterworth:order=2,cutoff=0.1; "
        "coefficients such as 'b=0.1,0.1;a=1,-0.8'; or auto, which is none for Adam with white noise.",
    )
    base_optimizer: Literal["sgd", "adam", "adam_bc", "muon"] = HfArg(
        default="adam_bc",
        help="The optimizer of the filtered gradient: sgd, adam, adam_bc (Adam with a second moment that is corrected for "
        "the noise), or muon (adam_bc with orthogonalized updates of matrices, for training from scratch).",
    )
    adam_bc_floor: float | None = HfArg(
        default=None,
        help="Smallest corrected second moment of adam_bc, in units of the squared gradient. Default: a fraction of the "
        "variance of the noise.",
    )
    report_train_loss: Literal["raw", "private", "none"] = HfArg(
        default="private",
        help="private: clip each per-sample loss, add noise, and count the loss in ε. raw: show the training loss without "
        "noise, which is not private, on the console and in TensorBoard's files outside of output_dir; checkpoints, "
        "metrics, model card and other trackers do not get it. none: report no training loss.",
    )
    per_sample_max_loss: float | None = HfArg(
        default=None,
        help="With report_train_loss=private, the bound to which each per-sample loss is clipped. Default: twice the loss "
        "of an untrained model: 2 ln(num_labels) for a classifier, 2 ln(vocab_size) for a language model; 5 for a "
        f"regression and for losses of your own. See {page('guides/training-loss')} for the rule of each task.",
    )
    train_loss_budget: float = HfArg(
        default=0.01,
        help="With report_train_loss=private, the share of the privacy budget (of 1/σ²) that the loss takes from the "
        "gradient. A share of 0.01 raises the gradient's noise by half a percent.",
    )
    plot_training_curve: bool = HfArg(
        default=True,
        help="Draw evaluations and the private training loss over the steps, as training_curve.png in output_dir, at the "
        "end of a run. It is drawn only where matplotlib is installed, and never has a raw training loss.",
    )
    floating_point_safe: bool = HfArg(
        default=False,
        help="Make each noise value from four random values, as a defence against attacks on the gaps between "
        "floating-point numbers (Mironov 2012).",
    )
    disable_dp: bool = HfArg(
        default=False, help="Train with the stock Trainer, optimizer and sampler: the non-private baseline."
    )
    noise_seed: int | None = HfArg(
        default=None, help="For tests only: makes noise and batches reproducible. The run is then not private."
    )
    learning_rate: float | None = HfArg(
        default=None,
        help="Initial learning rate. Default with Adam or Muon: chosen from the number of weights, steps and schedule. "
        "Default with disable_dp: Trainer's 5e-5. Must be set for base_optimizer=sgd and GaLore.",
    )
    max_grad_norm: float | None = HfArg(
        default=None,
        help="Clipping of the whole gradient, with disable_dp only. Default: Trainer's 1.0. In a private run, set "
        "per_sample_max_grad_norm instead.",
    )
    logging_nan_inf_filter: bool | None = HfArg(
        default=None,
        help="As in TrainingArguments. Default: on with report_train_loss=raw and with disable_dp. A private training loss "
        "is always finite, and each test of it waits for the device.",
    )
    non_private_learning_rate = TrainingArguments.learning_rate

    @property
    def place_model_on_device(self) -> bool | None:
        """As in `TrainingArguments`; refuses a trainer that would ignore these private arguments.

        Only `Trainer.__init__` reads this property, and Transformers lets subclasses override it, so it can tell which
        trainer gets the arguments. During a run, callbacks such as those for Weights & Biases and DVCLive may make a helper
        trainer that only saves the model.
        """
        if not self.disable_dp and _BEING_USED.get() is not self and not _is_helper(sys._getframe(1)):
            raise Refusal(
                "stock-trainer",
                f"{type(self).__name__} was passed to a trainer that trains without privacy, such as Trainer or SFTTrainer. "
                "Use DopplerTrainer, DopplerSFTTrainer or DopplerDPOTrainer. To train without privacy, use the same trainer "
                "with disable_dp=True, and leave out target_epsilon and noise_multiplier.",
            )
        return super().place_model_on_device

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments; during a run, also its terms and the learning rate that it chose, for trackers."""
        shown, terms = _SHOWN.get()
        given = {name: float(value) if type(value) is UnsetValue else value for name, value in super().to_dict().items()}
        if shown is not self:
            return given
        used = {name: value for name, value in given.items() if name not in checks.unused(self)}
        return {**used, **terms}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        why = "the defaults of {other}, such as those of max_grad_norm and learning_rate, would replace the private ones"
        checks.refuse_bases_in_front(cls, ours=DopplerTrainingArguments, stock=TrainingArguments, why=why)

    def __post_init__(self) -> None:
        """Check the arguments, as Transformers checks its own."""
        checks.check_kinds(self, base=DopplerTrainingArguments)
        self._fill_in()
        if not self.disable_dp:
            # Transformers may refuse the same arguments with an error that does not lead to a private run, such as the
            # missing package of `deepspeed`.
            checks.check_ranges(self)
            checks.refuse_launcher(self)
            checks.refuse_arguments(self)
        with checks.undo_settings_without_effect(self):
            super().__post_init__()
        # The `check` of a subclass cannot be called here, because the subclass's own __post_init__ has not finished.
        DopplerTrainingArguments.check(self)

    def _fill_in(self) -> None:
        """Choose values for arguments that were left out, and write filter and noise shape in their standard form."""
        if self.max_grad_norm is None or type(self.max_grad_norm) is UnsetValue:
            # Trainer would clip the whole private gradient, and so rescale it together with its noise.
            self.max_grad_norm = UnsetValue(1.0 if self.disable_dp else 0.0)
        if self.learning_rate is None or type(self.learning_rate) is UnsetValue:
            self.learning_rate = UnsetValue(self.non_private_learning_rate) if self.disable_dp else None
        if self.logging_nan_inf_filter is None:
            self.logging_nan_inf_filter = self.disable_dp or self.report_train_loss == "raw"
        if self.noise_shape != "auto":
            self.noise_shape = str(NoiseShape.parse(self.noise_shape))
        if self.low_pass_filter != AUTO:
            self.low_pass_filter = str(LowPassFilter.parse(self.low_pass_filter))

    def check(self) -> None:
        """Check the arguments again, since they may have been changed after they were made.

        Raises:
            ValueError: If `DopplerTrainingArguments` would refuse these values.
        """
        checks.check_kinds(self, base=DopplerTrainingArguments)
        checks.refuse_file_as_folder(self)
        self._fill_in()
        if self.disable_dp:
            checks.refuse_privacy_without_dp(self, base=DopplerTrainingArguments)
        else:
            checks.check_ranges(self)
            checks.refuse_launcher(self)
            checks.refuse_arguments(self)
            checks.refuse_shaped_noise_with_poisson(self)
            galore.check_galore(self)
            checks.refuse_no_learning_rate(self)
            checks.refuse_devices(self)
