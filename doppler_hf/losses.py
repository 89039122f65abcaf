"""One loss per example, over that example alone.

A model's own loss is a mean over the batch, and for some tasks over the batch's tokens: there one example changes the
weight of another's gradient, and clipping bounds nothing. Here each example's loss depends on its own logits and label.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


def classification_losses(
    logits: Float[Tensor, "batch labels"],
    labels: Shaped[Tensor, "batch ..."],
    *,
    problem_type: ProblemType | None = None,
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a sequence or image classification task.

    Cross-entropy for a single label, the mean over the labels of the binary cross-entropy for several, and the mean of
    the squared error for regression: what transformers' classification heads average over the batch.

    Args:
        logits: Shape (batch, num_labels).
        labels: Class indices, shape (batch,); or 0/1 per label or target values, shape (batch, num_labels), where a
            single target may have shape (batch,).
        problem_type: As in the model's config; None infers it as transformers does: one logit is a regression, integer
            labels are classes, anything else is multi-label.

    Returns:
        Losses, shape (batch,), in float32 or better.

    Raises:
        ValueError: Shapes that do not fit each other, or an unknown problem type.

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
            f"{problem_type} with logits of shape {tuple(logits.shape)} needs labels of shape {expected}, got "
            f"{tuple(labels.shape)}. Set problem_type in the model's config if it is another task."
        )
    if problem_type == "regression":
        return F.mse_loss(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)
