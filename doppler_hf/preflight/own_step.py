"""A `training_step` of the user's own, tried once before anything is spent.

A private step gets a list of micro-batches, and its gradient must come from `DopplerTrainer.training_step`. A step that was
written for batches would fail at the first one, when it is counted already.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from doppler_hf.errors import Refusal, TypeRefusal
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.batching.sampling import OfStep
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.run.own_code import definitions
from doppler_hf.run.private_run import PrivateRun


def refuse_another_step(run: PrivateRun, trainer: Any) -> None:
    """Refuse a `training_step` of the user's own that fails on a private batch, or does not hand it on once."""
    own = next(definitions(trainer, "training_step"))
    if not own.is_own:
        return
    rows = run.probe.short[:2]
    piece = OfStep([MicroBatch(run.probe.collated(rows), len(rows))], step=trainer.state.global_step)
    counted = _Counted(run)
    try:
        with _in_place_of_a_step(trainer, counted):
            trainer.training_step(trainer.model, piece, None)
    except Exception as error:
        # Not its message, which may hold a part of an example.
        raise Refusal(
            "own-training-step",
            f"{own.place} must take a list of micro-batches and hand it to super().training_step, got a "
            f"{type(error).__name__} from it. Override compute_per_sample_loss instead. No ε is spent.",
        ) from error
    finally:
        run.engine.reset()
        trainer.model.zero_grad()
    if counted.pieces == 0:
        raise Refusal(
            "own-training-step",
            f"{own.place} does not call DopplerTrainer.training_step, so its gradient would have no noise. Call "
            "super().training_step once in yours, or override compute_per_sample_loss instead.",
        )
    if counted.pieces > 1:
        raise Refusal(
            "own-training-step",
            f"Each piece of a batch must be added once, got {counted.pieces} calls of DopplerTrainer.training_step from "
            f"{own.place}. Call super().training_step once in yours.",
        )


class _Counted:
    """A run that only counts the pieces it is given: nothing is computed, drawn or released."""

    is_complete = reports_raw_loss = False

    def __init__(self, run: PrivateRun) -> None:
        self._of, self.pieces = run, 0

    def add_piece(self, piece: Sequence[MicroBatch]) -> Tensor:
        """Count a piece."""
        if not all(isinstance(each, MicroBatch) for each in piece):
            raise TypeRefusal("own-training-step", "A piece must be a list of micro-batches, got other things in it.")
        self.pieces += 1
        return torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        """Return what else there is of the run."""
        return getattr(self._of, name)


@contextlib.contextmanager
def _in_place_of_a_step(trainer: Any, run: Any) -> Iterator[None]:
    """Let a trainer make a step outside of its loop, without callbacks, and leave it as it was."""
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
