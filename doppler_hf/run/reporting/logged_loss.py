"""Control the training loss in logs: a raw loss is only shown here and never saved, and a clipped private loss is reported.

Transformers sends each log to two places: `state.log_history`, which it writes into checkpoints and the model card, and
`on_log` of every callback, including trackers. A raw loss reaches only the callbacks that show it on this console, and
TensorBoard if its files are outside of the model's folder. All other callbacks count as remote, including your own, since
nobody can see what a callback does with a loss.
"""

import contextlib
import copy
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from transformers import TrainerState
from transformers.integrations import (
    ClearMLCallback,
    CometCallback,
    NeptuneCallback,
    SwanLabCallback,
    TensorBoardCallback,
    WandbCallback,
)
from transformers.integrations.integration_utils import default_logdir
from transformers.trainer_callback import CallbackHandler

from doppler_hf.privacy import PrivacyStatement

LOSSES: Final = ("loss", "train_loss")
# Callbacks that only show something on the console; two are from modules that need a notebook or TRL.
_CONSOLES: Final = (
    ("transformers", "PrinterCallback"),
    ("transformers", "ProgressCallback"),
    ("transformers.utils.notebook", "NotebookProgressCallback"),
    ("trl.trainer.callbacks", "RichProgressCallback"),
)
# These callbacks upload what the program prints.
_COPY_THE_CONSOLE: Final = (ClearMLCallback, CometCallback, NeptuneCallback, SwanLabCallback, WandbCallback)
_NEAR: Final = 0.75  # a mean above this share of the bound is reported; an untrained model's mean is at half of the bound


def pop_losses(logs: dict[str, float]) -> dict[str, float]:
    """Remove the training losses from a log (in place), and return them."""
    return {name: logs.pop(name) for name in LOSSES if name in logs}


def forget_losses(history: list[dict[str, float]]) -> None:
    """Remove the training losses from the logs of a checkpoint (in place); before version 0.4 they were raw."""
    for logs in history:
        pop_losses(logs)


def copies_of_console(callbacks: Sequence[object]) -> list[str]:
    """Return the trackers among the callbacks that upload what is printed."""
    return [type(each).__name__.removesuffix("Callback") for each in callbacks if isinstance(each, _COPY_THE_CONSOLE)]


def is_console(callback: object) -> bool:
    """Return whether a callback only shows something on the console."""
    # A module that nobody has imported has no callback here.
    found = [(sys.modules.get(module), name) for module, name in _CONSOLES]
    return isinstance(callback, tuple(getattr(module, name) for module, name in found if module is not None))


def local_callbacks(callbacks: Sequence[Any], *, output_dir: str) -> list[Any]:
    """Return the callbacks that may get a raw loss: for the console, unless a tracker copies it, and for TensorBoard."""
    is_copied = bool(copies_of_console(callbacks))
    return [
        each
        for each in callbacks
        if (is_console(each) and not is_copied)
        or (isinstance(each, TensorBoardCallback) and _is_outside(folder_of(each), output_dir))
    ]


def folder_of(callback: TensorBoardCallback) -> str | None:
    """Return the folder of TensorBoard's files."""
    folder = getattr(callback.tb_writer, "log_dir", None) or callback.logging_dir
    return None if folder is None else str(folder)


def _is_outside(folder: str | None, output_dir: str) -> bool:
    if folder is None or "://" in folder:  # a URL, such as a bucket, may be on another machine
        return False
    return not Path(folder).resolve().is_relative_to(Path(output_dir).resolve())


@contextlib.contextmanager
def tensorboard_outside_output_dir(callbacks: Sequence[Any], *, output_dir: str) -> Iterator[None]:
    """Let TensorBoard write next to the model's folder during the block, unless it was given a folder.

    By default it writes into the model's folder, which people share and `push_to_hub` uploads.
    """
    for each in callbacks:
        if isinstance(each, TensorBoardCallback) and each.tb_writer is None and each.logging_dir is None:
            home = Path(output_dir).resolve()
            each.logging_dir = os.path.join(home.with_name(f"{home.name}-raw-loss"), default_logdir())
    try:
        yield
    finally:
        for each in callbacks:
            vars(each).pop("on_evaluate", None)


@contextlib.contextmanager
def only_local(handler: CallbackHandler, *, output_dir: str) -> Iterator[list[Any]]:
    """Take the callbacks that may get a raw loss out of a handler during the block, and yield them."""
    everyone = handler.callbacks
    local = local_callbacks(everyone, output_dir=output_dir)
    handler.callbacks = [each for each in everyone if not any(each is other for other in local)]
    try:
        yield local
    finally:
        handler.callbacks = everyone


def show_beside_evaluations(callbacks: Sequence[Any], losses: dict[str, float]) -> None:
    """Give a notebook's table the training loss, which it reads from the history of logs at each evaluation."""
    notebook = sys.modules.get("transformers.utils.notebook")
    for each in callbacks:
        if notebook is not None and isinstance(each, notebook.NotebookProgressCallback):
            vars(each)["on_evaluate"] = _with_history(each, [losses])


def _with_history(callback: Any, history: list[dict[str, float]]) -> Any:
    def on_evaluate(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        seen = copy.copy(state)
        seen.log_history = history
        return type(callback).on_evaluate(callback, args, seen, control, **kwargs)

    return on_evaluate


def noise_of_loss(statement: PrivacyStatement, *, steps: int) -> float:
    """Return the standard deviation of the noise on the mean private loss of some steps."""
    assert statement.loss_noise_multiplier is not None
    assert statement.per_sample_max_loss is not None
    each = statement.loss_noise_multiplier * statement.per_sample_max_loss / statement.expected_batch_size
    return each / math.sqrt(max(1, steps))


class BoundWatch:
    """Notices if the private loss is so near to its bound that many losses must be clipped.

    Privacy: it reads what is released.
    """

    def __init__(self, statement: PrivacyStatement, *, step: int) -> None:
        assert statement.per_sample_max_loss is not None
        self._bound = statement.per_sample_max_loss
        # The mean of a step varies with the noise. It also varies with the random size of its batch, because the sum is
        # divided by the expected size instead.
        self._std = math.hypot(
            noise_of_loss(statement, steps=1), _NEAR * self._bound / math.sqrt(statement.expected_batch_size)
        )
        # Average over so many steps that this deviation is a twentieth of the bound, or over all steps.
        enough = (self._std / (0.05 * self._bound)) ** 2
        self._enough = min(max(1, math.ceil(enough)), max(1, statement.steps_planned - step))
        self._first, self._last, self._sum, self._steps = step, step, 0.0, 0
        self._is_noticed = False

    def words_on(self, logs: dict[str, float], *, step: int) -> str:
        """Return a message about a log, at most once. Its loss is a mean over the steps since the last log, or over all."""
        if "loss" in logs:
            steps, self._last = step - self._last, step
            self._sum += logs["loss"] * steps
        elif "train_loss" in logs and self._last == self._first:  # no loss was logged before
            steps = step - self._first
            self._sum = logs["train_loss"] * steps
        else:
            return ""
        self._steps += steps
        if self._steps < self._enough or self._is_noticed:
            return ""
        mean, std = self._sum / self._steps, self._std / math.sqrt(self._steps)
        self._sum, self._steps = 0.0, 0
        self._is_noticed = mean >= _NEAR * self._bound and mean - 3.0 * std >= 0.5 * self._bound
        if not self._is_noticed:
            return ""
        return (
            f"The logged training loss ({mean:.3g}) is close to {self._bound:.4g}, at which the loss of each record is "
            "clipped for logging, so the true loss may be larger. The training itself is not affected. To see larger "
            f"losses, set per_sample_max_loss={2 * self._bound:.2g} or higher. Losses that are NaN are logged as this bound."
        )
