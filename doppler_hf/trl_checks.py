"""What our TRL trainers share: refusals, and a log without pieces of examples."""

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any, Final

from doppler_hf.run.checks.data import refuse_repeats
from doppler_hf.training_args import DopplerTrainingArguments, checks

# TRL's argument → the reason why a private run cannot have it.
NOT_PRIVATE: Final = {
    "padding_free": "it joins the texts of a batch to one row, so no text can be clipped alone",
    "activation_offloading": "it brings activations back once, and the engine of per-sample gradients asks for them again",
}
_SELECTIVE: Final = "selective"  # TRL's own key of `gradient_checkpointing_kwargs`


def refuse_arguments(args: DopplerTrainingArguments, reasons: dict[str, str]) -> None:
    """Refuse TRL's arguments that a private run cannot have, each with its reason."""
    checks.refuse_each(args, reasons)
    if (args.gradient_checkpointing_kwargs or {}).get(_SELECTIVE):
        raise ValueError(
            f"gradient_checkpointing_kwargs must not have {_SELECTIVE!r} with differential privacy, got "
            f"{args.gradient_checkpointing_kwargs}, whose tensors the engine would need twice. Leave it out."
        )


@contextlib.contextmanager
def made_privately(trainer: Any, args: Any, config: type, *, trainer_class: type, train_dataset: Any) -> Iterator[None]:
    """Make one of TRL's trainers in the block, if it can be private, and show no piece of an example."""
    if not isinstance(args, config):  # TRL would make its own of whatever else it is given.
        raise ValueError(f"args must be {config.__name__}, got {type(args).__name__}. Make one with target_epsilon.")
    assert isinstance(args, DopplerTrainingArguments)
    if args.disable_dp:
        yield
        return
    if not {"image", "images"}.isdisjoint(next(iter(train_dataset or ()), ())):  # as TRL finds them
        raise ValueError(
            "train_dataset must be of texts in a private run, got a column of images, whose patches models join over "
            "the batch. Leave it out, or train a classifier of images with DopplerTrainer."
        )
    # Sensitivity: before TRL writes the rows anew, by whose places repeats are found.
    refuse_repeats(args, train_dataset)
    logger = logging.getLogger(trainer_class.__module__)
    # Privacy: while it prepares the data, it shows the end of every prompt that differs from those before.
    logger.addFilter(without_piece)
    try:
        yield
    finally:
        logger.removeFilter(without_piece)
    if trainer.aux_loss_enabled:
        raise ValueError(
            "The balancing loss of a router must be off with differential privacy, got "
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}: it covers the whole batch. Set router_aux_loss_coef=0.0."
        )


def without_piece(record: logging.LogRecord) -> bool:
    """Remove the piece of an example from TRL's warning about a prompt that does not begin its row (modified in place)."""
    record.msg = re.sub(r"(training sequence): .*(\. The model is trained)", r"\1\2", str(record.msg), flags=re.DOTALL)
    return True
