"""The loss of each example over its tokens, computed without the logits of a whole micro-batch.

Logits of 4,096 tokens of 151,936 classes take 2.5 GB, their losses and gradients three times that. A causal model needs them
for a few tokens at a time. With a frozen head, as in LoRA, the gradient of each token's loss by its last hidden state is
kept instead. With a trained one the backward pass computes the logits again, and the engine adds up the head's gradient of
each example; where that is larger than the logits, all stays as it is.

Sensitivity. The loss of a token depends on the logits of its example alone, and these on the hidden state at one place.
Chunks are cut along time, and how many there are follows from shapes.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.linalg import cross_entropies

IGNORED_LABEL: Final = -100  # the value in Transformers' collators and losses (CTC, too), and in torch's cross_entropy
# Logits that are computed at a time: 128 MiB in float32, or 220 tokens of 151,936 classes. Larger products are not faster.
CHUNK: Final = 2**25

_Losses = Callable[[Float[Tensor, "batch time hidden"], Int[Tensor, "batch time"]], Float[Tensor, "batch time"]]


def token_losses(
    logits: Float[Tensor, "batch time classes"],
    labels: Int[Tensor, "batch length"],
    *,
    found: Sequence[Float[Tensor, "batch length"]] = (),
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a task with one label per token: language models and token classifiers.

        loss_i = Σ_t [y_it ≠ −100] · CE(logits_it, y_it) / Σ_t [y_it ≠ −100]

    The mean is over the example's own labelled tokens, so neither its neighbours nor the length to which they are padded
    change it. An example without a labelled token has loss 0 and a zero gradient. Causal language models have
    `next_labels`, and what `head_in_chunks` has found of their losses.

    Example:
        >>> token_losses(torch.zeros(2, 3, 4), next_labels(torch.tensor([[1, 2, 3], [1, -100, -100]])))
        tensor([1.3863, 0.0000])
    """
    # The count is at least 1, because 0/0 would be NaN, and make the clipped sum of all examples NaN.
    return summed_token_losses(logits, labels, found=found) / (labels != IGNORED_LABEL).sum(dim=1).clamp(min=1)


def summed_token_losses(
    logits: Float[Tensor, "batch time classes"],
    labels: Int[Tensor, "batch length"],
    *,
    found: Sequence[Float[Tensor, "batch length"]] = (),
) -> Float[Tensor, " batch"]:
    """Return the sum of losses over each row's labelled tokens; `token_losses`, with the same arguments, has the mean."""
    # If the sizes differ, the head was called with other inputs.
    if len(found) == 1 and logits.shape[1] == 1:
        return found[0].sum(dim=1)
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise Refusal(
            "wrong-shape",
            "For a loss per token, logits must have shape (batch, length, classes) and labels (batch, length); got "
            f"{logits.ndim} and {labels.ndim} dimensions, or sizes that do not fit. Let the collator pad the labels like "
            f"the inputs, with {IGNORED_LABEL}.",
        )
    if labels.is_floating_point():
        raise Refusal(
            "labels-not-indices",
            f"Labels of tokens must be indices of classes; got {labels.dtype}. Convert them to torch.long.",
        )
    return _per_token(logits, labels).sum(dim=1)


def next_labels(labels: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """Return at each place the label of the next token, which a causal language model predicts there."""
    # The labels are shifted instead of the logits, which are too large to be copied.
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)


def _per_token(
    logits: Float[Tensor, "batch time classes"], labels: Int[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropies(logits.flatten(0, 1), labels.flatten().long(), ignored=IGNORED_LABEL).view(labels.shape)


@contextlib.contextmanager
def head_in_chunks(
    base_model: PreTrainedModel, labels: Int[Tensor, "batch length"]
) -> Iterator[list[Float[Tensor, "batch length"]]]:
    """Let a causal model, if its logits are many, compute in the block what it yields, given its `next_labels`.

    The model's body is called as ever, and its head on the first place alone. The head's own forward, with all that it does
    to logits, is called for a few places at a time. `token_losses` takes what is yielded. Without a known number of classes,
    nothing changes.

    Sensitivity: the body reads whole examples, as before; a chunk has the same places of each, and no loss another's.
    """
    found: list[Float[Tensor, "batch length"]] = []
    body, length, config = base_model.base_model, labels.shape[-1], base_model.config.get_text_config()
    time = max(1, CHUNK // (len(labels) * config.vocab_size)) if hasattr(config, "vocab_size") else length
    # These are the weights of the head, including those that it shares with the body.
    layers = itertools.chain.from_iterable(child.parameters() for child in base_model.children() if child is not body)
    outside = [*layers, *base_model.parameters(recurse=False)]
    # Without gradients this is an evaluation, which needs the logits. FSDP would gather the head again for each chunk.
    if (
        time >= length
        or not torch.is_grad_enabled()
        or body is base_model
        or any(isinstance(parameter, DTensor) for parameter in outside)
    ):
        yield found
        return
    is_trained, forward = any(parameter.requires_grad for parameter in outside), body.forward

    def in_chunks(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        hidden = outputs.get("last_hidden_state") if isinstance(outputs, dict) else None
        if hidden is None or hidden.shape[:2] != labels.shape or (is_trained and length < hidden.shape[2]):
            return outputs

        def losses_of(part: Float[Tensor, "batch time hidden"], own: Int[Tensor, "batch time"]) -> Tensor:
            outputs["last_hidden_state"] = part
            with _forward_of(body, lambda *args, **kwargs: outputs):
                return _per_token(type(base_model).forward(base_model, input_ids=own).logits, own)

        # The losses are computed here, and not after the model's forward, which may be inside autocast.
        if is_trained:
            parts = zip(hidden.split(time, dim=1), labels.split(time, dim=1), strict=True)
            again = functools.partial(checkpoint, losses_of, use_reentrant=False, preserve_rng_state=False)
            found.append(torch.cat([again(*part) for part in parts], dim=1))
        else:
            found.append(_InChunks.apply(hidden, labels, losses_of, time))
        # The model continues with its head, but nobody reads these logits.
        outputs["last_hidden_state"] = hidden[:, :1]
        return outputs

    with _forward_of(body, in_chunks):
        yield found


@contextlib.contextmanager
def _forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    vars(module)["forward"] = function
    try:
        yield
    finally:
        vars(module).pop("forward")
        if before is not None:
            vars(module)["forward"] = before


class _InChunks(torch.autograd.Function):
    """Computes the losses of tokens and, in the same pass, their gradients with respect to the hidden states."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "batch length hidden"],
        labels: Int[Tensor, "batch length"],
        losses_of: _Losses,
        time: int,
    ) -> Float[Tensor, "batch length"]:
        losses, slopes = [], torch.empty_like(hidden)
        for part, own, slope in zip(*(each.split(time, dim=1) for each in (hidden, labels, slopes)), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                of_part = losses_of(leaf, own)
                slope.copy_(torch.autograd.grad(of_part.sum(), leaf)[0])
            losses.append(of_part.detach())
        ctx.save_for_backward(slopes)
        return torch.cat(losses, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch length"]) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad.unsqueeze(2)).to(slopes.dtype), None, None, None
