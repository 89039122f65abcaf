"""Per-sample gradients from one forward and one backward pass, at the cost of ordinary ones.

The forward of every trained layer is replaced (`torch_layers`, `transformers_layers`, `other_layers`) by a function that
notes the factors of each product in a `Notes`. The model keeps its class, the names of its parameters and its output. After
the backward pass, norms and sums are computed from the notes (`gradients`).

The batch dimension is never guessed. A layer whose input does not start with the batch computes as usual. Its parameters
then get an ordinary gradient, which raises an error with the parameter's name. The same check finds every use of a parameter
outside of its layer.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from doppler_hf.errors import Refusal, page
from doppler_hf.privacy.clipping import transformers_layers
from doppler_hf.privacy.clipping.attention import attention, has_rule
from doppler_hf.privacy.clipping.experts import ExpertBlock, expert_blocks
from doppler_hf.privacy.clipping.gradients import Gradient, Notes
from doppler_hf.privacy.clipping.layers import listed, trainable_of
from doppler_hf.privacy.clipping.opacus_layers import opacus_rules
from doppler_hf.privacy.clipping.other_layers import LayerWithoutRule
from doppler_hf.privacy.clipping.recurrence import recurrence
from doppler_hf.privacy.clipping.refused_layers import refuse_layers
from doppler_hf.privacy.clipping.torch_layers import RULES, Rule, rule_for
from doppler_hf.privacy.losses import has_prompt, task_of, without_adapters
from doppler_hf.shards import gathered

# Layers with an argument `batch_first`. Torch's transformers pass it to their attention.
_WITH_BATCH_FIRST = (nn.MultiheadAttention, nn.RNNBase)


class BookKeepingEngine:
    """Replaces forward passes in a model, until `detach`, so that per-sample gradients can be computed.

    With `by_opacus`, the rules for torch's layers are those of `opacus_layers`, as a reference.
    """

    def __init__(self, model: nn.Module, notes: Notes, *, by_opacus: bool, rows_per_loss: int) -> None:
        refuse_layers(model)
        self._model = model
        self.notes = notes
        self.without_rule: dict[str, LayerWithoutRule | ExpertBlock] = {}
        self._not_batched: dict[str, int] = {}
        self._cleanup = contextlib.ExitStack()
        self._rows_per_loss = rows_per_loss
        self._num_inputs: int | None = None
        self._has_list = False
        self._has_choices = task_of(without_adapters(model)) == "multiple_choice"
        rules = opacus_rules() if by_opacus else RULES | transformers_layers.transformers_rules()
        rules |= {kind.forward: recurrence for kind in (nn.RNN, nn.LSTM, nn.GRU)}  # Opacus has no sampler for these.
        for name, module in model.named_modules():
            if (method := transformers_layers.relative_bias_method(module)) is not None:
                compute = getattr(module, method)
                bias = functools.partial(transformers_layers.relative_bias, self.notes, name, module, compute)
                self._replace(module, method, bias)
            if has_prompt(module):
                self._replace(
                    module, "get_prompt", functools.partial(transformers_layers.prompt, self.notes, module.get_prompt)
                )
            if has_rule(module):
                rule: Rule | None = attention
            elif trainable_of(module):
                rule = rule_for(module, rules)
            else:
                continue
            if rule is None:
                forward = transformers_layers.without_checkpointing(module)
                other = LayerWithoutRule(name, module, self.notes, forward=forward or module.forward)
                self.without_rule[name] = other
                watched = other if forward is None else functools.partial(transformers_layers.checkpointing, module, other)
            else:
                watched = functools.partial(self._apply, rule, name, module)
            self._replace(module, "forward", self._unless_unwatched(module.forward, watched, name=name))
        for name, module in expert_blocks(model):
            block = self.without_rule[name] = ExpertBlock(module, self.notes, forward=module.forward)
            self._replace(module, "forward", self._unless_unwatched(module.forward, block, name=name))
        # These wrap the replaced forward passes of these layers, or of their adapters.
        for layer in itertools.chain.from_iterable(map(transformers_layers.parts_in_rows, model.modules())):
            self._replace(layer, "forward", functools.partial(transformers_layers.in_rows, self.notes, layer.forward))
        self._replace(model, "forward", functools.partial(self._forward, model.forward))

    def detach(self) -> None:
        """Restore the model's own forwards."""
        self.notes.clear()
        self._cleanup.close()

    def per_sample_gradients(
        self, losses: Float[Tensor, " rows"], parameters: Mapping[str, Tensor], *, views: int = 1
    ) -> dict[str, Gradient]:
        """Back-propagate `losses` and return the per-sample gradients of the trained parameters."""
        # Sensitivity: all rows of an example (its views, choices or windows, or the rows of its loss) are neighbours and are
        # summed up before they are clipped.
        with self._noted(losses, parameters, num_examples=len(losses) // views) as (notes, trainable):
            self._back_propagate(losses.sum() / views, trainable)
            with torch.no_grad():
                return notes.gradients(trainable)

    def coupled(
        self, losses: Float[Tensor, " rows"], parameters: Mapping[str, Tensor], *, examined: Bool[Tensor, " rows"]
    ) -> list[str]:
        """Return the parameters at which the losses of the examined examples have a gradient in other examples' rows.

        A first dimension that equals the batch size need not be the batch, and a loss may depend on the whole batch. Both
        would assign gradients to the wrong example. Both are found exactly, however small they are: the gradient of a loss
        that does not read a row is a sum of products with zero there, in any order and precision.
        """
        with self._noted(losses, parameters, num_examples=len(losses)) as (notes, trainable):
            notes.examined = examined
            self._back_propagate(losses[examined].sum(), trainable)
            return [name for name, parameter in trainable.items() if parameter in notes.coupled]

    @contextlib.contextmanager
    def _noted(
        self, losses: Float[Tensor, " rows"], parameters: Mapping[str, Tensor], *, num_examples: int
    ) -> Iterator[tuple[Notes, dict[str, Tensor]]]:
        if self._num_inputs != len(losses) * self._rows_per_loss:
            each = f"every {self._rows_per_loss} rows" if self._rows_per_loss > 1 else "each row"
            more = " Pass one tensor for each record in a list, and other tensors one by one." if self._has_list else ""
            more = more or (
                " If the model gets several rows of each record, such as two views, put them next to each other and set "
                "rows_per_loss in the class of your trainer. If it gets the parts of all records in one tensor, such as the "
                "nodes of graphs, pad them, so that each record is one row."
            )
            has_more = self._has_list or (self._num_inputs is not None and self._num_inputs > len(losses))
            # The message has no numbers, because the size of a random batch is private, and messages end up in logs.
            raise Refusal(
                "other-number-of-losses",
                f"Expected one loss for {each} of the model's input; got more or fewer losses.{more if has_more else ''} "
                "Call the model once with the whole micro-batch, and return one loss per record.",
            )
        is_cut = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        trainable = gathered(parameters) if is_cut else dict(parameters)
        self.notes.num_examples = num_examples
        try:
            yield self.notes, trainable
        finally:
            for parameter in trainable.values():
                parameter.grad = None
            self.notes.clear()
            self._not_batched.clear()

    def _back_propagate(self, loss: Float[Tensor, ""], trainable: Mapping[str, Tensor]) -> None:
        """Fill the notes in one backward pass, and leave no ordinary gradients."""
        notes = self.notes
        notes.uses.clear()  # An ordinary backward pass of the user may have left some.
        for parameter in trainable.values():
            parameter.grad = None
        loss.backward()
        if notes.failed:
            error = next(iter(notes.failed.values()))
            raise Refusal("layer-without-rule", self._failed(error)) from error
        unexplained = [name for name, parameter in trainable.items() if parameter.grad is not None]
        if unexplained:
            # These parameters were used by their own layers and also outside of them, most often in a penalty on the
            # weights.
            twice = [name for name in unexplained if trainable[name] in notes.uses]
            raise Refusal("no-per-sample-gradient", self._unexplained(unexplained, has_penalty=bool(twice)))

    def _failed(self, error: Exception) -> str:
        failed = {name: self._model.get_submodule(name) for name in self.notes.failed}
        kinds = ", ".join(sorted({type(module).__name__ for module in failed.values()}))
        # Numbers are removed from the message, because they may be lengths of examples, and messages end up in logs.
        words = re.sub(r"\b\d+\b", "…", re.split(r"\n|\. |\.$", str(error))[0])
        why = f"failed with {type(error).__name__} ({words})"
        own = {name: [f"{name}.{key}".lstrip(".") for key, _ in trainable_of(module)] for name, module in failed.items()}
        others = f"or train adapters of another kind, such as LoRA: {page('start/troubleshooting', 'model')}."
        if not any(
            len(own[name]) < sum(each.requires_grad for each in module.parameters()) for name, module in failed.items()
        ):
            return (
                f"Per-sample gradients of the layers {listed(failed)} ({kinds}) {why}. Freeze these layers with "
                f"requires_grad_(False), {others}"
            )
        # Freezing a module would freeze its inner layers, too, which may be the whole encoder.
        weights = [each for name in failed for each in own[name]]
        line = f"model.get_parameter({weights[0]!r}).requires_grad_(False)"
        if len(weights) > 1:
            line = f"for name in {weights}: model.get_parameter(name).requires_grad_(False)"
        if self.notes.failed.keys() == self.notes.fail_when_checkpointed:
            why = "cannot be computed, because layers inside have gradient checkpointing"
            others = "or train without gradient checkpointing (gradient_checkpointing=False)."
        return (
            f"Per-sample gradients of {listed(weights)}, which {kinds} uses outside of its inner layers, {why}. Freeze "
            f"these weights alone: {line}; {others}"
        )

    def _unexplained(self, names: Sequence[str], *, has_penalty: bool) -> str:
        # All names are listed. Otherwise a user who freezes the first would get the next error.
        sizes = {name: self._not_batched.get(name.rpartition(".")[0]) for name in names}
        outside = listed(name for name, size in sizes.items() if size is None)
        inside = listed(name for name, size in sizes.items() if size is not None)
        # The message has no shapes, because the length of an example is private, and messages end up in logs.
        dimensions = " or ".join(map(str, sorted({size for size in sizes.values() if size is not None})))
        found = [f"{outside}, which is used outside of its layer's forward"] if outside else []
        if inside:
            found.append(f"{inside}, whose layer has an input of {dimensions} dimensions that does not begin with the batch")
        is_turned = any(isinstance(each, _WITH_BATCH_FIRST) and not each.batch_first for each in self._model.modules())
        freeze = "Set batch_first=True in these layers, or freeze" if inside and is_turned else "Freeze"
        if inside and self._has_list:
            freeze = "Pad all records to one tensor with a mask, and call these layers once with it, or freeze"
        others = "or train LoRA" if outside else "and train other layers"
        if has_penalty and outside:
            first = next(name for name, size in sizes.items() if size is None)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return (
                f"The loss uses the weights {first!r}{more} outside of the forward of their layers too, and that part "
                "belongs to no record. If it is a penalty on the weights, such as L2, leave the penalty out of the loss "
                f"and set weight_decay, which needs no data. Otherwise {freeze.lower()} them with requires_grad_(False), "
                f"or train LoRA: {page('start/troubleshooting', 'model')}."
            )
        return (
            f"Per-sample gradients cannot be computed for {'; and '.join(found)}. {freeze} them with "
            f"requires_grad_(False). If they belong to an adapter, leave these layers out of its target_modules, {others}: "
            f"{page('start/troubleshooting', 'model')}."
        )

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)  # This is an evaluation, in which layers make no notes.
        # Models of sentence-transformers take one dictionary in place of keywords.
        given: list[Any] = []
        for value in (*args, *kwargs.values()):
            given += value.values() if isinstance(value, Mapping) else [value]
        # A recurrent state, as a tuple, has its layers first.
        given += [each for value in given if isinstance(value, tuple) for each in value]
        tensors = [value for value in given if isinstance(value, Tensor) and value.ndim > 0]
        # Rows of several lengths may be in a list of tensors.
        lists = [
            value for value in given if isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value)
        ]
        self._has_list = bool(lists)
        sizes = [len(each) for each in tensors] + [len(each) for each in lists]
        self._num_inputs = sizes[0] if sizes else None
        self.notes.batch_size = tensors[0].shape[:2].numel() if tensors and self._has_choices else self._num_inputs
        self.notes.casts.clear()
        self.notes.is_in_forward = True
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            # If a tensor is on another device, torch's own message is better.
            if not self.notes.repeated or isinstance(error, torch.OutOfMemoryError) or "device" in str(error):
                raise
            layers = ", ".join(repr(name) for name in dict.fromkeys(self.notes.repeated))
            raise Refusal(
                "output-repeated",
                f"The forward pass failed, perhaps because the model repeats the output of {layers} for each record, so "
                "that it has more rows than the batch. Freeze these layers with requires_grad_(False), or train adapters "
                f"of another kind, such as LoRA: {page('start/troubleshooting', 'model')}.",
            ) from error
        finally:
            self.notes.is_in_forward = False

    def _apply(self, rule: Rule, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "parametrizations" in module._modules:
            # PEFT replaces parameters in a forward that trains `target_parameters`. With a rule, these would get no
            # gradient.
            return type(module).forward(module, *args, **kwargs)
        # The first input may be passed under any name.
        input = args[0] if args else kwargs[next((key for key in ("query", "input") if key in kwargs), next(iter(kwargs)))]
        rows = num_rows(module, input)
        if rows == self.notes.batch_size:
            return rule(self.notes, module, *args, **kwargs)
        if rows == 1 and isinstance(module, nn.Embedding):
            self.notes.repeated.append(name)
            return rule(self.notes, module, *args, **kwargs)
        self._not_batched[name] = input.data.ndim
        return type(module).forward(module, *args, **kwargs)

    def _unless_unwatched(
        self, original: Callable[..., Any], watched: Callable[..., Any], *, name: str
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.notes.is_watching:
                return original(*args, **kwargs)
            if self.notes.batch_size is None and self.notes.is_in_forward:
                raise Refusal(
                    "no-batch-in-arguments",
                    "None of the model's arguments is a tensor whose first dimension is the batch, or a list with one "
                    "tensor for each record, so per-sample gradients cannot be computed. Pass such tensors to model(...) "
                    "one by one, such as model(inputs['x'], inputs['mask']), and not inside of objects of your own.",
                )
            if self.notes.batch_size is None:
                raise Refusal(
                    "layer-called-alone",
                    f"The layer {name!r} was called before the model itself, for example by another method of the model, "
                    "so its per-sample gradients cannot be computed. Call model(...) as a whole, once, and let its "
                    "forward return what the loss needs. After that the loss may call further layers. A callback may call "
                    "layers under torch.no_grad(), or those of a copy: copy.deepcopy(model).",
                )
            return watched(*args, **kwargs)

        return forward

    def _replace(self, module: nn.Module, method: str, function: Callable[..., Any]) -> None:
        before = module.__dict__.get(method)
        # This bypasses nn.Module.__setattr__, which would look for parameters and sub-modules.
        module.__dict__[method] = _InPlace(function, module, method, before=before)
        if before is None:
            self._cleanup.callback(module.__dict__.pop, method)
        else:
            self._cleanup.callback(module.__dict__.__setitem__, method, before)


class _InPlace:
    """A function in the place of a layer's method during a run; a copy or a pickle of the layer has the layer's own method.

    A function would be copied as it is, and the copy of a model, such as an average of its weights, would compute with the
    weights of the model that is trained.
    """

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, method: str, *, before: Callable[..., Any] | None
    ) -> None:
        # The signature is kept, because `generate` passes the positions of padded prompts only to a forward that names them.
        functools.update_wrapper(self, getattr(module, method))
        self._function, self._module, self._method, self._before = function, module, method, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return _OfClass(copy.deepcopy(self._module, memo), self._method)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle is also read where this package is missing.
        return _pickled(self._module, self._method) if self._before is None else (_itself, (self._before,))


class _OfClass:
    """The method of a copied layer's class, which does not hold the layer: the copy is freed with its last reference."""

    def __init__(self, module: nn.Module, method: str) -> None:
        # The class's own one: a copy has no other attributes yet, and its wrapper may not be followed to the layer.
        own = getattr(type(module), method)
        functools.update_wrapper(self, own)
        del vars(self)["__wrapped__"]
        self.__signature__ = without_self(inspect.signature(own))
        self._module, self._method, self._own = weakref.ref(module), method, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OfClass":
        module = self._module()
        assert module is not None  # it is being copied
        return _OfClass(copy.deepcopy(module, memo), self._method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _pickled(self._module(), self._method)


def _pickled(module: nn.Module | None, method: str) -> tuple[Any, ...]:
    # The new module exists before its attributes are filled, so that this finds the method of its class.
    return getattr, (module, method)


def without_self(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a function as that of a bound method."""
    return signature.replace(parameters=[*signature.parameters.values()][1:])


def is_in_a_run(model: nn.Module) -> bool:
    """Return whether an engine is attached to a model."""
    return isinstance(vars(model).get("forward"), _InPlace)


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def num_rows(module: nn.Module, input: Tensor | PackedSequence) -> int | None:
    """Return the number of rows of a layer's input, or None if it has no batch dimension."""
    if isinstance(input, PackedSequence):
        return int(input.batch_sizes[0])
    if isinstance(module, _WITH_BATCH_FIRST):
        return input.shape[0 if module.batch_first else 1] if input.ndim == 3 else None
    return input.shape[0] if input.ndim > (0 if isinstance(module, nn.Embedding) else 1) else None
