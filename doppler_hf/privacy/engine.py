"""Per-sample gradients from Opacus's `GradSampleHooks`, for models as transformers writes them.

Opacus hooks each layer that owns parameters, keeps its input, and forms the per-sample gradient from it and the gradient
of its output. Some habits of transformers break that, and are mended here without a word about any model:

* large vocabularies, whose per-sample gradients are nearly all zeros: for an embedding of its own (not tied to a head) only
  the rows that an example looked up are kept, from the gradient of the layer's output;
* position embeddings looked up once for the whole batch, with indices of shape (1, length): the look-up is repeated for
  each example, so that the gradient keeps its batch dimension (BERT, DistilBERT, GPT-2);
* bare parameters of shape (1, ...) that broadcast over the batch (ViT's `cls_token`): during the forward pass the
  parameter is replaced by one copy per example, whose ordinary gradient is the per-sample gradient;
* gradient checkpointing, which runs the forward hooks twice: what Opacus's counting of calls would miss is collected
  after the backward pass.

A batch dimension is never guessed from a shape: a layer whose input does not start with the batch is an error.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from doppler_hf.privacy.layers import (
    owners_of_bare_parameters,
    refuse_unsupported_layers,
    trainable_of,
    untied_embeddings,
)


class PerSampleGradient(NamedTuple):
    """The gradient of each example's loss with respect to one parameter.

    Attributes:
        values: Shape (batch, *parameter.shape); or, if there are `rows`, (batch, length, dim), all other rows being zero.
        rows: Which row of the parameter each of `values` belongs to, shape (batch, length). A row that an example has
            several times has its whole gradient in one place and zeros in the others, so that norms come out right.
    """

    values: Float[Tensor, "batch ..."]
    rows: Int[Tensor, "batch length"] | None = None


class OpacusEngine:
    """Hooks on a model that give the gradient of each example's loss, until `detach`.

    Args:
        model: The model, not wrapped in anything.

    Raises:
        ValueError: A layer that mixes examples, or one whose per-sample gradient cannot be had; by name.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_unsupported_layers(model)
        self._model = model
        self._batch_size: int | None = None
        self._cleanup = contextlib.ExitStack()
        # Per-example copies of bare parameters, by parameter name: one for each forward pass since the last backward.
        self._copies: dict[str, list[Tensor]] = {}
        # Checkpointing stops recomputing once it has all it needs; a layer may then have run its hook once or twice.
        # Without the early stop every layer of a checkpointed block runs it twice, and the last input is the right one.
        self._cleanup.enter_context(set_checkpoint_early_stop(False))
        # Indices and outputs of the embeddings that are not left to Opacus, by parameter name, likewise.
        self._lookups: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._padding_idx: dict[str, int | None] = {}
        embeddings = untied_embeddings(model)
        bare = owners_of_bare_parameters(model)
        with hidden([p for module in (*embeddings, *bare) for _, p in trainable_of(module)]):
            # Not strict: Opacus's own check is for buffers anywhere, which most transformers have.
            hooks = GradSampleHooks(model, loss_reduction="sum", strict=False)
            self._layers = list(hooks.iterate_submodules(model))
        self._cleanup.callback(hooks.cleanup)
        self._names = {module: name for name, module in model.named_modules()}
        self._hook(model.register_forward_pre_hook(self._note_batch_size, with_kwargs=True, prepend=True))
        for layer in (*self._layers, *embeddings):
            self._hook(layer.register_forward_pre_hook(self._check_input))
        for layer in embeddings:
            self._hook(layer.register_forward_hook(self._record_lookup))
            self._lookups[self._full_name(layer, "weight")] = []
            self._padding_idx[self._full_name(layer, "weight")] = layer.padding_idx
        for module in bare:
            self._hook(module.register_forward_pre_hook(self._substitute_copies))
            self._hook(module.register_forward_hook(self._restore_parameters, always_call=True))
            self._copies.update({self._full_name(module, name): [] for name, _ in trainable_of(module)})

    def detach(self) -> None:
        """Take every hook and attribute off the model."""
        self._forget()
        self._cleanup.close()

    def per_sample_gradients(self, losses: Float[Tensor, " batch"]) -> dict[str, PerSampleGradient]:
        """Back-propagate `losses` and return each example's gradient.

        Args:
            losses: One loss per example, shape (batch,), from one forward pass.

        Returns:
            Parameter name → gradient of each example's loss. A parameter that the forward pass did not use is left out.

        Raises:
            ValueError: A gradient without the batch dimension, or a parameter that has an ordinary gradient but no
                per-sample one; by name.
        """
        batch_size = len(losses)
        if self._batch_size != batch_size:
            raise ValueError(
                f"There are {batch_size} losses, but the model was called with a batch of {self._batch_size}. Call the "
                "model once with the whole micro-batch and return one loss per example."
            )
        try:
            with warnings.catch_warnings():
                # Hooks on a layer whose input needs no gradient, such as an embedding, get the gradient of its output
                # alone, which is all that Opacus uses; torch warns of it in every step.
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                losses.sum().backward()
            gradients = {}
            for name, parameter in self._model.named_parameters():
                if not parameter.requires_grad:
                    continue
                from_hooks = list(opacus_gradients(parameter))
                if parameter.grad is not None and not from_hooks:
                    raise ValueError(
                        f"No per-sample gradient for the parameter {name!r}, although the loss depends on it: it is "
                        "used outside its module's forward. Freeze it with requires_grad_(False)."
                    )
                lookups = [(ids, output.grad) for ids, output in self._lookups.get(name, ()) if output.grad is not None]
                parts = [*from_hooks, *(copy.grad for copy in self._copies.get(name, ()) if copy.grad is not None)]
                if lookups:
                    gradients[name] = looked_up_rows(lookups, padding_idx=self._padding_idx[name])
                elif parts:
                    gradients[name] = self._with_batch(name, parts, parameter=parameter, batch_size=batch_size)
            return gradients
        finally:
            self._forget()

    def _with_batch(self, name: str, parts: list[Tensor], *, parameter: Tensor, batch_size: int) -> PerSampleGradient:
        for part in parts:
            # Opacus adds a part with fewer rows to the first rows of the others; that is a guess, not a gradient.
            if part.shape[0] != batch_size or part.numel() != batch_size * parameter.numel():
                raise ValueError(
                    f"The per-sample gradient of {name!r} has shape {tuple(part.shape)} for a batch of {batch_size} and "
                    f"a parameter of shape {tuple(parameter.shape)}: its layer does not see one row per example. Freeze "
                    "it with requires_grad_(False)."
                )
        total = in_float32(parts[0])
        for part in parts[1:]:
            total = total + part
        return PerSampleGradient(total.reshape(batch_size, *parameter.shape))

    def _forget(self) -> None:
        """Drop what this forward and backward pass left behind: it is raw, and must not meet the next batch."""
        self._batch_size = None
        for layer in self._layers:
            for attribute in ("activations", "max_batch_len"):
                layer.__dict__.pop(attribute, None)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
                parameter.grad_sample = None  # type: ignore[attr-defined]
                parameter._forward_counter = 0  # type: ignore[attr-defined]
                parameter.__dict__.pop("_current_grad_sample", None)
        for copies in self._copies.values():
            copies.clear()
        for lookups in self._lookups.values():
            lookups.clear()

    def _hook(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        self._cleanup.callback(handle.remove)

    def _full_name(self, module: nn.Module, name: str) -> str:
        prefix = self._names[module]
        return f"{prefix}.{name}" if prefix else name

    def _note_batch_size(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
        self._batch_size = tensors[0].shape[0] if tensors else None

    def _check_input(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        if not (layer.training and torch.is_grad_enabled()):
            return None
        name = self._names[layer]
        if self._batch_size is None:
            raise ValueError(f"The layer {name!r} was called on its own; call the model as a whole.")
        if not args or not isinstance(args[0], Tensor):
            raise ValueError(
                f"The layer {name!r} ({type(layer).__name__}) is not called with a tensor as its first argument, so its "
                "per-sample gradient cannot be had. Freeze it with requires_grad_(False)."
            )
        rows = args[0].shape[0] if args[0].ndim > 0 else None
        if rows == self._batch_size:
            return None
        if rows == 1 and isinstance(layer, nn.Embedding):
            return (args[0].expand(self._batch_size, *args[0].shape[1:]), *args[1:])
        raise ValueError(
            f"The layer {name!r} ({type(layer).__name__}) gets an input of shape {tuple(args[0].shape)} for a batch of "
            f"{self._batch_size}: it does not see one row per example, so its per-sample gradient would be a guess. "
            "Freeze it with requires_grad_(False)."
        )

    def _record_lookup(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not (layer.training and torch.is_grad_enabled()):
            return None
        # Cut off here, so that the ordinary gradient of the whole table is never formed.
        leaf = output.detach().requires_grad_()
        self._lookups[self._full_name(layer, "weight")].append((args[0], leaf))
        return leaf

    def _substitute_copies(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._batch_size is None:
            raise ValueError(f"The layer {self._names[module]!r} was called on its own; call the model as a whole.")
        for name, parameter in trainable_of(module):
            copy = parameter.detach().expand(self._batch_size, *parameter.shape[1:]).requires_grad_()
            copy.original = parameter  # type: ignore[attr-defined]
            self._copies[self._full_name(module, name)].append(copy)
            # Straight into the dictionary, so that the parameter keeps its place in the order that optimizers rely on.
            module._parameters[name] = copy  # type: ignore[assignment]

    def _restore_parameters(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name, value in module._parameters.items():
            module._parameters[name] = getattr(value, "original", value)


def opacus_gradients(parameter: Tensor) -> Iterator[Tensor]:
    """Yield what Opacus's hooks left on a parameter: finished sums, one for each use, and the unfinished one."""
    finished = parameter.__dict__.get("grad_sample")
    if finished is not None:
        yield from finished if isinstance(finished, list) else [finished]
    # Its counter of forward calls stands above zero when checkpointing ran them twice, and then it never finishes.
    if "_current_grad_sample" in parameter.__dict__:
        yield parameter.__dict__["_current_grad_sample"]


def in_float32(gradient: Tensor) -> Tensor:
    """Return the gradient in float32 at least: norms and sums must come from the same numbers, and not be rounded."""
    return gradient.float() if gradient.itemsize < 4 else gradient


def looked_up_rows(
    lookups: list[tuple[Int[Tensor, "batch ..."], Float[Tensor, "batch ..."]]], *, padding_idx: int | None
) -> PerSampleGradient:
    """Return the per-sample gradient of an embedding from the gradients of its outputs.

    Args:
        lookups: Indices, shape (batch, ...), and the gradient of what was looked up, shape (batch, ..., dim); one pair
            for each call of the layer.
        padding_idx: The row that is not trained, or None.

    Returns:
        Values of shape (batch, length, dim) and their rows, over all calls.
    """
    batch_size, dim = lookups[0][1].shape[0], lookups[0][1].shape[-1]
    rows = torch.cat([ids.reshape(batch_size, -1) for ids, _ in lookups], dim=1)
    values = torch.cat([in_float32(gradient).reshape(batch_size, -1, dim) for _, gradient in lookups], dim=1)
    if padding_idx is not None:
        values = values.masked_fill((rows == padding_idx).unsqueeze(-1), 0.0)
    # Move every occurrence of a row to its first place in the example.
    first = (rows.unsqueeze(2) == rows.unsqueeze(1)).to(torch.int8).argmax(dim=2)
    merged = torch.zeros_like(values).scatter_add_(1, first.unsqueeze(-1).expand_as(values), values)
    return PerSampleGradient(merged, rows)


@contextlib.contextmanager
def hidden(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Hide parameters while Opacus chooses what to hook."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
