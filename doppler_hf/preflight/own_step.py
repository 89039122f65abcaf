"""Try methods of the user's own that get batches, such as `training_step`, once before any ε is spent.

In a private run these methods get lists of micro-batches, and the gradient must come from `DopplerTrainer.training_step`. A
method that was written for plain batches would fail in the first step, which the ledger has counted by then.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from doppler_hf.errors import Refusal, TypeRefusal
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.batching.sampling import Piece
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.run.own_code import definitions
from doppler_hf.run.private_run import PrivateRun


def refuse_another_step(run: PrivateRun, trainer: Any) -> None:
    """Refuse a user's `training_step` that fails on a private batch, or does not pass it to `super()` exactly once."""
    own = next(definitions(trainer, "training_step"))
    if not own.is_user_code:
        return
    piece = _piece_of(run, trainer, count=2)
    counted = _Counted(run)
    try:
        with _in_place_of_a_step(trainer, counted):
            trainer.training_step(trainer.model, piece, None)
    except Exception as error:
        # The refusal leaves out the error's message, which may hold a part of an example.
        raise Refusal(
            "own-training-step",
            f"{own.place} failed with a {type(error).__name__} in a trial before the run. In a private run it gets a list "
            "of micro-batches, which it must pass to super().training_step. Override compute_per_sample_loss instead. No ε "
            "is spent.",
        ) from error
    finally:
        run.engine.reset()
        trainer.model.zero_grad()
    if counted.pieces == 0:
        raise Refusal(
            "own-training-step",
            f"{own.place} does not call DopplerTrainer.training_step, so its gradient would have no noise. Call "
            "super().training_step once in your method, or override compute_per_sample_loss instead.",
        )
    if counted.pieces > 1:
        raise Refusal(
            "own-training-step",
            f"{own.place} calls DopplerTrainer.training_step {counted.pieces} times for one batch, so each record's "
            f"gradient would be added {counted.pieces} times. Call super().training_step once in your method.",
        )


def refuse_other_batches(run: PrivateRun, trainer: Any) -> None:
    """Refuse a user's `get_batch_samples` that fails on private batches, leaves some out, or does not call `super()`."""
    own = next(definitions(trainer, "get_batch_samples"))
    if not own.is_user_code:
        return
    given = [_piece_of(run, trainer, count=2) for _ in range(run.sampler.pieces)]
    counted = _Counted(run)
    try:
        with _in_place_of_a_step(trainer, counted, hears_callbacks=True):
            taken, _ = trainer.get_batch_samples(iter(given), len(given), trainer.args.device)
    except Exception as error:
        raise Refusal(
            "own-batches",
            f"{own.place} failed with a {type(error).__name__} in a trial before the run. In a private run it gets lists of "
            "micro-batches, which it must return as super().get_batch_samples returns them. Remove the method, or change "
            "batches in data_collator instead. No ε is spent.",
        ) from error
    if not counted.is_drawn:
        raise Refusal(
            "own-batches",
            f"{own.place} does not call super().get_batch_samples, which starts a step of the private run. Call it once in "
            "your method and return its result, or remove the method.",
        )
    if not isinstance(taken, list) or len(taken) != len(given) or any(a is not b for a, b in zip(taken, given, strict=True)):
        raise Refusal(
            "own-batches",
            f"{own.place} returns other batches than super().get_batch_samples, but ε holds only for the random batches of "
            "the run. Return them unchanged, and change batches in data_collator instead.",
        )


def refuse_counts_that_fail(run: PrivateRun, trainer: Any) -> None:
    """Refuse a user's `floating_point_ops` that fails on a private batch."""
    own = next(definitions(trainer, "floating_point_ops"))
    if not own.is_user_code:
        return
    try:
        float(trainer.floating_point_ops(_piece_of(run, trainer, count=2)))
    except Exception as error:
        raise Refusal(
            "own-count-of-operations",
            f"{own.place} failed with a {type(error).__name__} in a trial before the run. In a private run it gets a list "
            "of micro-batches. Remove the method: a private run does not report the count, because it depends on which "
            "records were drawn. No ε is spent.",
        ) from error


def _piece_of(run: PrivateRun, trainer: Any, *, count: int) -> Piece:
    """Return the part of a batch that one micro-batch of a few records makes."""
    rows = run.probe.short[:count]
    return Piece([MicroBatch(run.probe.collated(rows), len(rows))], step=trainer.state.global_step)


class _Counted:
    """A stand-in for the run that only counts the pieces it is given: nothing is computed, drawn or released."""

    is_complete = reports_raw_loss = False

    def __init__(self, run: PrivateRun) -> None:
        self._of, self.pieces, self.is_drawn = run, 0, False

    def draw(self, pieces: Iterator[Piece], *, number: int, step: int) -> list[Piece]:
        """Take the pieces of a batch."""
        self.is_drawn = True
        return list(itertools.islice(pieces, number))

    def add_piece(self, piece: Sequence[MicroBatch]) -> Tensor:
        """Count a piece."""
        if not all(isinstance(each, MicroBatch) for each in piece):
            raise TypeRefusal(
                "own-training-step",
                "Expected the list of micro-batches that your training_step received; super().training_step got a list "
                "with other items. Pass the inputs on unchanged.",
            )
        self.pieces += 1
        return torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the real run."""
        return getattr(self._of, name)


@contextlib.contextmanager
def _in_place_of_a_step(trainer: Any, run: Any, *, hears_callbacks: bool = False) -> Iterator[None]:
    """Let a trainer take a step outside of its loop, without callbacks, and restore it afterwards."""
    handler, kept = trainer.callback_handler, (trainer._run, trainer.state, trainer.control)
    callbacks = handler.callbacks
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    # `get_batch_samples` looks for the callback of the run.
    trainer._run, handler.callbacks = run, callbacks if hears_callbacks else []
    trainer.state, trainer.control = copy.deepcopy((trainer.state, trainer.control))
    trainer.state.epoch = trainer.state.epoch or 0.0
    try:
        with modes_kept(trainer.model):
            yield
    finally:
        handler.callbacks = callbacks
        trainer._run, trainer.state, trainer.control = kept
