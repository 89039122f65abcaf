"""`DopplerTrainingArguments`: Transformers' `TrainingArguments`, plus privacy and filter.

Names for privacy follow Opacus and dp-transformers; others follow torch and Transformers. `checks` refuses arguments that
would break the guarantee or have no effect.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal

from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from doppler_hf.deprecated import with_earlier_arguments
from doppler_hf.errors import Refusal
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.filters.grammar import AUTO
from doppler_hf.privacy.accounting.accounting import Sampling
from doppler_hf.privacy.clipping.clipped_gradients import Clipping, Engine, Granularity
from doppler_hf.training_args import checks, galore

# The arguments with which a `DopplerTrainer` is being made. Not a field of the arguments, which copies would take along.
_BEING_USED: Final = ContextVar[object]("_BEING_USED", default=None)
# The arguments of the run that is training, and what trackers get beside them: no fields, arguments stay as they were given.
_SHOWN: Final = ContextVar[tuple[object, Mapping[str, Any]]]("_SHOWN", default=(None, {}))


@contextlib.contextmanager
def used_by_a_private_trainer(args: object) -> Iterator[None]:
    """Let a trainer be made with private arguments in the block; outside of it they refuse that."""
    token = _BEING_USED.set(args)
    try:
        yield
    finally:
        _BEING_USED.reset(token)


@contextlib.contextmanager
def shown_with(args: object, terms: Mapping[str, Any]) -> Iterator[None]:
    """Add the terms of a run, which may still change, to what trackers receive of its arguments in the block."""
    token = _SHOWN.set((args, terms))
    try:
        yield
    finally:
        _SHOWN.reset(token)


class LeftOut(float):
    """A number for an argument that was left out. A copy, as by `dataclasses.replace`, chooses it again."""


@with_earlier_arguments
@dataclass
class DopplerTrainingArguments(TrainingArguments):
    """Arguments of `DopplerTrainer`.

    Exactly one of `target_epsilon` and `noise_multiplier` sets the privacy, unless `disable_dp` is set. The batch size of
    the guarantee is per_device_train_batch_size × gradient_accumulation_steps × processes. It is the *expected* size of one
    random batch: in examples, or with `privacy_unit_column` in users.

    Raises:
        ValueError: If a value is out of range, or a combination breaks privacy or would have no effect. The message has
            the value and what to do instead.

    Example:
        >>> args = DopplerTrainingArguments(output_dir="out", target_epsilon=3.0, low_pass_filter="first-order-v1")
    """

    target_epsilon: float | None = HfArg(
        default=None, help="ε at the end of training. The noise multiplier is computed from it."
    )
    noise_multiplier: float | None = HfArg(
        default=None,
        help="σ, the noise's standard deviation in units of the clip norm, instead of target_epsilon. 0 keeps sampling, "
        "clipping, filter and optimizer but adds no noise: the run is then not private.",
    )
    target_delta: float | None = HfArg(default=None, help="δ of the guarantee. Default: N^-1.1 for N training examples.")
    allow_large_delta: bool = HfArg(
        default=False,
        help="Allow a target_delta of 1/N or more, for studies. The run is then not private and says so.",
    )
    per_sample_max_grad_norm: float = HfArg(default=1.0, help="C, the norm to which each example's gradient is clipped.")
    privacy_unit_column: str | None = HfArg(
        default=None,
        help="Column of the training set with the user ID. ε then covers all of a user's examples together, and batch sizes "
        "count users. Default: ε covers one example.",
    )
    max_examples_per_unit: int | None = HfArg(
        default=None,
        help="With privacy_unit_column, the largest number of a user's examples in a step, chosen at random. Default: no "
        "limit.",
    )
    clip_unit_mean: bool = HfArg(
        default=True,
        help="With privacy_unit_column, clip the mean gradient of a user's examples once, instead of averaging clipped "
        "gradients. All of a user's examples in a step must fit into memory together.",
    )
    clipping: Clipping = HfArg(
        default="automatic",
        help="automatic: scale every example's gradient to C, in a classifier times min(1, 2(1 - p)) with p the probability "
        "of its class. vanilla: shorten only gradients above C.",
    )
    clipping_granularity: Granularity = HfArg(
        default="flat", help="flat: one norm over all trainable parameters; per_layer: each of L layers is clipped to C/√L."
    )
    augmentation_multiplicity: int = HfArg(
        default=1,
        help="K, the number of views of an example in a step, made by a random transform or collator. Their mean gradient "
        "is clipped, so ε stays the same. Batch sizes count examples; memory and time grow K-fold.",
    )
    grad_sample_engine: Engine = HfArg(
        default="book_keeping",
        help="How per-sample gradients are computed: book_keeping, or opacus, a slow reference.",
    )
    grad_sample_self_check: bool = HfArg(
        default=True,
        help="Before the first step, compare losses and per-sample gradients of a few examples together and alone. Stop if "
        "they differ, or if no loss reaches a trained parameter.",
    )
    train_unreached_parameters: bool = HfArg(
        default=False, help="Also train parameters that no loss reaches. Noise alone moves them."
    )
    rehearse: bool = HfArg(
        default=True,
        help="Before any ε is spent, evaluate two rows of each evaluation set, if the training will or there are "
        "compute_metrics, and save the model without weights. Errors then cost no ε. Takes 0.3 s for RoBERTa-base. Without "
        "it, any learning rate is allowed, too.",
    )
    allow_any_learning_rate: bool = HfArg(
        default=False,
        help="Train at a learning rate a hundredfold off the rule's, or with a warmup longer than the run. They are refused "
        "otherwise, since ε would buy nothing.",
    )
    max_tokens_per_micro_batch: int | None = HfArg(
        default=None,
        help="Largest number of padded tokens (rows × longest length) in one forward pass, before the collator rounds "
        "lengths up (pad_to_multiple_of). Default: no limit.",
    )
    sampling: Sampling = HfArg(
        default="allocation",
        help="allocation: a record joins at most one batch in about an epoch, in secret. poisson: each step draws every "
        "record with probability B/N. It needs more noise, which is white; take it to compare with other libraries.",
    )
    noise_shape: str = HfArg(
        default="auto",
        help="Noise over the steps. white: independent in each step. banded:bands=4: takes back part of the noise of the "
        "three steps before, and keeps bands - 1 gradients in memory. auto: the shape with the least expected loss "
        "within 2 GiB; white with noise_multiplier, GaLore or Poisson sampling.",
    )
    low_pass_filter: str = HfArg(
        default="auto",
        help="Filter over time on the private gradient. It costs no privacy. One of none, momentum, first-order-v1, "
        "first-order-v2, second-order, f1 … f6; a design such as butterworth:order=2,cutoff=0.1; coefficients such as "
        "'b=0.1,0.1;a=1,-0.8'; or auto, which is none for "
        "Adam with white noise.",
    )
    base_optimizer: Literal["sgd", "adam", "adam_bc", "muon"] = HfArg(
        default="adam_bc",
        help="The optimizer of the filtered gradient: sgd, adam, adam_bc (Adam whose second moment is corrected for the "
        "noise), or muon (adam_bc whose updates of matrices are orthogonalized, for training from scratch).",
    )
    adam_bc_floor: float | None = HfArg(
        default=None,
        help="Smallest corrected second moment of adam_bc, in squared gradient units. Default: a fraction of the "
        "noise's variance.",
    )
    report_train_loss: Literal["raw", "private", "none"] = HfArg(
        default="private",
        help="private: clip each example's loss, add noise, and count it in ε. raw: show the training loss as it is, which "
        "is not private, on the console and in TensorBoard's files outside of output_dir; checkpoints, metrics, model card "
        "and other trackers do not get it. none: no training loss at all.",
    )
    per_sample_max_loss: float | None = HfArg(
        default=None,
        help="With report_train_loss=private, the bound to which each example's loss is clipped. Default: twice the loss of "
        "a model that knows nothing: 2 ln(num_labels) for a classifier, 2 ln(vocab_size) for a language model; 5 for a "
        "regression and for other losses of your own. docs/guides/training-loss.md has the rule of each task.",
    )
    train_loss_budget: float = HfArg(
        default=0.01,
        help="With report_train_loss=private, the share of the privacy budget (of 1/σ²) that the loss takes from "
        "the gradient, whose noise a hundredth raises by half a percent.",
    )
    plot_training_curve: bool = HfArg(
        default=True,
        help="Draw evaluations and the private training loss over the steps, as training_curve.png in output_dir, at the "
        "end of a run. It is drawn only where matplotlib is installed, and never has a raw training loss.",
    )
    floating_point_safe: bool = HfArg(
        default=False,
        help="Make each noise value from four, against attacks on gaps between floating-point numbers (Mironov 2012).",
    )
    disable_dp: bool = HfArg(
        default=False, help="Train with the stock Trainer, optimizer and sampler: the non-private baseline."
    )
    noise_seed: int | None = HfArg(
        default=None, help="For tests only: makes noise and batches reproducible. The run is then not private."
    )
    learning_rate: float | None = HfArg(
        default=None,
        help="First learning rate. Default with Adam: chosen from the number of weights, steps and schedule. Default with "
        "disable_dp: Trainer's 5e-5. Must be set for base_optimizer=sgd and GaLore.",
    )
    max_grad_norm: float | None = HfArg(
        default=None,
        help="Clipping of the whole gradient, with disable_dp only. Default: Trainer's 1.0. With privacy set "
        "per_sample_max_grad_norm.",
    )
    non_private_learning_rate = TrainingArguments.learning_rate

    @property
    def place_model_on_device(self) -> bool | None:
        """As in `TrainingArguments`; refuses a trainer that is made with private arguments, but would not train privately.

        `Trainer` reads this property when it is made, and nothing else does: it is there to be overridden.
        """
        if not self.disable_dp and _BEING_USED.get() is not self:
            raise Refusal(
                "stock-trainer",
                f"{type(self).__name__} was passed to a trainer that trains without privacy, such as Trainer or SFTTrainer. "
                "Use DopplerTrainer, DopplerSFTTrainer or DopplerDPOTrainer. To train without privacy set disable_dp=True, "
                "and leave out target_epsilon and noise_multiplier.",
            )
        return super().place_model_on_device

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments; during a run also its terms, and the learning rate that it has chosen, for trackers."""
        shown, terms = _SHOWN.get()
        given = {name: float(value) if type(value) is LeftOut else value for name, value in super().to_dict().items()}
        return {**given, **(terms if shown is self else {})}

    def __post_init__(self) -> None:
        """Check the arguments, as Transformers checks its own."""
        checks.check_kinds(self, base=DopplerTrainingArguments)
        self._fill_in()
        super().__post_init__()
        DopplerTrainingArguments.check(self)  # a subclass has further checks, of what its own method has still to do

    def _fill_in(self) -> None:
        """Choose what was left out, and write filter and noise shape in one way."""
        if self.max_grad_norm is None or type(self.max_grad_norm) is LeftOut:
            # Trainer clips the whole gradient, and would rescale the private one together with its noise.
            self.max_grad_norm = LeftOut(1.0 if self.disable_dp else 0.0)
        if self.learning_rate is None or type(self.learning_rate) is LeftOut:
            self.learning_rate = LeftOut(self.non_private_learning_rate) if self.disable_dp else None
        if self.noise_shape != "auto":
            self.noise_shape = str(NoiseShape.parse(self.noise_shape))
        if self.low_pass_filter != AUTO:
            self.low_pass_filter = str(LowPassFilter.parse(self.low_pass_filter))

    def check(self) -> None:
        """Check the arguments, which may have been changed since they were made.

        Raises:
            ValueError: If `DopplerTrainingArguments` would refuse these values.
        """
        checks.check_kinds(self, base=DopplerTrainingArguments)
        self._fill_in()
        if self.disable_dp:
            checks.refuse_privacy_without_dp(self, base=DopplerTrainingArguments)
        else:
            checks.check_ranges(self)
            checks.refuse_without_effect(self)
            checks.refuse_optim(self)
            galore.check_galore(self)
            checks.refuse_no_learning_rate(self)
            checks.refuse_what_breaks_privacy(self)
