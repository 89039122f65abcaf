"""One loss per example, over that example alone.

A model's own loss is a mean over the batch, and for language models over the batch's tokens. A long example then takes
weight from a short one, so that an example's contribution depends on the others and clipping bounds nothing. Here each
example's loss depends on its own logits and labels. A mean over an example's own tokens is allowed; a division by
`num_items_in_batch`, or by any other count of the batch, is not.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]

IGNORED_LABEL = -100  # of transformers' collators and losses, and of torch's cross_entropy


def classification_losses(
    logits: Float[Tensor, "batch labels"],
    labels: Shaped[Tensor, "batch ..."],
    *,
    problem_type: ProblemType | None = None,
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a sequence or image classification task.

    Cross-entropy for a single label, the mean over the labels of the binary cross-entropy for several, and the mean of
    the squared error for regression. transformers' classification heads average the same losses over the batch.

    Args:
        logits: Shape (batch, num_labels).
        labels: Class indices, shape (batch,); or 0/1 per label or target values, shape (batch, num_labels), where a
            single target may have shape (batch,).
        problem_type: As in the model's config; None infers it as transformers does: one logit is a regression, integer
            labels are classes, anything else is multi-label.

    Returns:
        Losses, shape (batch,), in float32 or better.

    Raises:
        ValueError: If the shapes do not fit each other, or the problem type is unknown.

    Example:
        >>> classification_losses(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        tensor([0.6931, 0.6931, 0.6931])
    """
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        elif labels.is_floating_point():
            problem_type = "multi_label_classification"
        else:
            problem_type = "single_label_classification"
    if problem_type not in get_args(ProblemType):
        raise ValueError(f"problem_type must be one of {', '.join(get_args(ProblemType))}, got {problem_type!r}.")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    expected = (len(logits),) if problem_type == "single_label_classification" else tuple(logits.shape)
    if problem_type == "regression" and labels.ndim == 1:
        labels = labels.unsqueeze(-1)
    if tuple(labels.shape) != expected:
        raise ValueError(
            f"{problem_type} with logits of shape {tuple(logits.shape)} must have labels of shape {expected}, got "
            f"{tuple(labels.shape)}. For another task set problem_type in the model's config."
        )
    if problem_type == "regression":
        return F.mse_loss(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)


def token_losses(
    logits: Float[Tensor, "batch length classes"], labels: Int[Tensor, "batch length"], *, shift: bool
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a task with one label per token: language models and token classifiers.

        loss_i = Σ_t [y_it ≠ −100] · CE(logits_it, y_it) / Σ_t [y_it ≠ −100]

    The mean is over the example's own labelled tokens, so neither its neighbours nor the length to which they are padded
    change it. An example without a labelled token has loss 0 and a zero gradient.

    Args:
        logits: Shape (batch, length, classes).
        labels: Token or class indices, shape (batch, length); −100 is no label.
        shift: True for causal language models, whose labels are their inputs: the logits at t are compared with the label
            at t + 1. False if labels are aligned with logits: seq2seq, masked language models, token classification.

    Returns:
        Losses, shape (batch,), in float32 or better.

    Raises:
        ValueError: If the shapes do not fit each other, or labels are no integers.

    Example:
        >>> token_losses(torch.zeros(2, 3, 4), torch.tensor([[1, 2, 3], [1, -100, -100]]), shift=True)
        tensor([1.3863, 0.0000])
    """
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            "logits must have shape (batch, length, classes) and labels (batch, length) for a loss per token, got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}. Let the collator pad labels as it pads the inputs, with "
            f"{IGNORED_LABEL}."
        )
    if labels.is_floating_point():
        raise ValueError(f"labels of tokens must be indices of classes, got {labels.dtype}. Convert them to torch.long.")
    if shift:  # The labels move and not the logits, which are too large to be copied.
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED_LABEL, reduction="none")
    # At least one: 0/0 would be NaN, and make the clipped sum of all examples NaN.
    return flat.view(labels.shape).sum(dim=1) / (labels != IGNORED_LABEL).sum(dim=1).clamp(min=1)
