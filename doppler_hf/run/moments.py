"""Steps as which the start check sees a training: a loss may read which step it is."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any, Final

from transformers import Trainer

from doppler_hf.run.start_check import Moment

# What a user may override to have losses that follow the step.
_OF_LOSSES: Final = ("compute_per_sample_loss", "_prepare_inputs")
_NOT_OWN: Final = ("doppler_hf.", "transformers.", "trl.")


def moments_of(trainer: Trainer, *, steps: int, epochs: int) -> list[Moment]:
    """Return the start of a training, and half-way and the last step if losses are the user's own.

    Args:
        trainer: The trainer, whose `state` is that of before.
        steps: How many the training has.
        epochs: How many, as the host rounds them.
    """
    of_losses = [getattr(trainer, name) for name in _OF_LOSSES]
    is_own = any(not method.__module__.startswith(_NOT_OWN) for method in of_losses)
    later = sorted({steps // 2, steps - 1} - {0}) if is_own else []
    return [functools.partial(_at, trainer, step=step, steps=steps, epochs=epochs) for step in (0, *later)]


@contextlib.contextmanager
def _at(trainer: Any, *, step: int, steps: int, epochs: int) -> Iterator[None]:
    before = trainer.state
    trainer.state = copy.copy(before)
    trainer.state.global_step, trainer.state.epoch = step, epochs * step / steps
    trainer.state.max_steps, trainer.state.num_train_epochs = steps, epochs
    if step > 0:
        logged = {"step": step, "epoch": trainer.state.epoch, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.0}
        trainer.state.log_history = [*before.log_history, logged]
    try:
        yield
    except ValueError as error:
        if step == 0:
            raise
        raise ValueError(f"At step {step} of {steps}, though not at the first: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        if step == 0:
            raise
        # It may read what only a training has by then.
        warnings.warn(
            f"The loss cannot be looked at as at step {step} of {steps}, got a {type(error).__name__} from it: that it goes "
            "by each example alone then is for you to see to.",
            stacklevel=2,
        )
    finally:
        trainer.state = before
