"""What lies around a saved model: the filtered weights in it, the ledger that speaks for them, and a checkpoint's parts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from doppler_hf.disk import space_for
from doppler_hf.run.checkpoints import begin_checkpoint
from doppler_hf.run.ledger_callback import PrivacyCallback
from doppler_hf.run.parameters import look_again_at_what_is_trained
from doppler_hf.run.weight_filter_callback import WeightFilterCallback
from doppler_hf.training_args import DopplerTrainingArguments


@contextlib.contextmanager
def saved_whole(
    folder: Path,
    args: DopplerTrainingArguments,
    model: nn.Module,
    keeper: PrivacyCallback,
    weight_filter: WeightFilterCallback,
    *,
    checkpoint_step: int | None,
) -> Iterator[None]:
    """Put the filtered weights into the model while the block saves it, and the ledger beside what it has saved.

    Args:
        folder: The folder in which the block saves it.
        args: The arguments.
        model: The model, with its raw weights.
        keeper: The keeper of the ledger.
        weight_filter: The filter of the weights.
        checkpoint_step: The optimizer step if the folder is a checkpoint.
    """
    is_first = args.process_index == 0  # which alone writes
    speaks = keeper.speaks_for(model)  # of the raw weights, for which the filtered ones stand in next
    beside = keeper.beside_model(folder, args, model=model, speaks=speaks, checkpoint_step=checkpoint_step)
    space = space_for("the model", folder=folder)
    with weight_filter.applied(), space, beside if is_first else contextlib.nullcontext():
        look_again_at_what_is_trained(model)  # which no process could do alone
        if checkpoint_step is not None and is_first:
            begin_checkpoint(folder)
        yield
        if checkpoint_step is not None:
            weight_filter.add_to_checkpoint(str(folder), args)
