"""Fine-tune a masked language model on a GLUE task by the word that it puts into a gap, as `glue.py` does a new head.

    accelerate launch scripts/glue_prompt.py recipes/glue/sst2-lp-adambc-eps3.yaml [--any_field value]

    logits_k = (head(h_gap))[word_k],    "a masterpiece. It was <mask>." with word_0 = terrible, word_1 = great

Its head is pretrained, and a new one would get noise before it has learnt anything. The published figures of private
fine-tuning on GLUE are of it (Li et al., ICLR 2022), with the templates and words of Gao et al. (ACL 2021, Table 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Final

from jaxtyping import Int
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from doppler_hf import DopplerTrainer
from doppler_hf.privacy.losses import classification_losses
from doppler_hf.workloads import glue
from doppler_hf.workloads.hub import refuse_new_layers
from doppler_hf.workloads.launch import launch

GAP: Final = "<gap>"


@dataclass(frozen=True)
class Prompt:
    """A template, and the word that stands for each class.

    Attributes:
        template: Sentences by their number, the gap, and what is said around them.
        words: In the order of the labels.
    """

    template: tuple[int | str, ...]
    words: tuple[str, ...]


_PAIR: Final = (0, "?", GAP, ",", 1)
PROMPTS: Final[Mapping[str, Prompt]] = {
    "cola": Prompt((0, " This is", GAP, "."), ("incorrect", "correct")),
    "mnli": Prompt(_PAIR, ("Yes", "Maybe", "No")),
    "mrpc": Prompt((0, GAP, ",", 1), ("No", "Yes")),
    "qnli": Prompt(_PAIR, ("Yes", "No")),
    "qqp": Prompt((0, GAP, ",", 1), ("No", "Yes")),
    "rte": Prompt(_PAIR, ("Yes", "No")),
    "sst2": Prompt((0, " It was", GAP, "."), ("terrible", "great")),
}


class PromptForSequenceClassification(PreTrainedModel):
    """A masked language model whose word in the gap tells the class.

    Args:
        config: The model's config with `mask_token_id`, the token of the gap, and `label_token_ids`, one for each class.
        masked_lm: The model; by default a new one.
    """

    config_class = PreTrainedConfig
    base_model_prefix = "masked_lm"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = True  # The model inside is made first, and decides.
    accepts_loss_kwargs = False  # Transformers would otherwise take **kwargs to mean that the loss is already scaled.

    def __init__(self, config: PreTrainedConfig, masked_lm: PreTrainedModel | None = None) -> None:
        if masked_lm is None:
            masked_lm = AutoModelForMaskedLM.from_config(config)
        super().__init__(config)
        self.masked_lm = masked_lm
        self._head()
        self.post_init()

    @classmethod
    def from_masked_lm(
        cls, name_or_path: str | PathLike[str], *, prompter: "Prompter", **config_kwargs: Any
    ) -> "PromptForSequenceClassification":
        """Load a pretrained masked language model, or a checkpoint of this class, with the prompter's gap and words.

        Raises:
            ValueError: If layers or head are not pretrained.
        """
        config = AutoConfig.from_pretrained(name_or_path, **config_kwargs)
        config.mask_token_id, config.label_token_ids = prompter.mask_token_id, prompter.label_token_ids
        if config.architectures == [cls.__name__]:
            return cls.from_pretrained(name_or_path, config=config)
        if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
            raise ValueError(
                f"A prompt needs a masked language model, got {name_or_path} of the type {config.model_type!r}. "
                "Give one such as FacebookAI/roberta-base, or run scripts/glue.py."
            )
        masked_lm, found = AutoModelForMaskedLM.from_pretrained(name_or_path, config=config, output_loading_info=True)
        refuse_new_layers(found["missing_keys"], str(name_or_path), prefix=f"{masked_lm.base_model_prefix}.")
        if found["missing_keys"]:
            raise ValueError(
                f"A prompt needs a masked language model with its head, got {name_or_path} without "
                f"{min(found['missing_keys'])}. Give one such as FacebookAI/roberta-base, or run scripts/glue.py."
            )
        return cls(config, masked_lm)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer of the words, to which no adapter is added."""
        return self.masked_lm.get_output_embeddings()

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits of shape (batch, num_labels), and the mean loss if there are labels."""
        kwargs.pop("return_dict", None)
        hidden = self.masked_lm.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        gaps = (input_ids == self.config.mask_token_id).int().argmax(dim=1)[:, None, None]
        # The head reads the gap alone: the words of all tokens would take more memory than all layers.
        words = self._head()(hidden.gather(1, gaps.expand(-1, 1, hidden.shape[-1]))).squeeze(1)
        logits = words[:, self.config.label_token_ids]
        loss = None
        if labels is not None:
            loss = classification_losses(logits, labels, problem_type=self.config.problem_type).mean()
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _head(self) -> nn.Module:
        for name in ("lm_head", "cls"):
            if hasattr(self.masked_lm, name):
                return getattr(self.masked_lm, name)
        raise ValueError(
            f"A prompt needs a model with its head in lm_head or cls, as RoBERTa and BERT have, got a "
            f"{type(self.masked_lm).__name__}. Give another --model_name_or_path, or run scripts/glue.py."
        )


class Prompter:
    """Puts sentences into a task's template, cut, the longest first, so that the tokens are at most `max_length`.

    Raises:
        ValueError: If there is no template for the task, the tokenizer has no gap, or does not know a word.
    """

    def __init__(self, task_name: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> None:
        if task_name not in PROMPTS:
            known = ", ".join(PROMPTS)
            raise ValueError(f"A prompt must be for one of {known}, got {task_name}. Run scripts/glue.py.")
        if None in (tokenizer.mask_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id):
            raise ValueError(
                f"A prompt needs a tokenizer with the tokens mask, cls and sep, got a {type(tokenizer).__name__} "
                "without them. Give a masked language model such as FacebookAI/roberta-base."
            )
        self._prompt, self._tokenizer = PROMPTS[task_name], tokenizer
        self.mask_token_id: int = tokenizer.mask_token_id
        self.label_token_ids = [self._one_token(word) for word in self._prompt.words]
        self._around = [self._around_of(part) for part in self._prompt.template]
        self._room = max_length - 2 - sum(map(len, self._around))
        if self._room < 1:
            raise ValueError(f"--max_seq_length must be longer than the template, got {max_length}. Set 128, say.")

    def __call__(self, *sentences: Sequence[str]) -> dict[str, list[list[int]]]:
        """Return `input_ids` and `attention_mask` for the first sentences, and the second where the task has pairs."""
        rows = [self._tokens_of(row) for row in zip(*sentences, strict=True)]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    def _tokens_of(self, sentences: tuple[str, ...]) -> list[int]:
        first, *others = (sentence.strip() for sentence in sentences)
        if "?" in self._prompt.template:
            first = first.rstrip(" .?!")
        found = [self._encode(text) for text in (first, *(f" {text[:1].lower()}{text[1:]}" for text in others))]
        while sum(map(len, found)) > self._room:
            max(found, key=len).pop()
        parts = [
            found[part] if isinstance(part, int) else around
            for part, around in zip(self._prompt.template, self._around, strict=True)
        ]
        return [self._tokenizer.cls_token_id, *(token for part in parts for token in part), self._tokenizer.sep_token_id]

    def _around_of(self, part: int | str) -> list[int]:
        if isinstance(part, int):
            return []
        return [self.mask_token_id] if part == GAP else self._encode(part)

    def _encode(self, text: str) -> list[int]:
        # A text that has the word for the gap in it has no gap.
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _one_token(self, word: str) -> int:
        tokens = self._encode(f" {word}")
        if len(tokens) != 1 or tokens[0] == self._tokenizer.unk_token_id:
            found = self._tokenizer.convert_ids_to_tokens(tokens)
            raise ValueError(f"The tokenizer must have one token for {word!r}, got {found}. Run scripts/glue.py.")
        return tokens[0]


def load_model(
    args: glue.GlueArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Prompter, PromptForSequenceClassification]:
    """Return what makes tokens of sentences, and the model.

    Raises:
        ValueError: If the model has no pretrained head, or a pooling or frozen layers are set.
    """
    if args.frozen_layers:  # whose numbers of rows hide where the gap is
        raise ValueError(f"frozen_layers must not be set for a prompt, got {args.frozen_layers}. Leave it out.")
    if args.pooling != "model":
        raise ValueError(
            f"pooling must not be set for a prompt, got {args.pooling!r}. Leave it out, or run scripts/glue.py."
        )
    prompter = Prompter(args.task_name, tokenizer, max_length=min(args.max_seq_length, tokenizer.model_max_length))
    entries = glue.config_entries(args)
    return prompter, PromptForSequenceClassification.from_masked_lm(args.model_name_or_path, prompter=prompter, **entries)


PROMPT: Final = (glue.GlueArguments, partial(glue.build, load=load_model))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    launch(DopplerTrainer, PROMPT, argv=argv)


if __name__ == "__main__":
    main()
