"""Run some examples of the training set through the user's model, loss and collator before the first step.

- Three passes with two examples in training mode, dropout included, check that no layer or loss has its own random numbers.
- A batch of short examples (eight, or as many as a micro-batch has if that is affordable) checks that no loss has a gradient
  in the rows of other examples, and that no loss changes with the other examples. The second check is repeated with moved
  weights, since the initial weights may hide what a layer does.
- A short and the longest example check losses and the engine's gradients against plain autograd on each example alone.

This finds whatever couples examples (norms and means over the batch or its tokens, ranks, counts and capacities, padding,
collators that mix rows), statistics that a forward pass keeps, seeded noise, and a wrong rule of the engine.

Nothing about the examples is released: the outcome depends on model, loss, data set and collator.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from doppler_hf.errors import Refusal
from doppler_hf.linalg import highest_conv_precision, highest_matmul_precision, same, sums_of_bytes
from doppler_hf.preflight.autograd_check.batch_dependence import Batches
from doppler_hf.preflight.autograd_check.compared_examples import (
    ComparedExamples,
    Losses,
    gradients_of,
    why_gradients_change,
)
from doppler_hf.preflight.autograd_check.comparison import compare
from doppler_hf.preflight.autograd_check.coupling import coupling_refusal, place_of_coupling
from doppler_hf.preflight.autograd_check.moved_weights import moved_weights
from doppler_hf.preflight.autograd_check.row_randomness import unusual_size, uses_other_generators
from doppler_hf.preflight.autograd_check.without_randomness import (
    away_from_zero,
    draws_numbers,
    in_evaluation_mode,
    is_random,
    without_dropout,
)
from doppler_hf.preflight.rows_without_numbers import refuse_rows_without_numbers
from doppler_hf.privacy.batching.probe import SHORT, Inputs, Probe
from doppler_hf.privacy.clipping.layers import listed
from doppler_hf.privacy.known_numbers import refuse_known_numbers_in_passes
from doppler_hf.run.digests import adapted_parameters
from doppler_hf.run.own_code import overrides
from doppler_hf.run.precision import rounding_of
from doppler_hf.run.private_run import PrivateRun

# The most multiplications for a batch of short examples, which take a fraction of a second. In a large model, as many
# examples as a micro-batch has would take more.
_MOST_ON_CPU: Final = 6e9
_MOST_ON_ACCELERATOR: Final = 6e11
_MOST_ROWS: Final = 256
# Losses with random numbers are compared in batches of unusual sizes, some of them larger than eight.
_ENOUGH: Final = 19
# How often a batch is computed again before losses that differ are taken for a fault and not for chance.
_MANY: Final = 16
# The most batches in which a loss that draws random numbers is looked at, since it may couple examples only now and then.
_MOST_DRAWN: Final = 64
# With more weights than this, not counting embeddings, a pass of one example takes too long on a CPU to check many.
_FEW_WEIGHTS: Final = 1 << 24


def check_examples(run: PrivateRun, trainer: Any) -> None:
    """Check the attached engine, the loss and the trained parameters; refusals name the layer or tensor at fault."""
    args = trainer.args
    if not args.grad_sample_self_check:
        return
    reached = _Comparison(run, trainer).names_reached()
    unreached = run.engine.parameters.keys() - reached
    if unreached and not args.train_unreached_parameters:
        with run.engine.unwatched():
            refuse_unreached(trainer.model, run.losses_of, run.probe, unreached=unreached)


@contextlib.contextmanager
def multiply_adds() -> Iterator[list[int]]:
    """Yield a list that collects the multiplications of each layer in the block: outputs times weights per output."""
    counted: list[int] = []

    def count(module: nn.Module, _args: Any, output: Any) -> None:
        weight = vars(module).get("_parameters", {}).get("weight")
        is_product = isinstance(weight, Tensor) and weight.ndim > 1 and not isinstance(module, nn.Embedding)
        if is_product and isinstance(output, Tensor):
            counted.append(output.numel() * weight.shape[1:].numel())

    with register_module_forward_hook(count):
        yield counted


def _is_on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "cpu"


class _Comparison:
    """The comparison of a trainer's losses and gradients on a few examples."""

    def __init__(self, run: PrivateRun, trainer: Any) -> None:
        self.refuse_rows_without_numbers = functools.partial(refuse_rows_without_numbers, run, trainer)
        self.clipped, self.model, self.probe, self.losses_of = run.engine, trainer.model, run.probe, run.losses_of
        self.weights_of = run.weights_of
        self.most_rows = run.most_rows
        self.tolerance = rounding_of(trainer.model, trainer.accelerator.mixed_precision)
        self.has_own_loss = trainer.has_own_loss
        self.has_users_loss = overrides(trainer, "compute_per_sample_loss")
        # `whole` has the short examples of `rows` in one batch.
        self.rows, self.whole = self.probe.short, self.probe.collated(self.probe.short)
        self.batches_drawn = 1  # The number of small batches of a loss that draws random numbers.

    @property
    def number(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def _is_cheap(self) -> bool:
        """Return whether a pass of a few examples takes almost no time."""
        layers = (module for module in self.model.modules() if not isinstance(module, nn.Embedding))
        weights = sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False))
        return weights <= _FEW_WEIGHTS or not _is_on_cpu(self.model)

    def names_reached(self) -> set[str]:
        """Compare, and return the names of the trained parameters that a loss reaches."""
        try:
            return self._names_reached()
        except Exception as error:
            # A row without numbers may also look like a fault of the loss or of the engine.
            self.refuse_rows_without_numbers()
            if self.has_own_loss and getattr(error, "code", "other-number-of-losses") == "other-number-of-losses":
                self._refuse_failure_on_one_row(error)
            raise

    def _refuse_failure_on_one_row(self, error: Exception) -> None:
        """Explain an error of the user's loss that only a batch of one row has."""
        failed = []
        for rows in (self.probe.short[:1], self.probe.short[:3]):
            is_fine = False
            with contextlib.suppress(Exception), self.clipped.unwatched(), torch.no_grad():
                is_fine = self.losses_of(self.probe.collated(rows)).ndim == 1
            failed += [] if is_fine else [len(rows)]
        if failed == [1] and "more than 1 value per channel" in str(error):
            raise Refusal(
                "functional-batch-norm",
                "The model normalizes each record by the statistics of its batch, probably by torch's F.batch_norm with "
                "training=True, so clipping cannot bound what one record contributes. Use F.group_norm or F.layer_norm.",
            ) from error
        if failed == [1]:
            raise Refusal(
                "fails-on-one-row",
                f"compute_per_sample_loss failed with a {type(error).__name__} on a batch of one row, but not on more rows. "
                "Some random batches have one row. A squeeze() without a dimension, for example, removes the dimension of "
                "the batch too: write squeeze(-1), or leave it out.",
            ) from error

    def _names_reached(self) -> set[str]:
        # TF32 is cuDNN's default and would round more than the tolerance.
        with away_from_zero(self.model), highest_conv_precision(), highest_matmul_precision():
            with without_dropout(self.model), refuse_state_changes(self.model, again=self._is_random):
                self._limit_number_to_cost()
                found = self._place_of_coupling()
            with self.clipped.unwatched():
                few = self.probe.collated(self.probe.short[: 2 if self._is_cheap else 1])
                refuse_known_numbers_in_passes(self.model, self.losses_of, few)
            with without_dropout(self.model):
                try:
                    return self._compared(*found)
                except ValueError:
                    # A layer that is left out in some passes may be so in several in a row.
                    if not self._is_random(again=_MANY):
                        raise
                # A layer may mix rows in training mode only, as Mixup does. Chance gives no loss a gradient in another row.
                if found[1] is not None:
                    raise coupling_refusal(found[1])
                self._refuse_changes_beside_others(is_random=True)
            with in_evaluation_mode(self.model):  # its randomness does not come from an attribute that could be set to 0
                if not self._is_random():
                    return self._compared(*self._place_of_coupling())
        print(
            "The model or its loss draws random numbers even in evaluation mode, so this check cannot compare the losses of "
            "a batch with those of single records. Run `doppler-hf check` to test whether each loss depends only on its own "
            "record."
        )
        _, place = self._place_of_coupling()
        if place is not None:
            raise coupling_refusal(place)
        self._refuse_changes_beside_others(is_random=True)
        with self.clipped.unwatched():
            return reached_by(self.whole, self.model, self.losses_of, names={*self.clipped.parameters})

    def _limit_number_to_cost(self) -> None:
        """Take as many examples as a micro-batch has, if the model computes them in a fraction of a second."""
        affordable = 0.0
        if self._is_cheap:
            with self.clipped.unwatched(), torch.no_grad(), multiply_adds() as counted:
                self.losses_of(self.probe.collated(self.probe.short[:1]))
            affordable = (_MOST_ON_CPU if _is_on_cpu(self.model) else _MOST_ON_ACCELERATOR) / max(1, sum(counted))
        # A user's loss may choose among all examples of a micro-batch, such as the hardest eight.
        least = min(self.most_rows, 4 * SHORT) if self.has_own_loss else SHORT
        number = max(SHORT, least, min(self.most_rows, _MOST_ROWS, int(affordable)))
        self.batches_drawn = max(2, min(_MOST_DRAWN, int(affordable) // SHORT))
        self.rows = self.probe.distinct(number)
        self.whole = self.probe.collated(self.rows)

    def _place_of_coupling(self) -> tuple[Tensor, str | None]:
        losses, place = place_of_coupling(self.clipped, self.model, self.losses_of, self.whole, number=self.number)
        with self.clipped.unwatched():
            is_drawn = place is None and draws_numbers(self.losses_of, self.whole)
        # MixUp, for example, mixes a batch with some probability only.
        rows = self.rows[:SHORT]
        for _ in range(self.batches_drawn if is_drawn else 0):
            few = self.probe.collated(rows)
            _, place = place_of_coupling(self.clipped, self.model, self.losses_of, few, number=len(rows))
            if place is not None:
                break
        return losses, place

    def _is_random(self, *, again: int = 3) -> bool:
        with self.clipped.unwatched():
            return is_random(self.losses_of, self.whole, again=again)

    def _compared(self, losses: Tensor, place: str | None) -> set[str]:
        probe, model, losses_of = self.probe, self.model, self.losses_of
        if not losses.isfinite().any():
            raise Refusal(
                "no-finite-loss",
                "None of the tried records has a finite loss, so nothing would be learnt. Look for NaN and infinite values "
                "in the weights and the data, and for a division by zero in the loss.",
            )
        if place is not None:
            with self.clipped.unwatched():
                together, each = probe.in_parts(probe.short)
                raise coupling_refusal(place, why_gradients_change(ComparedExamples(model, losses_of, each, together)))
        self._refuse_changes_beside_others()
        usable = (row for row, loss in zip(probe.short, losses.tolist(), strict=False) if 0.0 < abs(loss) < math.inf)
        together, each = probe.in_parts([next(usable, probe.short[0]), probe.longest])
        return compare(self.clipped, ComparedExamples(model, losses_of, each, together), tolerance=self.tolerance)

    def _refuse_changes_beside_others(self, *, is_random: bool = False) -> None:
        is_cheap = self._is_cheap
        batches = Batches(
            self.model,
            self.losses_of,
            self.whole,
            self.number,
            lambda places: self.probe.collated([self.rows[place] for place in places]),
            tolerance=self.tolerance,
            most_alone=SHORT if is_cheap else 2 if self.has_own_loss else 1,
            is_thorough=is_cheap,
            norms_by=None,
        )
        if is_random:
            with self.clipped.unwatched():
                batches = self._with_numbers_of_examples(batches)
        # Norms of gradients can be compared if each example has its own random numbers.
        if is_cheap and self.has_users_loss and batches.chance != "of places":
            batches = batches._replace(norms_by=self.clipped)
        with contextlib.nullcontext() if batches.norms_by is not None else self.clipped.unwatched():
            reason, is_seen = None, False
            # With moved weights the loss may fail or overflow, such as a loss that expects numbers between 0 and 1.
            with moved_weights(self.model), contextlib.suppress(Exception):
                reason, is_seen = batches.why_losses_change(), True
            if reason is None and (is_cheap or not is_seen):
                reason = batches.why_losses_change()
            # A loss may couple examples only now and then.
            few = batches._replace(norms_by=None, is_thorough=False, most_alone=1)
            for seed in range(1, self.batches_drawn // SHORT if is_random else 1):
                reason = reason or few._replace(seed=seed).why_losses_change()
        if reason is not None:
            raise Refusal("depends-on-others", reason)
        if self.has_users_loss:
            self._refuse_weights_of_others(batches)
            with self.clipped.unwatched():
                is_dropped = batches._replace(norms_by=None).changes_with_nan()
            if is_dropped:
                raise Refusal(
                    "nan-spreads",
                    "The loss of one record changes if the loss of another record is NaN, so one record would change what "
                    "all others contribute. Return the losses as they are, without isfinite().all() or a selection: a "
                    "record whose gradient is not finite automatically counts as zero.",
                )

    def _refuse_weights_of_others(self, batches: Batches) -> None:
        """Refuse weights, returned with the losses, that change with the other examples, such as counts of classes."""
        with self.clipped.unwatched():
            if (found := self.weights_of(self.whole)) is None:
                return
            batches_of_weights = [found]
            if self._is_cheap:
                batches_of_weights += [
                    weights for rows in self.probe.further() if (weights := self.weights_of(rows)) is not None
                ]
            if any(bool(((weights < 0.0) | (weights > 1.0)).any()) for weights in batches_of_weights):
                raise Refusal(
                    "weights-out-of-range",
                    "compute_per_sample_loss returns weights below 0 or above 1. A private run cuts every weight to the "
                    "range from 0 to 1, so all larger weights would count as 1. Divide all weights by the largest one, "
                    "and use none below 0.",
                )
            weights_of: Any = self.weights_of  # it returns weights and not None
            of_weights = batches._replace(losses_of=weights_of, norms_by=None, most_alone=SHORT)
            if of_weights.why_losses_change() is None:
                return
        raise Refusal(
            "weights-of-others",
            "The weight of one record changes with the other records of the batch, so one record would change what the "
            "others contribute. Compute each weight from its own record and from constants, such as public class "
            "frequencies.",
        )

    def _with_numbers_of_examples(self, batches: Batches) -> Batches:
        """Return batches in which each example has its own random numbers, or else each place in the batch has."""
        shapes = [parameter.shape for parameter in self.model.parameters()]
        shapes += [value.shape[1:] for value in self.whole.values() if isinstance(value, Tensor)]
        tables = {module.num_embeddings for module in self.model.modules() if isinstance(module, nn.Embedding)}
        usual = {length for shape in shapes for length in shape} - tables  # no layer draws numbers for a whole vocabulary
        most, least = (unusual_size(max(self.number, _ENOUGH), usual=usual, is_least=each) for each in (False, True))
        if most is None or least is None:
            return batches._replace(chance="of places")
        rows = (self.rows * _ENOUGH)[:most]
        whole, few = self.probe.collated(rows), self.probe.collated(rows[:least])
        fixed = batches._replace(
            whole=whole,
            number=most,
            collated=lambda places: self.probe.collated([rows[place] for place in places]),
            chance="of the examples",
            least=least,
        )
        calls = [functools.partial(self.losses_of, dict(inputs)) for inputs in (whole, few)]
        return batches._replace(chance="of places") if uses_other_generators(calls) or not fixed.is_fixed() else fixed


@contextlib.contextmanager
def refuse_state_changes(model: nn.Module, *, again: Callable[[], object]) -> Iterator[None]:
    """Refuse a forward pass that keeps statistics in buffers or parameters, or replaces layers; `again` runs another one."""
    layers, buffers = dict(model.named_modules()), _copies(model)
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    rewritten = {parameter: sums_of_bytes(parameter.detach()).tolist() for parameter in adapted_parameters(model)}
    yield
    replaced = [name for name, module in model.named_modules() if layers.get(name) is not module]
    if replaced:
        raise Refusal(
            "layers-replaced",
            f"During the forward pass the model replaces its layer {replaced[0]!r} for all later batches, and the data "
            "decide whether it does so. A private run does not allow this. Set the option of the model that keeps the "
            "layer (for BigBird: attention_type='original_full').",
        )
    written = [
        name
        for name, parameter in model.named_parameters()
        if versions.get(name) != parameter._version
        and rewritten.get(parameter) != sums_of_bytes(parameter.detach()).tolist()
    ]
    changed = _changed(model, buffers)
    if changed:
        # A table that grows with the longest example, such as a table of positions, does not change in a second pass.
        first, saved = _copies(model), model.state_dict().keys()
        again()
        written += [name for name in changed if name in saved] + _changed(model, first)
    if written:
        raise _written_to(model, written)


def _written_to(model: nn.Module, names: Sequence[str]) -> Refusal:
    tensors = dict[str, Tensor]([*model.named_parameters(), *model.named_buffers()])
    # A layer with statistics may also count its calls.
    name = next((each for each in names if tensors[each].is_floating_point()), names[0])
    if isinstance(tensors[name], nn.Parameter):
        return Refusal(
            "weights-written",
            f"The forward pass or the loss writes to the weights {name!r}, which would change them without clipping or "
            "noise. If they are an average of the trained weights, such as a mean teacher, keep them in a copy outside of "
            "the model, and update the copy in a callback's on_step_end. If they are statistics of the data, replace the "
            "layer by one that keeps none.",
        )
    if not tensors[name].is_floating_point() and tensors[name].numel() == 1:
        return Refusal(
            "calls-counted",
            f"The forward pass or the loss changes {name!r}, which seems to count calls. How often a model is called "
            "depends on the size of random batches, which is private. Count steps in a callback: trainer.state.global_step "
            "is public.",
        )
    return Refusal(
        "buffers-written",
        f"The forward pass writes to {name!r}, which would keep statistics of the data without clipping or noise. Replace "
        "the layer by one that keeps no statistics.",
    )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _changed(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    return [name for name, buffer in model.named_buffers() if name not in before or not same(buffer, before[name])]


def reached_by(inputs: Inputs, model: nn.Module, losses_of: Losses, *, names: Set[str]) -> set[str]:
    """Return which of these trained parameters get a gradient from a batch in training mode, dropout included."""
    model.train()
    return {*gradients_of(losses_of(inputs), {name: model.get_parameter(name) for name in names})}


def refuse_unreached(model: nn.Module, losses_of: Losses, probe: Probe, *, unreached: Set[str]) -> None:
    """Refuse trained parameters that no loss reaches, since only noise would change them."""
    never = {*unreached}
    # More examples than were compared may reach them, such as experts that few examples use.
    for inputs in probe.further():
        never -= reached_by(inputs, model, losses_of, names=never)
        if not never:
            break
    if never:
        _refuse_uncalled_adapters(model, losses_of, probe, never=never)
        tops = sorted({_outermost_unreached(model, name, never) for name in never})
        lines = "; ".join(f"trainer.model.get_{kind}({name!r}).requires_grad_(False)" for name, kind in tops)
        raise Refusal(
            "unreached-parameters",
            f"No loss of the tried records depends on {listed(name for name, _ in tops)}, so only noise would change these "
            f"parameters. Freeze them before trainer.train(): {lines}. Or set train_unreached_parameters=True.",
        )


def _refuse_uncalled_adapters(model: nn.Module, losses_of: Losses, probe: Probe, *, never: Set[str]) -> None:
    """Refuse adapters of layers whose weights the model reads without a call, as WavLM's attention: they have no effect."""
    called: set[nn.Module] = set()
    with register_module_forward_pre_hook(lambda module, _: called.add(module)), torch.no_grad():
        losses_of(probe.collated(probe.short))
    layers = dict(model.named_modules())
    adapted = {name: module for name, module in layers.items() if "base_layer" in module._modules}
    # A tower that this data does not need is not called as a whole, and may be frozen.
    unused = [
        name
        for name, module in adapted.items()
        if module not in called
        and layers[name.rpartition(".")[0]] in called
        and any(each.startswith(f"{name}.") for each in never)
    ]
    if unused:
        block = re.match(r"(.*\.\d+\.)?", unused[0])[0]  # type: ignore[index]
        inside = tuple(f"{name}." for name in adapted)
        others = [
            name.rpartition(".")[-1]
            for name, module in layers.items()
            if module in called and name.startswith(block) and not name.startswith(inside)
            if name in adapted or type(module) is nn.Linear
        ]
        such = f", such as {', '.join(map(repr, dict.fromkeys(others)))}" if others else ""
        raise Refusal(
            "adapters-not-called",
            f"The adapters of {listed(unused)} have no effect, because the model uses the weights of these layers without "
            f"calling them. Name layers in target_modules that the model calls{such}.",
        )


def _outermost_unreached(model: nn.Module, name: str, never: Set[str]) -> tuple[str, str]:
    """Return the outermost module around a parameter in which no trained parameter is reached, or the parameter itself."""
    trained = [other for other, parameter in model.named_parameters() if parameter.requires_grad]
    parts = name.split(".")
    for end in range(1, len(parts)):
        prefix = ".".join(parts[:end])
        if all(other in never for other in trained if other.startswith(f"{prefix}.")):
            return prefix, "submodule"
    return name, "parameter"
