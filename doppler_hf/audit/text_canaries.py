"""Canaries for a language model: rows with a random start and a random code, and how likely the model finds each code.

A code that the model has memorized is likelier behind its start than other codes, which nobody put into the data. Its rank
among them shows how much (Carlini et al. 2019, *The Secret Sharer*, https://arxiv.org/abs/1802.08232).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from doppler_hf.audit.canaries import ORDINARY, chosen_rows
from doppler_hf.errors import Refusal
from doppler_hf.privacy.losses import task_of, without_adapters
from doppler_hf.privacy.token_losses import IGNORED_LABEL

START_TOKENS: Final = 6
CODE_TOKENS: Final = 6
CODES: Final = 1000  # a canary's own one, and the alternatives
_CODES_AT_ONCE: Final = 64  # Their logits may have 150,000 words.

TOKENS: Final = "input_ids"
# Columns with a number for each token → the number for tokens of the start, and of the code. The start is given, and the
# code is learnt, as with a prompt and its completion.
_VALUES: Final[Mapping[str, tuple[int, int]]] = {
    "labels": (IGNORED_LABEL, 0),  # The label of a token of the code is the token.
    "attention_mask": (1, 1),
    "completion_mask": (0, 1),
    "assistant_masks": (0, 1),
    "token_type_ids": (0, 0),
    "special_tokens_mask": (0, 0),
}


class TextCanary(NamedTuple):
    """A start and its code, which are in that many rows, and the codes with which the code is compared.

    Attributes:
        insertions: The number of rows.
        start: Tokens, shape (START_TOKENS,).
        codes: Tokens, shape (CODES, CODE_TOKENS). The first code is the canary's own.
    """

    insertions: int
    start: Int[np.ndarray, " start"]
    codes: Int[np.ndarray, "codes tokens"]


class Reading(NamedTuple):
    """What a model makes of the codes of a canary.

    Attributes:
        losses: The negative log-likelihood of each code behind the start, shape (codes,).
        is_repeated: Whether greedy generation from the start writes the first code word for word.
    """

    losses: Float[np.ndarray, " codes"]
    is_repeated: bool

    @property
    def rank(self) -> int:
        """The place of the first code, the likeliest first; 1 is the first place. A tie, or no number, counts against it."""
        return int(1 + np.sum(~(self.losses[1:] > self.losses[0])))


def new_canaries(
    model: Any, tokenizer: Any, *, insertions: Sequence[int], generator: np.random.Generator
) -> list[TextCanary]:
    """Return a canary with random tokens for each number of insertions; special tokens are left out.

    Raises:
        Refusal: If the model is no causal language model.
    """
    base = without_adapters(model)
    if task_of(base) != "causal_lm":
        raise Refusal(
            "no-language-model",
            f"Canaries made of text need a causal language model of Transformers; got {type(base).__name__}. For another "
            "model, use --canaries, whose attack works for any model.",
        )
    size = base.get_input_embeddings().weight.shape[0]
    ends = base.config.bos_token_id, base.config.eos_token_id, base.config.pad_token_id
    special = {token for each in ends if each is not None for token in np.atleast_1d(each).tolist()}  # there may be several
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        size, special = min(size, len(tokenizer)), special | {*tokenizer.all_special_ids}
    tokens = np.array([token for token in range(size) if token not in special])
    return [
        TextCanary(number, generator.choice(tokens, size=START_TOKENS), generator.choice(tokens, size=(CODES, CODE_TOKENS)))
        for number in insertions
    ]


def with_canaries(
    dataset: Any, canaries: Sequence[TextCanary], *, unit_column: str | None, generator: np.random.Generator
) -> Any:
    """Return the training set and, behind its rows, each canary in as many rows as it says.

    In all other columns such a row is a copy of a random row.
    """
    from datasets import Dataset, concatenate_datasets

    copies = [canary for canary in canaries for _ in range(canary.insertions)]
    rows = np.concatenate([np.arange(len(dataset)), generator.integers(len(dataset), size=len(copies))])
    # Privacy: each inserted row is a record, or a user, of its own. So ε covers the coin of a canary that is in one row or
    # none. It does not cover what the ten or hundred rows of another canary have in common.
    numbers = np.concatenate([np.full(len(dataset), ORDINARY), np.arange(len(copies))])
    chosen = chosen_rows(dataset, rows=rows, canaries=numbers, unit_column=unit_column)
    if TOKENS not in chosen.column_names:
        raise Refusal(
            "no-tokens-column",
            f"Canaries made of text need a training set with a column {TOKENS!r} of tokens; got the columns "
            f"{', '.join(map(repr, chosen.column_names))}. Tokenize the texts before training, as with dataset.map.",
        )
    plain, shape = chosen.with_format(None), chosen.format
    templates = plain.select(range(len(dataset), len(chosen))).to_list()
    _refuse_other_token_columns(templates)
    texts = [_with_tokens(row, canary) for row, canary in zip(templates, copies, strict=True)]
    planted = concatenate_datasets([plain.select(range(len(dataset))), Dataset.from_list(texts, features=plain.features)])
    return planted.with_format(shape["type"], shape["columns"], shape["output_all_columns"], **shape["format_kwargs"])


def _refuse_other_token_columns(rows: Sequence[Mapping[str, Any]]) -> None:
    for name in rows[0].keys() - _VALUES.keys() - {TOKENS}:
        if all(isinstance(row[name], list) and len(row[name]) == len(row[TOKENS]) for row in rows):
            raise Refusal(
                "unknown-column-of-tokens",
                f"Column {name!r} of the training set has a value for each token, and the audit does not know which values "
                "the tokens of a canary should have. If training does not need the column, remove it.",
            )


def _with_tokens(row: Mapping[str, Any], canary: TextCanary) -> dict[str, Any]:
    start, code = canary.start.tolist(), canary.codes[0].tolist()
    values = {
        name: [in_start] * len(start) + (code if name == "labels" else [in_code] * len(code))
        for name, (in_start, in_code) in _VALUES.items()
        if isinstance(row.get(name), list)
    }
    return {**row, **values, TOKENS: start + code}


def read_canary(model: Any, canary: TextCanary) -> Reading:
    """Return what the model, which is switched to evaluation, makes of a canary."""
    device = next(model.parameters()).device
    start, codes = (torch.from_numpy(tokens).to(device) for tokens in (canary.start, canary.codes))
    losses, is_greedy = read_codes(model.eval(), start, codes)
    return Reading(losses.cpu().numpy(), bool(is_greedy[0]))


@torch.inference_mode()
def read_codes(
    model: Any, start: Int[Tensor, " start"], codes: Int[Tensor, "codes tokens"]
) -> tuple[Float[Tensor, " codes"], Bool[Tensor, " codes"]]:
    """Return the negative log-likelihood of each code behind a start, and whether greedy generation writes the code."""
    losses, are_greedy = [], []
    for some in codes.split(_CODES_AT_ONCE):
        # Without a cache, which some models lack. Nothing is padded, and a trained prompt comes before the start.
        ids = torch.cat([start.expand(len(some), -1), some], dim=1)
        logits = model(ids).logits[:, -some.shape[1] - 1 : -1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), some.flatten(), reduction="none").view_as(some).sum(1))
        # If every token of the code is the likeliest one behind those before it, greedy generation writes them all.
        are_greedy.append((logits.argmax(-1) == some).all(1))
    return torch.cat(losses), torch.cat(are_greedy)
