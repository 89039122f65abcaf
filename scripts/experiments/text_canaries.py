"""Canaries in the texts of a language model: sentences with a random code, and how likely the trained model finds each code.

A code that the model has memorized is likelier than others. Its rank among codes that were not in the texts shows how much
(Carlini et al., *The Secret Sharer*, USENIX Security 2019).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from doppler_hf.audit.text_canaries import read_codes
from scripts.training.labelled_texts import prompt_text

INSERTIONS: Final = (1, 10, 100)
CANARIES: Final = 4  # of each number of insertions
ALTERNATIVES: Final = 999
DIGITS: Final = 6
NAMES: Final = ("anna", "bert", "carla", "david", "emma", "frank", "grace", "henry", "irene", "jack", "karen", "louis")


class Canary(NamedTuple):
    """A sentence with a code, and how often it is in the private texts."""

    start: str
    code: str
    insertions: int

    @property
    def text(self) -> str:
        """The whole sentence."""
        return f"{self.start} {self.code}"


def canaries_of(seed: int) -> list[Canary]:
    """Return canaries with codes that follow the seed."""
    generator = np.random.default_rng(seed)
    names = iter(NAMES)
    return [
        Canary(f"the secret code of {next(names)} is", code_of(generator), insertions)
        for insertions in INSERTIONS
        for _ in range(CANARIES)
    ]


def code_of(generator: np.random.Generator) -> str:
    """Return random digits."""
    return " ".join(map(str, generator.integers(0, 10, DIGITS)))


def ranks(model_folder: Path, canaries: Sequence[Canary], *, label: str, seed: int) -> list[int]:
    """Return the place of each canary among alternatives with other codes, the likeliest first; 1 is the first place."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)
    generator = np.random.default_rng([seed, 1])
    places = []
    for canary in canaries:
        codes = [canary.code, *(code_of(generator) for _ in range(ALTERNATIVES))]
        own, *others = losses_of(model, tokenizer, f"{prompt_text(label)} {canary.start}", codes)
        places.append(1 + sum(other < own for other in others))
    return places


def losses_of(model: Any, tokenizer: Any, start: str, codes: Sequence[str]) -> list[float]:
    """Return the negative log-likelihood of each code behind the start of its sentence."""
    before = torch.tensor(tokenizer(start)["input_ids"])
    tokens = [tokenizer(f" {code}", add_special_tokens=False)["input_ids"] for code in codes]
    losses = [0.0] * len(codes)
    # Codes with equally many tokens go through the model together, without padding.
    for length in {len(each) for each in tokens}:
        rows = [row for row, each in enumerate(tokens) if len(each) == length]
        of_codes, _ = read_codes(model, before, torch.tensor([tokens[row] for row in rows]))
        for row, loss in zip(rows, of_codes.tolist(), strict=True):
            losses[row] = loss
    return losses
