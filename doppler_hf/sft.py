"""`DopplerSFTTrainer`: TRL's `SFTTrainer`, whose host is `DopplerTrainer` in place of `Trainer`.

TRL prepares the data, a row at a time, and evaluates; its own loss, a mean over the tokens of a batch, and its counts of
tokens and hits are of evaluations only. What is trained is the rule of `privacy.losses`: an example's loss is the mean over
its own labelled tokens, those of the completion, of the assistant's turns, or all. One row is one example.
"""

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from transformers.hf_argparser import HfArg
from trl import SFTConfig, SFTTrainer

from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments, checks

# TRL's argument → the reason why a private run cannot have it.
_NOT_PRIVATE: Final = {
    "packing": "a row would hold several texts, and a text could lie in two rows, so that ε would not be for one text",
    "padding_free": "it joins the texts of a batch to one row, of which no text can be clipped by itself",
    "loss_type": "an example's loss is the mean negative log-likelihood of its own tokens",
    "activation_offloading": "it brings activations back once, and the engine of per-sample gradients asks for them again",
}
_SELECTIVE: Final = "selective"  # TRL's own key of `gradient_checkpointing_kwargs`


def without_piece(record: logging.LogRecord) -> bool:
    """Leave the piece of an example out of TRL's warning that a prompt is no beginning of its row (modified in place)."""
    record.msg = re.sub(r"(training sequence): .*(\. The model is trained)", r"\1\2", str(record.msg), flags=re.DOTALL)
    return True


@contextlib.contextmanager
def pieces_left_out() -> Iterator[None]:
    """Let TRL's log show no piece of an example in the block, in which it prepares the data."""
    logger = logging.getLogger(SFTTrainer.__module__)
    # Privacy: it shows the end of every such prompt that differs from those before.
    logger.addFilter(without_piece)
    try:
        yield
    finally:
        logger.removeFilter(without_piece)


# TRL's classes come first, for their defaults and so that their `super()` is ours.
@dataclass
class DopplerSFTConfig(SFTConfig, DopplerTrainingArguments):
    """Arguments of `DopplerSFTTrainer`: those of `SFTConfig` with its defaults, and of `DopplerTrainingArguments`.

    Raises:
        ValueError: If a value is out of range, or a combination breaks privacy or would have no effect.

    Example:
        >>> args = DopplerSFTConfig(output_dir="out", target_epsilon=8.0, max_length=512)
    """

    learning_rate: float | None = HfArg(
        default=None, help="As in DopplerTrainingArguments. With disable_dp, and with noise_multiplier=0, TRL's 2e-5."
    )
    max_grad_norm: float | None = HfArg(default=None, help="As in DopplerTrainingArguments.")
    host_learning_rate = SFTConfig.learning_rate

    def __post_init__(self) -> None:
        """Check the arguments, as TRL and `DopplerTrainingArguments` do."""
        super().__post_init__()
        if self.disable_dp:
            return
        checks.refuse_each(self, _NOT_PRIVATE)
        if (self.gradient_checkpointing_kwargs or {}).get(_SELECTIVE):
            raise ValueError(
                f"gradient_checkpointing_kwargs must not have {_SELECTIVE!r} with differential privacy, got "
                f"{self.gradient_checkpointing_kwargs}: what it keeps can be used once, and the engine of per-sample "
                "gradients asks for it again. Leave it out, which recomputes whole layers."
            )


class DopplerSFTTrainer(SFTTrainer, DopplerTrainer):
    """`SFTTrainer` with differential privacy: the same data sets, chat templates, adapters and arguments.

    With `args.disable_dp` every method is the stock one.

    Args:
        model: As in `SFTTrainer`; so are the others, in its order.
        args: `DopplerSFTConfig`.

    Raises:
        ValueError: If something would break the guarantee, as in `DopplerTrainer`; or the data set has images, or the model
            a loss that balances its experts.

    Example:
        >>> trainer = DopplerSFTTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
        >>> trainer.train()
    """

    args: DopplerSFTConfig
    host_compute_loss = SFTTrainer.compute_loss

    def __init__(self, model: Any, args: DopplerSFTConfig | None = None, *others: Any, **options: Any) -> None:
        # TRL would make an `SFTConfig` of whatever else it is given.
        if not isinstance(args, DopplerSFTConfig):
            raise ValueError(f"args must be DopplerSFTConfig, got {type(args).__name__}. Make one with target_epsilon.")
        with contextlib.nullcontext() if args.disable_dp else pieces_left_out():
            super().__init__(model, args, *others, **options)
        if args.disable_dp:
            return
        if self._is_vision_dataset:
            raise ValueError(
                "train_dataset must be of texts in a private run, got a column of images, whose patches models join over "
                "the batch. Leave it out, or train a classifier of images with DopplerTrainer."
            )
        if self.aux_loss_enabled:
            raise ValueError(
                "The balancing loss of a router must be off with differential privacy, got router_aux_loss_coef="
                f"{self.router_aux_loss_coef}: it is one number for the whole batch and cannot be split into examples. Set "
                "router_aux_loss_coef=0.0."
            )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, which replaces the host's, with a section on privacy."""
        super().create_model_card(*args, **kwargs)
        self._complete_model_card()
