"""The engine before the first step: compare it with plain autograd, attach it, and run it once.

Nothing about the examples that this uses is released: the outcome depends on model, loss and collator.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from doppler_hf.privacy import ClippedGradients, PrivacyStatement, check_per_sample_gradients
from doppler_hf.privacy.batching.probe import Probe
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.training_args import DopplerTrainingArguments

Losses = Callable[[Mapping[str, Any]], Float[Tensor, " batch"]]


@contextlib.contextmanager
def attached_engine(
    model: Any, args: DopplerTrainingArguments, *, statement: PrivacyStatement, losses_of: Losses, probe: Probe
) -> Iterator[ClippedGradients]:
    """Attach the engine of `args` to a model for the duration of the block; see `PrivateRun.attach`.

    Raises:
        ValueError: If the model cannot be trained privately, by the name of the layer or tensor at fault.
    """
    refuse_trainable(model)
    base = without_adapters(model)
    if isinstance(base, PreTrainedModel):
        # The host sets it in the outer config, and a multimodal model reads the inner one. A layer that keeps its past in a
        # cache computes something else at each call, and layers are called more than once.
        base.config.get_text_config().use_cache = args.use_cache
    if args.grad_sample_self_check:
        check_per_sample_gradients(
            model,
            losses_of,
            alone=probe.alone,
            together=probe.together,
            engine=args.grad_sample_engine,
            # Batches of one and of two are rounded differently.
            tolerance=0.1 if args.bf16 or model.dtype == torch.bfloat16 else 1e-3,
        )
    with ClippedGradients(
        model,
        max_grad_norm=statement.per_sample_max_grad_norm,
        clipping=statement.clipping,
        granularity=statement.clipping_granularity,
        engine=args.grad_sample_engine,
    ) as clipped:
        run_once(clipped, model, losses_of=losses_of, inputs=probe.three)
        yield clipped


def refuse_trainable(model: nn.Module) -> None:
    """Refuse a model of which nothing is trained, or whose trained parameters have too small a range."""
    trainable = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError("The model must have a trainable parameter, got none. Set requires_grad for some.")
    half = next((name for name, dtype in trainable.items() if dtype == torch.float16), None)
    if half is not None:
        raise ValueError(
            f"Trained parameters must not be in float16, got {half!r}: gradients of single examples leave its range. Load "
            "the model with dtype=torch.float32, or torch.bfloat16."
        )


def run_once(clipped: ClippedGradients, model: nn.Module, *, losses_of: Losses, inputs: dict[str, Any]) -> None:
    """Run the engine once as in training, dropout included, so that a model that it cannot train is refused now.

    Raises:
        ValueError: If a layer has no per-sample gradients, or the forward pass writes statistics of the data.
    """
    model.train()
    frozen, before = frozen_sums(model), buffers_of(model)
    clipped.backward(losses_of(inputs))
    clipped.reset()
    after = buffers_of(model)
    written = [name for name in after if not same(after[name], before.get(name))]
    saved = model.state_dict().keys()
    if written:
        with torch.no_grad():
            losses_of(of_other_content(inputs))
        # Sensitivity: a buffer that other data of the same shapes leave alone, such as a table of rotary embeddings, holds
        # nothing about an example but how long it is padded; and it is not saved.
        again = buffers_of(model)
        written = [name for name in written if name in saved or not same(after[name], again.get(name))]
    sums = frozen_sums(model)
    written += [name for name in frozen if sums[name] != frozen[name]]
    if written:
        kind = "frozen parameter" if written[0] in frozen else "buffer"
        raise ValueError(
            f"The forward pass writes the {kind} {written[0]!r}, which would keep statistics of the data that are neither "
            "clipped nor noised. Replace the layer by one that keeps none."
        )


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers, saved ones and others, by name."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def frozen_sums(model: nn.Module) -> dict[str, float]:
    """Return the sum of each frozen parameter's elements by name: copies of a large model would not fit."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: float(torch.sum(parameter, dtype=torch.float64)) for name, parameter in frozen.items()}


def same(first: Tensor, second: Tensor | None) -> bool:
    """Return whether two tensors hold the same numbers, of which some may be NaN."""
    if second is None or first.shape != second.shape:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def of_other_content(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of the same shapes, with other numbers: half of each, or for whole numbers the largest of all."""

    def other(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or "mask" in name:
            return value
        return value / 2 if value.is_floating_point() else value.max().expand_as(value).clone()

    return {name: other(name, value) for name, value in inputs.items()}
