"""Remember, within the process, which weights were trained without privacy, and on which data.

ε of a private run counts from the weights with which it begins. If these have already learnt the same records without
noise, as after a baseline with `disable_dp` on the same model, it would be untrue. Other data may be public, so that
nothing is said of them. Trainings in other processes and with other trainers are not known here, nor are copies of a model,
or tables with rewritten rows.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.privacy.batching.columns import is_table
from doppler_hf.run.lineage import exact_mark
from doppler_hf.run.published_results import training_rows_in


class _Trained(NamedTuple):
    mark: str  # of the value with which the training left the weights
    dataset: Callable[[], Any]  # None if nobody holds it any more


# The trained tensor → its last training without privacy.
_BY_OBJECT: Final = WeakIdKeyDictionary()


@contextlib.contextmanager
def noted_as_trained_openly(model: nn.Module, dataset: Any) -> Iterator[None]:
    """Remember the weights of a model that the block trains without privacy, also if it fails."""
    before = {name: mark for name, mark, parameter in _marked(model) if parameter.requires_grad}
    try:
        yield
    finally:
        for name, mark, parameter in _marked(model):
            if before.get(name, mark) != mark:
                _BY_OBJECT[parameter] = _Trained(mark, _reference(dataset))


def was_trained_openly(model: nn.Module, dataset: Any) -> bool:
    """Return whether any weight of a model has a value that it got without privacy on rows of a data set.

    Privacy: objects, fingerprints and places of rows decide, which are chosen by the user's code. No row is read.
    """
    if not any(parameter in _BY_OBJECT for parameter in model.parameters()):
        return False
    past = [
        found
        for _, mark, parameter in _marked(model)
        if (found := _BY_OBJECT.get(parameter)) is not None and found.mark == mark
    ]
    datasets = {id(each): each for each in (found.dataset() for found in past)}
    return any(training_rows_in(dataset, each) for each in datasets.values())


def _marked(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the name of each parameter, the mark of its value, and itself, without those that are in shards."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            yield name, exact_mark(parameter), parameter


def _reference(dataset: Any) -> Callable[[], Any]:
    """Return a function that returns a data set. It does not keep rows in memory, but for a table, which are mapped."""
    if is_table(dataset):
        return lambda: dataset
    try:
        return weakref.ref(dataset)
    except TypeError:  # such as a list
        return lambda: dataset
