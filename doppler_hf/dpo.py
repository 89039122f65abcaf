"""`DopplerDPOTrainer`: TRL's `DPOTrainer`, on top of `DopplerTrainer` in place of `Trainer`.

TRL prepares the data row by row, computes the log-probabilities of each pair under the frozen reference model once, and
evaluates. The loss is computed in `privacy.pair_losses`. One pair of answers is one record. It becomes two rows of the
model's input, with one gradient that is clipped as a whole.
"""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn
from transformers.hf_argparser import HfArg
from trl import DPOConfig, DPOTrainer

from doppler_hf import trl_checks
from doppler_hf.deprecated import with_earlier_arguments
from doppler_hf.errors import Refusal
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.privacy.loss_bounds import LossBound
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.privacy.pair_losses import (
    PAIR_LOSSES,
    REFERENCES,
    WITHOUT_REFERENCE,
    PairTerms,
    collate_pairs,
    lengths_of_answers,
    log_ratios,
    loss_of_untrained,
    pair_losses,
    references_of,
    side_by_side,
)
from doppler_hf.run.own_code import overrides
from doppler_hf.run.saving.saving import with_privacy_section
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments, checks

# Names of columns of prompts in public data sets of preferences, none of which TRL reads.
_LIKE_PROMPTS: Final = ("question", "instruction", "input", "query", "problem", "prompts")
_ANSWERS: Final = ("chosen_ids", "rejected_ids")  # TRL's columns
_OF_ANOTHER: Final = "it belongs to an option that a private run cannot have"
_NOT_PRIVATE: Final = {
    "sync_ref_model": "the log-probabilities under the reference model are computed once, before training",
    "use_weighting": "the loss of a pair can depend on its two log-ratios only",
    "ld_alpha": "the log-probability of an answer is always the sum over all its tokens",
    "f_divergence_type": "the loss of a pair can depend on its two log-ratios only",
    "f_alpha_divergence_coef": _OF_ANOTHER,
    "ref_model_mixup_alpha": _OF_ANOTHER,
    "ref_model_sync_steps": _OF_ANOTHER,
    **trl_checks.NOT_PRIVATE,
}
# Argument → the losses that read it.
_OF_LOSSES: Final = {"label_smoothing": ("robust", "exo_pair"), "discopop_tau": ("discopop",), "simpo_gamma": ("simpo",)}


# TRL's class is the first base class, so that its defaults hold and its `super()` calls reach ours.
@with_earlier_arguments
@checks.with_known_arguments
@dataclass
class DopplerDPOConfig(DPOConfig, DopplerTrainingArguments):
    """Arguments of `DopplerDPOTrainer`: `DPOConfig` with its defaults, plus `DopplerTrainingArguments`."""

    learning_rate: float | None = HfArg(
        default=None, help="As in DopplerTrainingArguments, but with disable_dp the default is TRL's 1e-6."
    )
    max_grad_norm: float | None = HfArg(default=None, help="As in DopplerTrainingArguments.")
    precompute_ref_log_probs: bool | None = HfArg(
        default=None,
        help="Whether to compute the log-probabilities under the reference model once, before training. Always true with "
        "privacy. With disable_dp the default is TRL's False.",
    )
    simpo_gamma: float = HfArg(default=0.5, help="The margin γ of loss_type='simpo', which is β times the paper's γ/β.")
    non_private_learning_rate = DPOConfig.learning_rate

    def __post_init__(self) -> None:
        """Check the arguments, as TRL and `DopplerTrainingArguments` do."""
        super().__post_init__()
        if self.precompute_ref_log_probs is None:
            self.precompute_ref_log_probs = not self.disable_dp
        self._check_further()

    def check(self) -> None:
        """Check the arguments again, as `DopplerTrainingArguments` does."""
        super().check()
        self._check_further()

    def _check_further(self) -> None:
        if self.disable_dp:
            return
        trl_checks.refuse_arguments(self, _NOT_PRIVATE)
        if not self.precompute_ref_log_probs:
            raise Refusal(
                "reference-in-batches",
                "precompute_ref_log_probs=False cannot be used with differential privacy: the log-probabilities under the "
                "reference model are computed before training, for one pair at a time. Leave precompute_ref_log_probs out.",
            )
        others = [kind for kind in self.loss_type if kind not in PAIR_LOSSES]
        if others or not self.loss_type:
            raise Refusal(
                "loss-of-the-batch",
                f"A private run supports the loss_type {', '.join(PAIR_LOSSES)}; got {', '.join(others) or 'none'}. TRL's "
                "other losses depend on a whole batch, so no pair has its own loss that could be clipped. Set one or "
                "several of the supported losses.",
            )
        if not self.beta > 0:
            raise Refusal("out-of-range", f"beta must be positive; got {self.beta}. A usual value is 0.1.")
        if not 0 <= self.label_smoothing < 0.5:
            raise Refusal(
                "out-of-range",
                f"label_smoothing must be in [0, 0.5); got {self.label_smoothing}. A usual value is 0.1.",
            )
        for name, readers in _OF_LOSSES.items():
            value = getattr(self, name)
            if value != checks.default_of(self, name) and {*readers}.isdisjoint(self.loss_type):
                raise Refusal(
                    "no-effect",
                    f"{name}={value} has no effect with loss_type={self.loss_type}. Set {readers[0]!r}, or leave it out.",
                )


class DopplerDPOTrainer(DPOTrainer, DopplerTrainer):
    """`DPOTrainer` with differential privacy: the same data sets, chat templates, references, adapters and arguments.

    With `args.disable_dp` every method is TRL's. The arguments and their order are those of `DPOTrainer`. `ref_model`
    defaults to a copy of the model as it is given, or to its base without adapters. `train_dataset` must have a length.

    Raises:
        ValueError: If something would break the guarantee, as in `DopplerTrainer`; also for images, for a data set in
            memory with several processes, and for a loss that balances experts.

    Example:
        >>> args = DopplerDPOConfig(output_dir="out", target_epsilon=8.0, beta=0.1)
        >>> trainer = DopplerDPOTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
    """

    args: DopplerDPOConfig
    loss_types: list[str]
    create_model_card = with_privacy_section(DPOTrainer.create_model_card)
    rows_per_loss = len(_ANSWERS)
    _of_other_trainers = WITHOUT_REFERENCE - {"sft"}

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DopplerDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *others: Any,
        **options: Any,
    ) -> None:
        evaluated = others[0] if others else options.get("eval_dataset")
        with trl_checks.private_init(self, args, DopplerDPOConfig, train_dataset=train_dataset, eval_dataset=evaluated):
            given = {"train_dataset": train_dataset, "eval_dataset": evaluated}
            _refuse_without_answers(args, given)
            _warn_of_unread_prompts(args, given)
            super().__init__(model, ref_model, args, data_collator, train_dataset, *others, **options)

    # --- the data, and their log-probabilities under the reference model ----------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: DopplerDPOConfig, dataset_name: str) -> Any:
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if args.disable_dp or dataset_name != "train":
            return prepared
        # Random batches are sorted and cut into micro-batches by the lengths in this column.
        limits = (args.max_length,) if args.truncation_mode == "keep_start" else (-(args.max_length or 0), None)
        return prepared.map(with_tokens, fn_kwargs={"limits": limits})

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if LENGTH_COLUMN not in self._signature_columns:
            self._signature_columns.append(LENGTH_COLUMN)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if self.args.disable_dp:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        if WITHOUT_REFERENCE.issuperset(self.loss_types):
            return dataset.map(lambda row: dict.fromkeys(REFERENCES, 0.0))
        if self.args.world_size > 1 and not dataset.cache_files:
            raise Refusal(
                "data-in-memory",
                f"The {name} data set is in memory, and {self.args.world_size} processes need it in files, because TRL "
                "passes the log-probabilities under the reference model to the other processes in a file next to it. Save "
                "it with save_to_disk(), and load it with load_from_disk().",
            )
        model = self.ref_model or self.model
        with modes_kept(model):
            model.eval()  # The reference model has no dropout.
            # Sensitivity: a pair of the training set is computed alone. In a batch, its padding and rounding would depend
            # on the other pairs, and one pair more would shift all later pairs. TRL keeps the results in a file that is
            # named after model and data; these data have a column that the data of other runs do not have.
            return super()._precompute_ref_logps(dataset, name, 1 if name == "train" else batch_size)

    # --- left of the privacy boundary ---------------------------------------------------------------------------------

    def _training_collator(self) -> Collator:
        return functools.partial(collate_pairs, collator=self.data_collator)

    def compute_per_sample_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Float[Tensor, " pairs"]:
        """Return the loss of each pair, shape (pairs,); see `privacy.pair_losses`."""
        return pair_losses(
            log_ratios(model, inputs), references_of(inputs), lengths_of_answers(inputs), **self._weights_and_terms
        )

    @property
    def _weights_and_terms(self) -> dict[str, Any]:
        weights = list(zip(self.loss_types, self.loss_weights, strict=True))
        terms = PairTerms(self.beta, self.label_smoothing, self.args.discopop_tau, self.args.simpo_gamma)
        return {"weights": weights, "terms": terms}

    def _loss_bound(self) -> LossBound:
        if overrides(self, "compute_per_sample_loss"):
            return LossBound.guessed()
        vocabulary = without_adapters(self.model).config.get_text_config(decoder=True).vocab_size
        loss = loss_of_untrained(vocabulary=vocabulary, **self._weights_and_terms)
        # With negative weights, the sum of the losses may be 0 or negative.
        return LossBound.twice(loss, f"{loss:.3g} (a pair before training)") if loss > 0 else LossBound.guessed()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, but without figures of training batches, which have no noise."""
        trl_checks.without_training_figures(self)
        super().log(logs, start_time)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch during evaluation, with TRL's figures.

        For losses that TRL's DPOTrainer does not have, TRL computes the figures with another loss, which is then replaced.
        """
        if self.args.disable_dp or not self._of_other_trainers.intersection(self.loss_types):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        own, self.loss_types = self.loss_types, ["sigmoid"] * len(self.loss_types)
        try:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.loss_types = own
        loss = self.compute_per_sample_loss(model, side_by_side(inputs)).mean()
        return (loss, found[1]) if return_outputs else loss


def _refuse_without_answers(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse data sets without the two columns of answers that TRL reads."""
    if args.disable_dp:
        return
    for name, _, columns in trl_checks.columns_of(given):
        if missing := [column for column in ("chosen", "rejected") if column not in columns]:
            raise Refusal(
                "no-answers",
                f"{name} has no column {' and no column '.join(map(repr, missing))}; it has the columns "
                f"{', '.join(columns)}. Rename the column of the better answers to 'chosen', and that of the worse answers "
                "to 'rejected'.",
            )


def _warn_of_unread_prompts(args: Any, given: Mapping[str, Any]) -> None:
    """Warn of columns that look like prompts where TRL takes the common beginning of both answers for the prompt."""
    if args.disable_dp or args.process_index > 0:
        return
    for name, data_set, columns in trl_checks.columns_of(given):
        unread = [column for column in columns if column in _LIKE_PROMPTS]
        if "prompt" in columns or not unread:
            continue
        row: dict[str, Any] = next(iter(data_set), {})
        first = row.get("chosen")
        # A conversation that the user begins has its prompt in it.
        if isinstance(first, list) and first and first[0].get("role") != "assistant":
            continue
        warnings.warn(
            f"{name} has no column 'prompt', so TRL takes the words with which both answers begin for the prompt, and does "
            f"not read {', '.join(map(repr, unread))}. If the prompts are there, make a column 'prompt' of them, as with "
            f"rename_column({unread[0]!r}, 'prompt'). If the answers begin with their prompts, remove the unread column.",
            stacklevel=4,
        )


def with_tokens(row: dict[str, Any], *, limits: tuple[int | None, ...]) -> dict[str, Any]:
    """Return the tokens of a pair: the prompt and each answer, cut to these limits as TRL's collator does."""
    return {LENGTH_COLUMN: [(row["prompt_ids"] + row[answer])[slice(*limits)] for answer in _ANSWERS]}
