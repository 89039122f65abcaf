"""The losses of an example's tokens, without the logits of a whole micro-batch where the head is frozen.

Logits of 4,096 tokens of 151,936 classes take 2.5 GB, their losses and gradients three times that. With LoRA a causal model
needs them for a few tokens at a time: the gradient of a token's loss by the last hidden states is all that is kept.

A trained head stays as it is. Its ghost norm compares all pairs of an example's tokens, so that chunks would compute
their logits once for each other chunk, and once more for the weighted sum; the alternative, the gradient of the head's
weight for each example, takes as much memory as the logits up to some 900 tokens.

Sensitivity. The loss of a token depends on the logits of its example alone, and these on the hidden state at one place.
Chunks are cut along time, and how many there are follows from shapes.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from doppler_hf.privacy.dense_losses import cross_entropies

IGNORED_LABEL: Final = -100  # of transformers' collators and losses, and of torch's cross_entropy
# Logits at a time, 128 MiB in float32: 220 tokens of 151,936 classes. A product of matrices so large is as fast as a whole.
CHUNK: Final = 2**25

_Logits = Callable[[Float[Tensor, "batch time hidden"]], Float[Tensor, "batch time classes"]]


def token_losses(
    logits: Float[Tensor, "batch length classes"], labels: Int[Tensor, "batch length"], *, shift: bool
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a task with one label per token: language models and token classifiers.

        loss_i = Σ_t [y_it ≠ −100] · CE(logits_it, y_it) / Σ_t [y_it ≠ −100]

    The mean is over the example's own labelled tokens, so neither its neighbours nor the length to which they are padded
    change it. An example without a labelled token has loss 0 and a zero gradient. With `shift`, as for causal language
    models, the logits at t are compared with the label at t + 1.

    Example:
        >>> token_losses(torch.zeros(2, 3, 4), torch.tensor([[1, 2, 3], [1, -100, -100]]), shift=True)
        tensor([1.3863, 0.0000])
    """
    return mean_over_tokens(summed_token_losses(logits, labels, shift=shift), labels, shift=shift)


def mean_over_tokens(
    total: Float[Tensor, " batch"], labels: Int[Tensor, "batch length"], *, shift: bool
) -> Float[Tensor, " batch"]:
    """Return sums over the labelled tokens of each example as means."""
    number = (labels[:, int(shift) :] != IGNORED_LABEL).sum(dim=1)
    # At least one: 0/0 would be NaN, and make the clipped sum of all examples NaN.
    return total / number.clamp(min=1)


def summed_token_losses(
    logits: Float[Tensor, "batch length classes"], labels: Int[Tensor, "batch length"], *, shift: bool
) -> Float[Tensor, " batch"]:
    """Return the sum over each row's labelled tokens, of which `token_losses` is the mean; it has the same arguments."""
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            "logits must have shape (batch, length, classes) and labels (batch, length) for a loss per token, got "
            f"{logits.ndim} and {labels.ndim} dimensions or other sizes. Let the collator pad labels as it pads the inputs, "
            f"with {IGNORED_LABEL}."
        )
    if labels.is_floating_point():
        raise ValueError(f"labels of tokens must be indices of classes, got {labels.dtype}. Convert them to torch.long.")
    return _of_each(logits, _moved(labels) if shift else labels).sum(dim=1)


def _moved(labels: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    # The labels move and not the logits, which are too large to be copied.
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def _of_each(logits: Float[Tensor, "batch time classes"], labels: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropies(logits.flatten(0, 1), labels.flatten().long(), ignored=IGNORED_LABEL).view(labels.shape)


@contextlib.contextmanager
def head_in_chunks(
    base_model: PreTrainedModel, labels: Int[Tensor, "batch length"]
) -> Iterator[list[Float[Tensor, "batch length"]]]:
    """Let a causal model, if its logits are many and its head is frozen, compute in the block what it yields.

    The model's body is called as ever, and its head on the first place alone. The head's own forward, with all that it does
    to logits, is called for a few places at a time. `summed_next_token_losses` takes what is yielded.
    """
    found: list[Float[Tensor, "batch length"]] = []
    body, length = base_model.base_model, labels.shape[-1]
    time = max(1, CHUNK // (len(labels) * base_model.config.get_text_config().vocab_size))
    # Without gradients it is an evaluation, whose logits are wanted.
    if time >= length or not torch.is_grad_enabled() or body is base_model or not _is_head_frozen(base_model, body):
        yield found
        return
    forward, own = body.forward, vars(body).get("forward")

    def in_chunks(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        hidden = outputs.get("last_hidden_state") if isinstance(outputs, dict) else None
        if hidden is None or hidden.shape[:2] != labels.shape or not hidden.requires_grad:
            return outputs

        def logits_of(part: Float[Tensor, "batch time hidden"]) -> Float[Tensor, "batch time classes"]:
            outputs["last_hidden_state"] = part
            logits: Tensor = type(base_model).forward(base_model, input_ids=labels[:, : part.shape[1]]).logits
            return logits

        vars(body)["forward"] = lambda *args, **kwargs: outputs
        # Here and not behind the model's forward, which autocast may surround.
        found.append(_InChunks.apply(hidden, _moved(labels), logits_of, time))
        outputs["last_hidden_state"] = hidden[:, :1]
        return outputs

    vars(body)["forward"] = in_chunks
    try:
        yield found
    finally:
        vars(body).pop("forward")
        if own is not None:
            vars(body)["forward"] = own


def summed_next_token_losses(
    found: list[Float[Tensor, "batch length"]],
    logits: Float[Tensor, "batch time classes"],
    labels: Int[Tensor, "batch length"],
) -> Float[Tensor, " batch"]:
    """Return the sum over each row's labelled tokens, from what `head_in_chunks` has found or else from the logits."""
    # Otherwise the head has read something else.
    if len(found) == 1 and logits.shape[1] == 1:
        return found[0].sum(dim=1)
    return summed_token_losses(logits, labels, shift=True)


def _is_head_frozen(model: PreTrainedModel, body: nn.Module) -> bool:
    """Return whether all weights outside of a model's body are whole and frozen, those of a tied head too."""
    layers = itertools.chain.from_iterable(child.parameters() for child in model.children() if child is not body)
    outside = [*layers, *model.parameters(recurse=False)]
    # FSDP would gather a head anew for each chunk.
    return not any(parameter.requires_grad or isinstance(parameter, DTensor) for parameter in outside)


class _InChunks(torch.autograd.Function):
    """The losses of tokens, and their gradients by the hidden states in the same pass: each loss has one of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "batch length hidden"],
        labels: Int[Tensor, "batch length"],
        logits_of: _Logits,
        time: int,
    ) -> Float[Tensor, "batch length"]:
        losses, slopes = [], torch.empty_like(hidden)
        for part, own, slope in zip(*(each.split(time, dim=1) for each in (hidden, labels, slopes)), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                of_part = _of_each(logits_of(leaf), own)
                slope.copy_(torch.autograd.grad(of_part.sum(), leaf)[0])
            losses.append(of_part.detach())
        ctx.save_for_backward(slopes)
        return torch.cat(losses, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch length"]) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad.unsqueeze(2)).to(slopes.dtype), None, None, None
