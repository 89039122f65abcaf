"""The default bound of the private training loss: twice the loss of an untrained model.

Noise on the logged loss grows with the bound L, and a loss above L is logged as L. A training begins near the loss of a
model that has learnt nothing, and goes below. That loss follows from public numbers alone, by the task:

    one class of n, classes of tokens or pixels     ln n              n = num_labels
    several labels at a time, or one class of one   ln 2              a label is there or not
    language models of every kind                   ln V              V = vocab_size
    multiple choice                                 ln 4              as if of four answers; holds for up to 16
    question answering                              ln 512            as if of 512 places; holds for up to 262,144
    speech by CTC                                   5 ln V, 500 ln V  five frames for a label; of reduction "sum" 100 labels
    pairs of answers                                the loss at log-ratios of 0 (`pair_losses.loss_of_untrained`)

A squared error has the unit of its labels, and your own loss has any unit: for these L is 5, which is a guess. If your own
loss trains a language model or a classifier, L is that of its class.
"""

import math
from typing import Any, Final, NamedTuple, Self

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from doppler_hf.privacy.losses import task_of

GUESS: Final = 5.0
_TIMES: Final = 2.0
_ANSWERS: Final = 4
_PLACES: Final = 512
_FRAMES, _LABELS = 5, 100
_CLASSIFIERS: Final = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
)


class LossBound(NamedTuple):
    """A bound L, and the public numbers from which it follows."""

    value: float
    words: str

    @classmethod
    def twice(cls, loss: float, words: str) -> Self:
        """Return the bound for a task in which an untrained model has this loss."""
        return cls(_TIMES * loss, f"2 × {words}")

    @classmethod
    def guessed(cls) -> Self:
        """Return the bound if no public number says how large a loss is."""
        return cls(GUESS, "a guess: nothing public says how large this loss is")


def default_bound(model: Any, *, has_own_loss: bool = False) -> LossBound:
    """Return the bound for a model, without PEFT's wrapper, whose losses are `per_sample_losses` or your own.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> tiny = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        >>> bound = default_bound(BertForSequenceClassification(BertConfig(num_labels=3, **tiny)))
        >>> round(bound.value, 4), bound.words
        (2.1972, '2 × ln 3 (num_labels)')
    """
    if not isinstance(model, PreTrainedModel):
        return LossBound.guessed()
    config, task = model.config, task_of(model)
    if task in ("causal_lm", "seq2seq_lm", "masked_lm", "ctc"):
        words = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        if words is None:
            return LossBound.guessed()
        if task != "ctc":
            return LossBound.twice(_log(words), f"ln {words:,} (vocab_size)")
        frames = _FRAMES if config.ctc_loss_reduction == "mean" else _FRAMES * _LABELS
        return LossBound.twice(frames * _log(words), f"{frames} ln {words:,} (vocab_size)")
    if task == "multiple_choice":
        return LossBound.twice(math.log(_ANSWERS), f"ln {_ANSWERS} (answers)")
    names = {cls.__name__ for cls in type(model).__mro__}
    if not names.isdisjoint(modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES.values()):
        return LossBound.twice(math.log(_PLACES), f"ln {_PLACES} (places)")
    is_classifier = task is not None or any(name.endswith(_CLASSIFIERS) for name in names)
    if has_own_loss and not is_classifier:
        return LossBound.guessed()
    labels, kind = config.num_labels, config.problem_type
    if task is None and (kind == "regression" or (kind is None and labels == 1)):
        return LossBound.guessed()
    if kind == "multi_label_classification" or labels <= 2:
        return LossBound.twice(math.log(2), "ln 2 (yes or no)")
    return LossBound.twice(math.log(labels), f"ln {labels:,} (num_labels)")


def _log(words: int) -> float:
    return math.log(max(2, words))
