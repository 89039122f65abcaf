"""Remember, within the process, which weights were trained without privacy, and on which data.

ε of a private run counts from the weights with which it begins. If these have already learnt the same records without
noise, as after a baseline with `disable_dp` on the same model, it would be untrue. Other data may be public, so that
nothing is said of them. Trainings in other processes, with other trainers and of weights in shards are not known here, nor
are copies of a model, weights into which an adapter was merged, tables with rewritten rows, streams, or data sets of the
user's own classes that were made anew.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.privacy.batching.columns import is_table
from doppler_hf.privacy.batching.shared_rows import is_same_data, training_rows_in
from doppler_hf.run.weights.lineage import marks_of

# A function that returns an object, or None if nobody holds it any more.
_Reference = Callable[[], Any]


class _Learnt(NamedTuple):
    marks: frozenset[str]  # of the value with which the last training left the weights
    datasets: tuple[_Reference, ...]


# The trained tensor → the data on which it was trained without privacy.
_BY_OBJECT: Final = WeakIdKeyDictionary()


@contextlib.contextmanager
def noted_as_trained(model: nn.Module, *, openly_on: Sequence[Any], is_resumed: bool = False) -> Iterator[None]:
    """Remember what the weights of a model learn while the block trains them, also if it fails.

    Args:
        model: The model.
        openly_on: The data sets that the block trains on without privacy. A private training has none, but what its weights
            have learnt before stays in them.
        is_resumed: Whether the weights are those of a checkpoint of such a training, which is continued.
    """
    # Where nothing is remembered, a private training adds nothing.
    begun = {
        name: (marks_of(parameter), _learnt(parameter))
        for name, parameter in _whole(model)
        if openly_on or parameter in _BY_OBJECT
    }
    new = [(dataset, _reference(dataset)) for dataset in openly_on]
    try:
        yield
    finally:
        for name, parameter in _whole(model):
            marks, earlier = begun.get(name, (frozenset(), ()))
            # A mark that stays does not tell the new value from the one before.
            before = frozenset() if is_resumed and parameter.requires_grad else marks
            moved = marks_of(parameter) - before if name in begun else frozenset()
            if moved:
                known = [found for each in earlier if (found := each()) is not None]
                added = (reference for dataset, reference in new if not any(is_same_data(each, dataset) for each in known))
                _BY_OBJECT[parameter] = _Learnt(moved, (*earlier, *added))


def was_trained_openly(model: nn.Module, datasets: Sequence[Any]) -> bool:
    """Return whether any weight of a model has a value that it got without privacy on rows of some data sets.

    Privacy: objects, fingerprints and places of rows decide, which are chosen by the user's code. No row is read.
    """
    # By identity: a weak reference to an object of a class that compares values cannot be in a set.
    references = {id(each): each for _, parameter in _whole(model) for each in _learnt(parameter)}
    known = [reference() for reference in references.values()]
    return any(training_rows_in(dataset, each) for dataset in datasets for each in known)


def _learnt(parameter: nn.Parameter) -> tuple[_Reference, ...]:
    """Return the data of which the present value of a parameter has learnt without privacy."""
    past = _BY_OBJECT.get(parameter)
    return () if past is None or past.marks.isdisjoint(marks_of(parameter)) else past.datasets


def _whole(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by name, without those that are in shards."""
    return [(name, parameter) for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def _reference(dataset: Any) -> _Reference:
    """Return a function that returns a data set, or one with the same rows.

    It keeps tables, lists and tensors on the CPU in memory as long as the weights, and nothing of other data sets. Torch's
    own classes are made anew around their data, since they are often made for one training and then forgotten.
    """
    if isinstance(dataset, Subset):
        indices = dataset.indices
        return _made_of([_reference(dataset.dataset)], lambda inner: Subset(inner, indices))
    if isinstance(dataset, ConcatDataset):
        return _made_of([_reference(each) for each in dataset.datasets], lambda *parts: ConcatDataset(parts))
    if isinstance(dataset, TensorDataset):
        return _made_of([_reference_of_tensor(each) for each in dataset.tensors], TensorDataset)
    if is_table(dataset):
        # A transform may lead to the model, which would then never be freed.
        table = copy.copy(dataset)
        table._format_type, table._format_kwargs = None, {}
        return lambda: table
    try:
        return weakref.ref(dataset)
    except TypeError:  # such as a list
        return lambda: dataset


def _made_of(parts: Sequence[_Reference], make: Callable[..., Any]) -> _Reference:
    def made() -> Any:
        found = [part() for part in parts]
        return None if any(each is None for each in found) else make(*found)

    return made


def _reference_of_tensor(tensor: Tensor) -> _Reference:
    """Return a function that returns a tensor. One of an accelerator is None if nobody holds its memory any more."""
    if tensor.device.type == "cpu":
        return lambda: tensor
    if tensor._base is None:
        return weakref.ref(tensor)
    place = tensor.size(), tensor.stride(), tensor.storage_offset()
    return _made_of([weakref.ref(tensor._base)], lambda base: base.as_strided(*place))
