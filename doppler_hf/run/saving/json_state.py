"""Write the state of a checkpoint as JSON, whatever a callback or a `log` of the user's own has put into it.

Transformers writes logs and the states of callbacks as JSON. A tensor, an array or a set in them would end the run at its
first checkpoint, and leave no checkpoint, after ε was spent. So they become lists here, and what is unknown becomes text.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from transformers.trainer_callback import ExportableState


def as_json(value: Any) -> Any:
    """Return a value that JSON can hold: tensors, arrays and sets become lists, and unknown objects become text.

    Example:
        >>> as_json({"loss": np.float32(0.5), "seen": {3}, 1: None})
        {'loss': 0.5, 'seen': [3], '1': None}
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    return str(value)


@contextlib.contextmanager
def writable_state(trainer: Any) -> Iterator[None]:
    """Make the trainer's logs, and the states of its callbacks in the block, such that JSON can hold them."""
    state, shadowed = trainer.state, []
    if not _is_writable(state.best_metric):
        state.best_metric = as_json(state.best_metric)
    if not _is_writable(state.log_history):
        for logs in state.log_history:
            # Privacy: evaluations of the training set are known by these objects, and left out of what is published.
            values = as_json(logs)
            logs.clear()
            logs.update(values)
        _warn("A log")
    for callback in trainer.callback_handler.callbacks:
        if not isinstance(callback, ExportableState):
            continue
        try:
            kept = callback.state()
        except Exception as error:
            kept = {"args": {}, "attributes": {}}
            warnings.warn(
                f"{type(callback).__name__}.state() failed with a {type(error).__name__}, so the checkpoint does not hold "
                "the callback's state.",
                stacklevel=4,
            )
        else:
            if _is_writable(kept):
                continue
            kept = as_json(kept)
            _warn(f"{type(callback).__name__}.state()")
        callback.state = lambda kept=kept: kept
        shadowed.append(callback)
    try:
        yield
    finally:
        for callback in shadowed:
            del callback.state


def _is_writable(value: Any) -> bool:
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return False
    return True


def _warn(name: str) -> None:
    warnings.warn(
        f"{name} has a value that JSON cannot hold, such as a tensor. The checkpoint holds a list or text in its place. To "
        "choose what is saved, turn the value into numbers or text in your code, for example with item() or tolist().",
        stacklevel=4,
    )
