"""Try a `training_step` of the user's own once, before any ε is spent.

A private `training_step` gets a list of micro-batches, and its gradient must come from `DopplerTrainer.training_step`. A
method that was written for plain batches would fail in the first step, which the ledger has counted by then.
"""

import contextlib
import copy
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
    rows = run.probe.short[:2]
    piece = Piece([MicroBatch(run.probe.collated(rows), len(rows))], step=trainer.state.global_step)
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


class _Counted:
    """A stand-in for the run that only counts the pieces it is given: nothing is computed, drawn or released."""

    is_complete = reports_raw_loss = False

    def __init__(self, run: PrivateRun) -> None:
        self._of, self.pieces = run, 0

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
def _in_place_of_a_step(trainer: Any, run: Any) -> Iterator[None]:
    """Let a trainer take a step outside of its loop, without callbacks, and restore it afterwards."""
    handler, kept = trainer.callback_handler, (trainer._run, trainer.state, trainer.control)
    callbacks = handler.callbacks
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._run, handler.callbacks = run, []
    trainer.state, trainer.control = copy.deepcopy((trainer.state, trainer.control))
    trainer.state.epoch = trainer.state.epoch or 0.0
    try:
        with modes_kept(trainer.model):
            yield
    finally:
        handler.callbacks = callbacks
        trainer._run, trainer.state, trainer.control = kept
