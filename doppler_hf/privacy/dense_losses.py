"""One loss per example for tasks with a varying number of labels per example: pixels, and speech with CTC.

A model's own loss is a mean over the pixels of the whole batch, or a sum over its examples.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.linalg import cross_entropies, no_class
from doppler_hf.privacy.token_losses import IGNORED_LABEL


def ignored_pixel(model: PreTrainedModel) -> int:
    """Return the value that marks pixels without a label."""
    # UperNet has its own name for this setting.
    name = "loss_ignore_index" if hasattr(model.config, "loss_ignore_index") else "semantic_loss_ignore_index"
    return int(getattr(model.config, name))


def pixel_losses(
    logits: Float[Tensor, "batch classes low wide"], labels: Int[Tensor, "batch height width"], *, ignored: int
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of semantic segmentation.

        loss_i = Σ_p [y_ip ≠ ignored] · CE(upsampled logits_ip, y_ip) / Σ_p [y_ip ≠ ignored]

    The mean is over the example's own labelled pixels. With a single class it is the binary cross-entropy, summed over the
    labelled pixels and divided by all, as in transformers. An example without a labelled pixel has loss 0. Logits of any
    resolution are upsampled to that of the labels.

    Example:
        >>> pixel_losses(torch.zeros(1, 2, 1, 1), torch.tensor([[[0, 1], [255, 255]]]), ignored=255)
        tensor([0.6931])
    """
    if logits.ndim != 4 or labels.ndim != 3 or len(labels) != len(logits):
        raise Refusal(
            "wrong-shape",
            "For semantic segmentation, logits must have shape (batch, classes, height, width) and labels (batch, height, "
            f"width); got {logits.ndim} and {labels.ndim} dimensions, or sizes that do not fit. For another task override "
            "compute_per_sample_loss.",
        )
    # Sensitivity: interpolation, mean and number of pixels are an example's own.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
    if logits.shape[1] == 1:
        labelled = ((labels >= 0) & (labels != ignored)).to(logits)
        losses = F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.to(logits), reduction="none")
        return (losses * labelled).flatten(1).mean(dim=1)
    losses = cross_entropies(logits, labels.long(), ignored=ignored)
    # The count is at least 1, because 0/0 would be NaN, and an example without labels would count as a failed one.
    return losses.flatten(1).sum(dim=1) / (labels != ignored).flatten(1).sum(dim=1).clamp(min=1)


def ctc_losses(
    model: nn.Module, inputs: dict[str, Any], labels: Int[Tensor, "batch length"], *, base_model: PreTrainedModel
) -> Float[Tensor, " batch"]:
    """Call a model for connectionist temporal classification (CTC) once and return its loss for each example.

    With `ctc_loss_reduction="mean"` an example's is divided by the number of its labels, as torch does; with more labels
    than frames it is infinite, as in Transformers.
    """
    config, reduction = base_model.config, base_model.config.ctc_loss_reduction
    # Sensitivity: torch's loss of an example reads its own frames, as many as its mask says, and its own labels.
    config.ctc_loss_reduction = "none"
    try:
        outputs = model(**inputs, labels=labels)
    finally:
        config.ctc_loss_reduction = reduction
    losses, classes = outputs.loss, outputs.logits.shape[-1]
    # Sensitivity: torch does not check whether a label is a class. For an invalid label, it would write into the gradient of
    # a neighbour in the batch.
    if bool(((labels >= classes) | (labels < 0) & (labels != IGNORED_LABEL)).any()):
        raise no_class(classes, IGNORED_LABEL, "Map unknown characters to a token of the vocabulary")
    if reduction == "mean":
        losses = losses / ((labels != IGNORED_LABEL) & (labels != config.pad_token_id)).sum(dim=1).clamp(min=1)
    return losses
