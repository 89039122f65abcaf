"""Recognise weights into which a trained adapter was merged, perhaps with another adapter or in another precision.

A merge adds a change Δ to a weight W. In the precision and on the machine of the run, the result is known exactly, and its
marks are kept (`lineage`). Otherwise the result is rounded, another adapter may be added, or W is itself a merge. So the
register also keeps *sketches*: numbers xᵢᵀ W yᵢ with random signs x and y, of up to eight weights before and after the
merge. Sketches are linear. If the adapter was merged, the difference between the sketches of a model's weight and of W
contains the sketches of Δ once, whatever else was added. A least-squares fit over all sketched weights tells how often they
are contained, and how certain that is. Rounding, and the changes of other runs, are nearly independent of Δ, and count as
the fit's residual.

A run may continue an adapter, as after an interruption. Then W already has this adapter in it, and the bare base differs
from W by what resembles Δ. So the fit also has a term for this adapter, of which nothing follows.
"""

import contextlib
import copy
import hashlib
import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# The number of adapted layers whose merge is recorded, since users merge an adapter into all of its layers.
_LAYERS: Final = 8
# The layers of a merge together have about _LAYERS times this many sketched numbers, however few layers there are.
_FEWEST_ROWS: Final = 16
# More columns are left out, since the signs of all columns of stacked experts would need more memory than the experts.
_MOST_COLUMNS: Final = 2**18
# The number of latest merges that are kept for one run, since users may merge checkpoints, too.
MOST_MERGES: Final = 16
_PRECISIONS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
# A merge is recognised if the weights contain its change between a fifth and five times, as in a weighted sum of adapters,
# and if that differs from zero by so many standard deviations (more for few numbers, whose spread is known less well).
_LEAST, _MOST, _SURE = 0.2, 5.0, 6.0
# Some merges cannot be told apart, such as those of a run and of its continuation with a small learning rate. All of them
# are recognised if their squared residuals differ by less than this factor, or by a thousandth of the change.
_ALIKE, _EXACT = 1.5, 1e-3


class WeightsOfLayer(NamedTuple):
    """The weights of an adapted layer: merged as the run leaves it, merged as it was at the start, and without adapters."""

    after: Tensor
    before: Tensor
    base: Tensor


class MergedWeight(NamedTuple):
    """The sketches of a layer's weights."""

    shape: tuple[int, ...]
    after: tuple[float, ...]
    before: tuple[float, ...]
    base: tuple[float, ...]


# The sketched weights of one merge.
Merge = tuple[MergedWeight, ...]


# --- the weights that result from merging a run's adapter ---------------------------------------------------------------


class AdaptersAtStart:
    """Some adapted layers of a model, with their adapters' values at the start of a run.

    A run changes a weight by the difference between a merge at its end and a merge at its start, since PiSSA and others
    begin with an adapter whose merge gives the untrained weight back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values = {name: _values_of_adapters(layer) for name, layer in _noted_layers(model).items()}

    def merges(self, model: nn.Module) -> Iterator[tuple[list[WeightsOfLayer], bool]]:
        """Merge the layers in copies of them. Yield their weights before and after the run, and whether to sketch these.

        A base may be loaded in another precision for the merge, while PEFT keeps most adapters in float32. So both are
        combined. The merge in float32 is sketched, since in half precision a small change vanishes in most values. If the
        base itself has half precision, its merge in that precision is sketched, too, since users will get that.
        """
        layers = _noted_layers(model)
        layers = {name: layers[name] for name in self._values if name in layers}
        own = {_base_weight(layer).dtype for layer in layers.values()}
        for precision in (torch.float32, torch.bfloat16, torch.float16, *(own - _PRECISIONS)):
            for is_converted in (False, True):
                found = []
                for name, layer in layers.items():
                    if is_converted and {value.dtype for value in layer.parameters()} == {precision}:
                        continue  # The conversion would change nothing.
                    with contextlib.suppress(Exception), torch.no_grad():  # PEFT refuses to merge some adapters
                        before, after = (
                            _merged(layer, precision=precision, is_converted=is_converted, values=values)
                            for values in (self._values[name], None)
                        )
                        found.append(WeightsOfLayer(after, before, _base_weight(layer).detach().to(precision)))
                yield found, not is_converted and (precision == torch.float32 or precision in own)


def _noted_layers(model: nn.Module) -> dict[str, Any]:
    layers = {name: layer for name, layer in adapted_layers(model) if _can_be_merged(_base_weight(layer))}
    names = [*layers][:: max(1, len(layers) // _LAYERS)][:_LAYERS]
    return {name: layers[name] for name in names}


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of a model that have adapters of PEFT, with their names."""
    peft = sys.modules.get("peft")
    if peft is None:
        return []
    return [
        (name, each) for name, each in model.named_modules() if isinstance(each, peft.tuners.tuners_utils.BaseTunerLayer)
    ]


def _base_weight(layer: Any) -> Any:
    # PEFT's wrapper of a single parameter, such as the experts of a layer, has a name for it.
    return layer.get_param() if hasattr(layer, "get_param") else getattr(layer.get_base_layer(), "weight", None)


def is_base_partial(model: nn.Module) -> bool:
    """Return whether all adapted weights are quantized or sharded, so that no later run will recognise their merge."""
    weights = [_base_weight(layer) for _, layer in adapted_layers(model)]
    return bool(weights) and not any(map(_is_whole, weights))


def _can_be_merged(weight: Any) -> bool:
    return _is_whole(weight) and weight.ndim > 1


def _is_whole(weight: Any) -> bool:
    # A quantized weight is merged into another format, and a sharded weight has parts on other processes.
    return isinstance(weight, Tensor) and not isinstance(weight, DTensor) and weight.is_floating_point()


def _values_of_adapters(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in layer.named_parameters() if not name.startswith("base_layer.")}


def _merged(
    layer: Any,
    *,
    precision: torch.dtype,
    is_converted: bool,
    values: Mapping[str, Tensor] | None,
    adapters: Sequence[str] | None = None,
) -> Tensor:
    """Return the base weight in a precision with the adapters merged into it, after replacing the adapters' `values`."""
    made = copy_without_hooks(layer)
    for name, value in (values or {}).items():
        made.get_parameter(name).copy_(value)
    (made if is_converted else made.get_base_layer()).to(precision)
    made.merge(adapter_names=adapters)
    weight: Tensor = _base_weight(made)
    return weight


def copy_without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module that nobody watches: it has neither hooks nor a `forward` of its own."""
    # Hooks may belong to the engine of per-sample gradients or to a user, and must be neither copied nor called.
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
            elif name == "forward":
                memo[id(value)] = None
    return copy.deepcopy(module, memo)


def sketched(layers: Sequence[WeightsOfLayer]) -> Merge:
    """Return the sketches of layers, without those that the run does not change."""
    rows = max(_FEWEST_ROWS, _FEWEST_ROWS * _LAYERS // max(1, len(layers)))
    found = []
    for weights in layers:
        size = weights.after.numel()
        most = max(_FEWEST_ROWS, min(rows, size // 4))  # further sketches would depend on each other
        after, before, base = (tuple(sketch(value, most).tolist()) for value in weights)
        if after != before:
            found.append(MergedWeight(tuple(weights.after.shape), after, before, base))
    return tuple(found)


def sketch(weight: Tensor, rows: int) -> Float64[np.ndarray, " rows"]:
    """Return xᵢᵀ W yᵢ for random signs that depend only on the shape. Dimensions after the first are joined, and cut."""
    matrix = weight.detach().reshape(len(weight), -1)[:, :_MOST_COLUMNS]
    left, right = (_signs(size, rows).to(matrix.device) for size in matrix.shape)
    found = ((left @ matrix.float()) * right).sum(dim=1, dtype=torch.float64)
    return found.cpu().numpy()


def _signs(size: int, rows: int) -> Float[Tensor, "rows size"]:
    # Signs come from a hash, which no version of a library changes. Fewer rows are the first rows of more rows.
    words = hashlib.shake_256(str(size).encode("ascii")).digest(-(-rows * size // 8))
    bits = np.unpackbits(np.frombuffer(words, dtype=np.uint8))[: rows * size]
    return torch.from_numpy(bits.astype(np.float32).reshape(rows, size) * 2.0 - 1.0)


# --- recognising a merge ------------------------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """The difference of a model's weights from those with which a run began, and the change by that run."""

    owner: int
    found: Mapping[int, np.ndarray]  # place of a weight in the model → its sketch minus the sketch before the run
    change: Mapping[int, np.ndarray]
    start: Mapping[int, np.ndarray]  # what the adapter did at the start of the run

    def fit(self, others: Iterable["_Difference"]) -> tuple[float, float, float]:
        """Return how often the change is contained, its distance from 0 in standard deviations, and the squared residual."""
        places = [*self.found]
        found, change = (np.concatenate([of[place] for place in places]) for of in (self.found, self.change))
        columns = [
            np.concatenate([_padded_to_length(changes.get(place), len(self.found[place])) for place in places])
            for changes in (self.start, *(other.change for other in others))
        ]
        # Others may be alike or even the same, as two records of one merge are, so a basis of what they explain is used.
        others_basis = _orthonormal_basis([column for column in columns if column.any()], length=len(found))
        apart = change - others_basis @ (others_basis.T @ change)
        degrees = len(found) - others_basis.shape[1] - 1
        size = float(np.linalg.norm(apart))
        if degrees < 1 or size <= 1e-6 * np.linalg.norm(change):
            return 0.0, 0.0, math.inf
        times = float(apart @ found) / size**2
        residual = float(np.square(found - others_basis @ (others_basis.T @ found) - times * apart).sum())
        spread = math.sqrt(residual / degrees) / size
        # With few numbers, the spread itself is uncertain.
        sure = abs(times) / max(spread, 1e-12 * abs(times), 1e-300) / (1.0 + 20.0 / degrees)
        return times, sure, residual

    @property
    def size(self) -> float:
        """The squared norm of the change."""
        return float(sum(np.square(part).sum() for part in self.change.values()))


def _orthonormal_basis(columns: Sequence[np.ndarray], *, length: int) -> np.ndarray:
    """Return orthonormal columns that span the same space, without directions that differ by rounding alone."""
    if not columns:
        return np.zeros((length, 0))
    matrix = np.stack([column / np.linalg.norm(column) for column in columns], axis=1)
    left, sizes, _ = np.linalg.svd(matrix, full_matrices=False)
    basis: np.ndarray = left[:, sizes > 1e-6 * sizes[0]]
    return basis


def _padded_to_length(part: np.ndarray | None, length: int) -> np.ndarray:
    whole = np.zeros(length)
    if part is not None:
        shared = min(length, len(part))
        whole[:shared] = part[:shared]
    return whole


def merged_in(model: nn.Module, merges: Sequence[tuple[int, Merge]]) -> set[int]:
    """Return the owners of the merges that a model's weights contain.

    Args:
        model: The model, perhaps with its own adapters, which may be combinations of several earlier adapters.
        merges: The known merges, each with the number of its owner.
    """
    shapes = {weight.shape for _, merge in merges for weight in merge}
    weights = {
        place: parameter
        for place, parameter in enumerate(model.parameters())
        if tuple(parameter.shape) in shapes and not isinstance(parameter, DTensor) and parameter.is_floating_point()
    }
    if not weights:
        return set()
    first = {place: sketch(weight, _FEWEST_ROWS) for place, weight in weights.items()}
    nearest = _nearest(first, {place: tuple(weight.shape) for place, weight in weights.items()}, merges)
    rows: dict[int, int] = {}  # the number of sketched numbers that are needed for each weight
    for places, (_, merge) in zip(nearest, merges, strict=True):
        for place, weight in zip(places, merge, strict=True):
            if place is not None:
                rows[place] = max(rows.get(place, 0), len(weight.after))
    sketches = {
        place: first[place] if most == _FEWEST_ROWS else sketch(weights[place], most) for place, most in rows.items()
    }
    found = _contained(sketches, nearest, merges)
    # Also look at the weights after merging the model's own adapters, which may be sums of adapters that were deleted since.
    effective = _with_adapters(model, weights, rows)
    return found | (_contained(sketches | effective, nearest, merges) if effective else set())


def _nearest(
    sketches: Mapping[int, np.ndarray], shapes: Mapping[int, tuple[int, ...]], merges: Sequence[tuple[int, Merge]]
) -> list[list[int | None]]:
    """Return for each merged weight the model's nearest weight, by the distance to its sketch before or after the merge."""
    known: dict[tuple[int, ...], list[np.ndarray]] = {}
    for _, merge in merges:
        for weight in merge:
            known.setdefault(weight.shape, []).extend(
                np.asarray(each[:_FEWEST_ROWS]) for each in (weight.before, weight.after)
            )
    chosen: dict[tuple[int, ...], Iterator[int | None]] = {}
    for shape, points in known.items():
        places = [place for place in sketches if shapes[place] == shape]
        if not places:
            chosen[shape] = iter([None] * (len(points) // 2))
            continue
        there, here = np.stack(points), np.stack([sketches[place] for place in places])
        # Compute squared distances without forming all differences.
        distance = np.square(here).sum(axis=1) - 2.0 * there @ here.T + np.square(there).sum(axis=1, keepdims=True)
        of_each = distance.reshape(-1, 2, len(places)).min(axis=1).argmin(axis=1)
        chosen[shape] = iter([places[place] for place in of_each])
    return [[next(chosen[weight.shape]) for weight in merge] for _, merge in merges]


def _contained(
    sketches: Mapping[int, np.ndarray], nearest: Sequence[Sequence[int | None]], merges: Sequence[tuple[int, Merge]]
) -> set[int]:
    """Return the owners of the merges that explain weights with these sketches, beginning with the best explanation.

    Further merges must explain the rest, so that no merge counts only because it is similar to another one.
    """
    left = []
    for places, (owner, merge) in zip(nearest, merges, strict=True):
        pairs = {place: weight for place, weight in zip(places, merge, strict=True) if place is not None}
        if 2 * len(pairs) > len(merge):
            before = {place: np.asarray(weight.before) for place, weight in pairs.items()}
            found = {place: _padded_to_length(sketches[place], len(value)) - value for place, value in before.items()}
            change = {place: np.asarray(weight.after) - before[place] for place, weight in pairs.items()}
            start = {place: before[place] - np.asarray(weight.base) for place, weight in pairs.items()}
            left.append(_Difference(owner, found, change, start))
    taken: list[_Difference] = []
    while left:
        fits = [(each, *each.fit(taken)) for each in left]
        sure = [fit for fit in fits if _LEAST <= fit[1] <= _MOST and fit[2] >= _SURE]
        if not sure:
            break
        best = min(sure, key=lambda fit: fit[3] / fit[0].size)
        most = max(_ALIKE * best[3] / best[0].size, _EXACT**2)
        taken += [best[0]] + [fit[0] for fit in sure if fit is not best and fit[3] / fit[0].size <= most]
        owners = {each.owner for each in taken}
        left = [each for each in left if each.owner not in owners]
    return {each.owner for each in taken}


def _with_adapters(model: nn.Module, weights: Mapping[int, Tensor], rows: Mapping[int, int]) -> dict[int, np.ndarray]:
    """Return the sketches of weights with the model's own adapters merged into them, if these change anything."""
    places = {id(weights[place]): place for place in rows}
    found = {}
    for _, layer in adapted_layers(model):
        weight = _base_weight(layer)
        place = places.get(id(weight))
        if place is not None and may_change(layer):
            with contextlib.suppress(Exception), torch.no_grad():  # PEFT refuses to merge some adapters
                merged = _merged(layer, precision=weight.dtype, is_converted=False, values=None)
                found[place] = sketch(merged, rows[place])
    return found


def may_change(layer: nn.Module) -> bool:
    """Return whether adapters of a layer may change its output: the second factor of a new LoRA adapter is zero."""
    seconds = [value for name, value in layer.named_parameters() if name.startswith(("lora_B.", "lora_embedding_B."))]
    return not seconds or any(bool(value.detach().any()) for value in seconds)


def has_trained_adapter(model: nn.Module, adapter: str) -> bool:
    """Return whether merging only the adapter of this name changes one of the recorded layers."""
    for layer in _noted_layers(model).values():
        with contextlib.suppress(Exception), torch.no_grad():  # PEFT refuses to merge some adapters
            weight = _base_weight(layer)
            if may_change(layer):
                merged = _merged(layer, precision=weight.dtype, is_converted=False, values=None, adapters=[adapter])
                # Some adapters rotate the weight by the identity, which rounds.
                most = 4 * torch.finfo(weight.dtype).eps * float(weight.abs().max())
                if not torch.allclose(merged, weight, rtol=0.0, atol=most):
                    return True
    return False
