"""About the norm of an example's gradient before training, by which automatic clipping leaves small ones small.

Where all gradients are brought to one norm, examples that are fitted pull as hard as others: a classifier runs to the class
that is more frequent. A linear head has f inputs x of about size 1 behind a normalization or tanh. A logit's gradient is
x·(p − y), of norm √f/2 at even odds. That is a public number, and no bound: what is longer is clipped.
"""

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss

from doppler_hf.privacy.clipping.clip_factors import SMALLEST_TYPICAL_NORM
from doppler_hf.privacy.losses import without_adapters


def typical_norm(model: nn.Module, *, has_own_loss: bool) -> float:
    """Return √f/2 for the trained linear head of a classifier of Transformers with its loss, else next to nothing."""
    base = without_adapters(model)
    loss = LOSS_MAPPING.get(base.loss_type) if isinstance(base, PreTrainedModel) else None
    if has_own_loss or loss is not ForSequenceClassificationLoss:
        return SMALLEST_TYPICAL_NORM
    heads = [
        layer.in_features
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad and layer.out_features == base.config.num_labels
    ]
    return heads[-1] ** 0.5 / 2 if heads else SMALLEST_TYPICAL_NORM
