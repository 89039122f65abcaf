"""A sequence classifier on the mean of the token vectors, for sentence encoders, which are trained for this mean.

    logits = W·norm(Σ_t mask_t h_t / Σ_t mask_t) + b,    norm(x) = (x − mean(x)) / std(x) over the coordinates

BERT-like classifiers read the first token, whose vector sentence encoders never trained. A head that fits the encoder
matters more with privacy than without, because the noise leaves no budget to adapt the encoder to a different head. Inputs
of unit scale let the head learn as fast as the adapters at the same learning rate.
"""

from collections.abc import Collection
from os import PathLike
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from doppler_hf.errors import Refusal
from doppler_hf.privacy.losses import classification_losses


class MeanPoolingForSequenceClassification(PreTrainedModel):
    """An encoder of `AutoModel` (by default with new weights) and a linear classifier on its mean token vector."""

    config_class = PreTrainedConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = True  # The encoder is made first, and refuses what it does not support.
    accepts_loss_kwargs = False  # Because of **kwargs, Transformers would otherwise assume that the loss is already scaled.

    def __init__(self, config: PreTrainedConfig, encoder: PreTrainedModel | None = None) -> None:
        if encoder is None:
            encoder = AutoModel.from_config(config)
        super().__init__(config)
        self.encoder = encoder
        # The pooler is removed. It reads the first token, so it would get noise and have no effect.
        if hasattr(self.encoder, "pooler"):
            self.encoder.pooler = None
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.0))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def from_encoder(
        cls, name_or_path: str | PathLike[str], *, ignore_mismatched_sizes: bool = False, **config_kwargs: Any
    ) -> "MeanPoolingForSequenceClassification":
        """Load a pretrained encoder, or a checkpoint of this class, from the hub or a folder.

        An encoder gets a new head.

        Raises:
            ValueError: If the checkpoint lacks weights of the encoder.
        """
        config = AutoConfig.from_pretrained(name_or_path, **config_kwargs)
        if config.architectures == [cls.__name__]:
            return cls.from_pretrained(name_or_path, config=config, ignore_mismatched_sizes=ignore_mismatched_sizes)
        encoder, found = AutoModel.from_pretrained(name_or_path, config=config, output_loading_info=True)
        refuse_new_layers(found["missing_keys"], str(name_or_path))
        return cls(config, encoder)

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Int[Tensor, "batch length"] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits of shape (batch, num_labels), and with labels also their mean loss."""
        kwargs.pop("return_dict", None)
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        pooled = F.layer_norm(masked_mean(hidden, attention_mask), (hidden.shape[-1],))
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = classification_losses(logits, labels, problem_type=self.config.problem_type).mean()
        return SequenceClassifierOutput(loss=loss, logits=logits)


def masked_mean(
    hidden: Float[Tensor, "batch length hidden"], attention_mask: Int[Tensor, "batch length"] | None
) -> Float[Tensor, "batch hidden"]:
    """Return the mean over each example's own tokens, without padding, which depends on the other examples."""
    if attention_mask is None:
        return hidden.mean(dim=1)
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)


def refuse_new_layers(missing: Collection[str], source: str, *, prefix: str = "") -> None:
    """Refuse a checkpoint that lacks weights of the model below its head, because they would start as random numbers."""
    # A pooler counts as part of the head.
    found = [name for name in missing if name.startswith(prefix) and "pooler" not in name]
    if found:
        raise Refusal(
            "checkpoint-without-weights",
            f"The checkpoint {source} lacks {len(found)} weights of the model below its head, such as {min(found)}. They "
            "would start as random numbers. Give another checkpoint, or load this one with the class that saved it "
            "(scripts/glue.py: with the same --pooling).",
        )
