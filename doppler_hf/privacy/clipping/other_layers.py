"""Per-sample gradients of layers without a rule of their own, by the first of two ways that fits.

* **copies**: parameters that act elementwise (any family's RMSNorm, ViT's class token, ConvNeXt's layer scale) are replaced
  by one copy per example, broadcast to its place; the copy's ordinary gradient is the per-sample gradient, at no cost.
  Whether they act elementwise is tested: two examples with different copies must give the outputs that each gives alone;
* **functorch**, which runs the layer's forward once more in the backward pass, one example at a time under `vmap`.

Functions of parameters alone, whose output has no batch, are treated in `copies.output_per_example`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from doppler_hf.privacy.clipping.copies import one_per_example, output_per_example
from doppler_hf.privacy.clipping.gradients import Notes
from doppler_hf.privacy.clipping.layers import checkpointing_off, modes_kept, substituted, trainable_of

# The errors that a layer may raise when it is called in a way for which it was not written.
LAYER_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, AttributeError)


# Parameter → the shape in which one copy per example broadcasts with the inputs of its layer.
_Copies = dict[str, tuple[int, ...]]


class LayerWithoutRule:
    """Replaces the forward of one layer, in the way that works at its first call."""

    def __init__(self, name: str, module: nn.Module, notes: Notes, *, forward: Callable[..., Any]) -> None:
        self._name, self.module, self.notes, self._forward = name, module, notes, forward
        # The keys are the dimensions of the inputs, and which of these have size 1. A layer may be called with tokens and
        # with their mean, and with a single token one cannot see how many copies are used.
        self._copies: dict[tuple[Any, ...], _Copies | None] = {}
        self._unbatched: set[tuple[int, ...]] = set()  # dimensions of inputs without a batch

    @property
    def fallback(self) -> str:
        """How the gradient is computed, and its cost; empty before the first call."""
        kind = type(self.module).__name__
        size = f"{sum(p.numel() for _, p in trainable_of(self.module)) * 4 / 2**20:.3g} MiB for each record"
        if self._unbatched:
            return f"{kind}: repeated for each record; {size}"
        if None not in self._copies.values():
            return f"{kind}: one copy of its vectors for each record, free" if self._copies else ""
        return f"{kind}: functorch, one more forward pass of the layer; {size}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer's output, and note its per-sample gradient in the backward pass."""
        values, spec = pytree.tree_flatten((args, kwargs))
        sizes = {len(value) if value.ndim else 1 for value in values if isinstance(value, Tensor)}
        own = dict(trainable_of(self.module))
        dimensions = tuple(value.ndim for value in values if isinstance(value, Tensor))
        # Sensitivity: if inputs with these numbers of dimensions were once without a batch, as in the start check, they
        # count as without a batch in every step. A later batch may have as many examples as there are positions, and would
        # look like positions.
        if dimensions in self._unbatched or self.notes.batch_size not in sizes or sizes - {1, self.notes.batch_size}:
            return self._without_batch(own, dimensions, *args, **kwargs)
        kind = tuple(tuple(size == 1 for size in value.shape[1:]) for value in values if isinstance(value, Tensor))
        if kind not in self._copies:
            if self._has_one_row(*args, **kwargs):
                return self._without_batch(own, dimensions, *args, **kwargs)
            self._copies[kind] = self._try_copies(values, spec)
        copies = self._copies[kind]
        if copies is not None:
            per_example = {name: one_per_example(self.notes, own[name], shape) for name, shape in copies.items()}
            try:
                with substituted(self.module, per_example):
                    return self._forward(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except LAYER_ERRORS:
                # Copies do not fit all lengths, for example if the layer takes only the first positions of a table.
                self._copies[kind] = None
        with substituted(self.module, {name: parameter.detach() for name, parameter in own.items()}):
            outputs, output_spec = pytree.tree_flatten(self._forward(*args, **kwargs))
        seen = [index for index, output in enumerate(outputs) if is_floating(output)]
        taps = _Tap.apply(self, spec, values, len(own), *own.values(), *(outputs[index] for index in seen))
        for index, tap in zip(seen, taps, strict=True):
            outputs[index] = tap
        return pytree.tree_unflatten(outputs, output_spec)

    @torch.no_grad()
    def _has_one_row(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether all examples share the output, as of positions, of which there may be as many as examples."""
        with self.notes.unwatched(), modes_kept(self.module):
            self.module.eval()  # Dropout would draw.
            outputs = [output for output in pytree.tree_leaves(self._forward(*args, **kwargs)) if is_floating(output)]
        return self.notes.batch_size != 1 and {len(output) if output.ndim else 0 for output in outputs} == {1}

    def _without_batch(self, own: Mapping[str, nn.Parameter], dimensions: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        def output_of(parameters: Mapping[str, Tensor]) -> Any:
            with self.notes.unwatched(), substituted(self.module, parameters):
                output = self._forward(*args, **kwargs)
            # Learned positions of shape (length, dimension), as Blenderbot's, are broadcast over the batch.
            is_positions = isinstance(self.module, nn.Embedding) and isinstance(output, Tensor) and output.ndim == 2
            return output.unsqueeze(0) if is_positions else output

        inputs = pytree.tree_leaves((args, kwargs))
        with torch.no_grad():
            output = output_of(own)
        trained = {parameter for parameter in self.module.parameters() if parameter.requires_grad}
        if (
            trained > {*own.values()}  # The parameters of inner layers would get no gradient.
            or not isinstance(output, Tensor)
            or len(output) != 1
            or any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        ):
            # The parameters get an ordinary gradient, and the engine refuses them by name.
            return self._forward(*args, **kwargs)
        self.notes.repeated.append(self._name)
        self._unbatched.add(dimensions)
        return output_per_example(self.notes, own, output_of)

    # --- copies -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _try_copies(self, values: Sequence[Any], spec: Any) -> _Copies | None:
        """Return how copies of the parameters broadcast with the inputs, or None if they do not."""
        rows = self.notes.batch_size
        one = [self._probe(value) for value in values]
        two = [
            torch.cat([probe, probe]) if has_rows(value, rows) else value for value, probe in zip(values, one, strict=True)
        ]
        ndim = max(value.ndim for value in values if isinstance(value, Tensor))
        own = {name: parameter.detach() for name, parameter in trainable_of(self.module)}
        # The second copy has different numbers, in a different order. With two equal copies it would not show if a copy
        # reached the wrong example.
        other = {
            name: 1.5 * parameter.flip(-1) + 0.5 if parameter.ndim else parameter + 1 for name, parameter in own.items()
        }
        copies = {
            # A first dimension of 1 is the place of the batch; otherwise dimensions are aligned at the end.
            name: tuple(p.shape[1:]) if p.ndim and p.shape[0] == 1 else (1,) * max(ndim - 1 - p.ndim, 0) + tuple(p.shape)
            for name, p in own.items()
        }

        both = {name: torch.stack([p.view(copies[name]), other[name].view(copies[name])]) for name, p in own.items()}
        with (
            warnings.catch_warnings(action="ignore"),
            self.notes.unwatched(),
            torch.autocast(next(iter(own.values())).device.type, enabled=False),
            modes_kept(self.module),
        ):
            self.module.eval()  # Dropout would make any two calls differ.
            try:
                alone = [self._outputs(one, spec, parameters) for parameters in (own, other)]
                together = self._outputs(two, spec, both)
            except torch.OutOfMemoryError:
                raise
            except LAYER_ERRORS:
                return None
        fit = {len(together)} == {*map(len, alone)} != {0} and all(
            len(output) == 2 and is_close(output, torch.cat(singles))
            for output, *singles in zip(together, *alone, strict=True)
        )
        return copies if fit else None

    def _probe(self, value: Any) -> Any:
        """Return one example, of noise if possible, so that the choice does not depend on the data."""
        if not has_rows(value, self.notes.batch_size):
            return value
        if not value.is_floating_point():
            return value[:1]
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, *value.shape[1:], generator=generator).to(value)

    def _outputs(self, values: Sequence[Any], spec: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        args, kwargs = pytree.tree_unflatten(list(values), spec)
        with substituted(self.module, parameters):
            outputs = pytree.tree_leaves(self._forward(*args, **kwargs))
        return [output for output in outputs if is_floating(output) and output.ndim > 0]

    # --- functorch ------------------------------------------------------------------------------------------------

    def per_sample_gradients(
        self, values: Sequence[Any], spec: Any, gradients: Sequence[Tensor], *, rows: int | None
    ) -> Mapping[str, Float[Tensor, "batch ..."]]:
        """Return the gradient of each example by parameter, from the gradients of the outputs."""
        module = self.module
        own = {name: parameter.detach() for name, parameter in trainable_of(module)}
        batched = [index for index, value in enumerate(values) if has_rows(value, rows)]

        def gradient_of_one(of_inputs: list[Tensor], of_outputs: list[Tensor]) -> dict[str, Tensor]:
            def outputs(parameters: dict[str, Tensor]) -> list[Tensor]:
                filled = list(values)
                for index, value in zip(batched, of_inputs, strict=True):
                    filled[index] = value.unsqueeze(0)
                args, kwargs = pytree.tree_unflatten(filled, spec)
                with substituted(module, parameters), self.notes.unwatched():
                    outputs = pytree.tree_leaves(self._forward(*args, **kwargs))
                return [output.squeeze(0) for output in outputs if is_floating(output)]

            pull_back = torch.func.vjp(outputs, own)[1]
            return pull_back(of_outputs)[0]

        def gradients_of_rows() -> Mapping[str, Tensor]:
            with warnings.catch_warnings(action="ignore"):  # Vmap warns about slow operations.
                # Vmap raises an error if the layer draws random numbers: a second draw of dropout would not be the one whose
                # loss is differentiated.
                return torch.func.vmap(gradient_of_one)([values[index] for index in batched], list(gradients))

        try:
            return gradients_of_rows()
        except torch.OutOfMemoryError:
            raise
        except LAYER_ERRORS as error:
            self.notes.failed[self._name] = error  # The engine raises one error for all such layers together.
        # Functorch does not take gradient checkpointing of inner layers. If it fails without that, too, the second error is
        # the one to mend.
        with checkpointing_off(module) as switched:
            if switched:
                try:
                    gradients_of_rows()
                    self.notes.fail_when_checkpointed.add(self._name)
                except LAYER_ERRORS as error:
                    self.notes.failed[self._name] = error
        return {}


class _Tap(torch.autograd.Function):
    """The identity, whose backward pass reads the gradients of a layer's outputs."""

    @staticmethod
    def forward(
        ctx: Any, layer: LayerWithoutRule, spec: Any, values: list[Any], num_parameters: int, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        # The number of rows is kept here: in the backward pass the notes have the rows of the whole model, but this call may
        # have the rows of windows.
        ctx.layer, ctx.spec, ctx.num_parameters, ctx.rows = layer, spec, num_parameters, layer.notes.batch_size
        ctx.where = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(*(values[index] for index in ctx.where))
        # The outputs are copies, because later layers may change them in place.
        return tuple(output.clone() for output in rest[num_parameters:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values = list(ctx.others)
        for index, value in zip(ctx.where, ctx.saved_tensors, strict=True):
            values[index] = value
        for name, value in ctx.layer.per_sample_gradients(values, ctx.spec, gradients, rows=ctx.rows).items():
            ctx.layer.notes.note_rows(ctx.layer.module.get_parameter(name), value)
        return (None,) * (4 + ctx.num_parameters) + gradients


def has_rows(value: Any, number: int | None) -> bool:
    """Return whether a value is a tensor of that many rows."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == number


def is_floating(value: Any) -> bool:
    """Return whether a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_close(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if first.shape != second.shape:
        return False
    rounding = 100 * torch.finfo(first.dtype).eps
    largest = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=rounding, atol=rounding * largest)
