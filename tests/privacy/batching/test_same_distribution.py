"""Random rows that follow their places or numbers are told from rows of which each has numbers of its own."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

from doppler_hf.privacy.batching import same_distribution
from doppler_hf.privacy.batching.same_distribution import is_other_beside_others, refuse_other_distribution
from doppler_hf.privacy.shared_coins import is_order_drawn
from tests.support.tiers import further, thorough

TOKENS = torch.arange(5, 45)
IMAGE = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
# Batches of either kind in the tests of what is found, as many as of short texts in a user's training.
MANY = 256


def of_one(make):
    """Batches of copies of one example alone."""
    return {"make": lambda which: make(len(which)), "others": 0}


def images(rows):
    return {"pixel_values": IMAGE + 0.02 * torch.rand(rows, 3, 16, 16), "labels": torch.zeros(rows, dtype=torch.long)}


def masked(rows):
    """As for masked language modeling, with a label for the row."""
    hidden = torch.rand(rows, len(TOKENS)) < 0.15
    tokens = TOKENS.repeat(rows, 1)
    return {
        "input_ids": tokens.masked_fill(hidden, 4),
        "labels": torch.where(hidden, tokens, -100),
        "label": torch.zeros(rows, dtype=torch.long),
    }


def mirrored(rows, chosen):
    batch = images(rows)
    batch["pixel_values"][chosen] = -batch["pixel_values"][chosen].flip(-1)
    return batch


def relabelled(rows, chosen):
    batch = masked(rows)
    batch["label"][chosen] = 1
    return batch


def uncovered(rows, chosen):
    batch = masked(rows)
    batch["input_ids"][chosen] = TOKENS
    return batch


def half(rows):
    return torch.randperm(rows) < rows // 2


def half_by_numpy(rows):
    return torch.from_numpy(np.random.permutation(rows) < rows // 2)


def half_by_python(rows):
    return torch.isin(torch.arange(rows), torch.tensor(random.sample(range(rows), rows // 2), dtype=torch.long))


CHOSEN = {
    "every second": lambda rows: torch.arange(rows) % 2 == 1,
    "first": lambda rows: torch.arange(rows) == 0,
    "last": lambda rows: torch.arange(rows) == rows - 1,
    "any one": lambda rows: torch.arange(rows) == torch.randint(rows, ()),
    "half, torch": half,
    "half, NumPy": half_by_numpy,
    "half, Python": half_by_python,
    "a quarter": lambda rows: torch.randperm(rows) < rows // 4,
    "from eight on": lambda rows: (torch.arange(rows) % 2 == 1) & (rows >= 8),
}


# Which of the rows are masked at all is less than how they are masked: of a share only some four deviations off.
QUICK = [(mirrored, name) for name in ("every second", "half, NumPy")]
QUICK += [(relabelled, "every second"), (uncovered, "first"), (uncovered, "from eight on")]
FOUND = [(mirrored, name) for name in CHOSEN]
FOUND += [(relabelled, name) for name in ("every second", "any one", "half, NumPy")]
FOUND += [(uncovered, name) for name in ("every second", "first", "last", "any one", "from eight on")]


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(("change", "name"), further(FOUND, quick=QUICK))
def test_rows_that_follow_their_places_or_number_are_found(change, name, monkeypatch):
    monkeypatch.setattr(same_distribution, "_FEWEST", MANY)
    with pytest.raises(ValueError, match="as likely whatever other examples are beside them"):
        refuse_other_distribution(**of_one(lambda rows: change(rows, CHOSEN[name](rows))))


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize("change", [*thorough(mirrored), relabelled])
def test_places_with_another_probability_are_found(change, monkeypatch):
    """Half of the rows at even places, and none of the others; twice as many batches, or it is a matter of luck."""
    monkeypatch.setattr(same_distribution, "_FEWEST", 2 * MANY)
    with pytest.raises(ValueError, match="as likely whatever"):
        refuse_other_distribution(
            **of_one(lambda rows: change(rows, (torch.arange(rows) % 2 == 0) & (torch.rand(rows) < 0.5)))
        )


def test_numbers_that_are_the_same_at_each_start_are_found():
    """A collator that seeds the generators gives each place numbers of its own."""

    def seeding(rows):
        torch.manual_seed(0)
        return masked(rows)

    with pytest.raises(ValueError, match="as likely whatever"):
        refuse_other_distribution(**of_one(seeding))


def of_the_row_before(which, share):
    """Rows of which some tokens are those of the row before, which differ from one example to another."""
    tokens = TOKENS + torch.tensor(which)[:, None]
    shown = (torch.rand(tokens.shape) < share) & (torch.arange(len(which)) > 0)[:, None]
    return {"input_ids": torch.where(shown, tokens.roll(1, 0), tokens)}


@pytest.mark.parametrize("others", [1, *thorough(5)])
def test_rows_that_show_what_is_beside_them_are_found(others, monkeypatch):
    """Copies of one example alone do not show it."""
    monkeypatch.setattr(same_distribution, "_FEWEST", MANY)
    assert not all(is_other_beside_others(lambda which: of_the_row_before(which, 0.05), others=0) for _ in range(3))
    with pytest.raises(ValueError, match="as likely whatever"):
        refuse_other_distribution(lambda which: of_the_row_before(which, 0.05), others=others)


def padded_at_random(which, *, side, share):
    """Twelve tokens, beside others of forty, of which a share is hidden by the width of the batch."""
    lengths = [12 if example == 0 else 40 for example in which]
    width = max(lengths)
    tokens, mask = torch.zeros(len(which), width, dtype=torch.long), torch.zeros(len(which), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        is_left = {"left": True, "right": False, "any": bool(torch.rand(()) < 0.5)}[side]
        own = slice(width - length, width) if is_left else slice(length)
        tokens[row, own], mask[row, own] = torch.arange(5, 5 + length), 1
    return {"input_ids": tokens.masked_fill(torch.rand(tokens.shape) < share(width), 4) * mask, "attention_mask": mask}


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize("side", [*thorough("left", "right"), "any"])
def test_what_is_attended_to_is_compared_beside_wider_rows(side, monkeypatch):
    monkeypatch.setattr(same_distribution, "_FEWEST", 64)
    by_width = partial(padded_at_random, side=side, share=lambda width: 3 / width)
    with pytest.raises(ValueError, match="as likely whatever"):
        refuse_other_distribution(by_width, others=1, is_wider=True)
    fixed = partial(padded_at_random, side=side, share=lambda width: 0.15)
    # One look in a hundred may; six of thirty with probability 5e-7.
    assert sum(is_other_beside_others(fixed, others=1, is_wider=True) for _ in range(30)) < 6


def test_rows_of_which_a_random_number_is_attended_to_are_not_compared():
    def shortened(which):
        batch = padded_at_random(which, side="right", share=lambda width: 0.15)
        kept = (torch.rand(batch["attention_mask"].shape) < 0.8).long()
        return {name: value * kept for name, value in batch.items()}

    assert not any(is_other_beside_others(shortened, others=1, is_wider=True) for _ in range(5))


def moved(rows):
    """Each image moved and mirrored."""
    batch = images(rows)
    for row, image in enumerate(batch["pixel_values"]):
        image = torch.roll(image, tuple(np.random.randint(-4, 5, size=2)), (1, 2))
        batch["pixel_values"][row] = image.flip(-1) if random.random() < 0.5 else image
    return batch


def padded_on_a_random_side(rows):
    sides = [random.random() < 0.5 for _ in range(rows)]
    return {"input_ids": torch.stack([torch.cat([TOKENS, TOKENS * 0] if left else [TOKENS * 0, TOKENS]) for left in sides])}


def shortened(rows, *, is_left):
    """Each token left out with a probability, padded to the longest row."""
    kept = [TOKENS[torch.rand(len(TOKENS)) < 0.7] for _ in range(rows)]
    width = max(map(len, kept))
    padding = [torch.zeros(width - len(tokens), dtype=torch.long) for tokens in kept]
    parts = zip(padding, kept, strict=True) if is_left else zip(kept, padding, strict=True)
    return {"input_ids": torch.stack([torch.cat(part) for part in parts])}


def share_for_all(rows):
    """Harmless in a draw that is one micro-batch; elsewhere it is refused by what is drawn."""
    return {"input_ids": TOKENS.masked_fill(torch.rand(rows, len(TOKENS)) < 0.5 * torch.rand(()), 4)}


def seldom(rows):
    return {"label": (torch.rand(rows) < 0.01).long()}


def of_the_host(**options):
    """Collate copies of a sentence of eight words, each of two pieces, as the host does for masked language modeling."""
    letters = "abcdefghijklmnop"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizerFast(vocab={piece: row for row, piece in enumerate(vocabulary)})
    text = "ab cd ef gh ij kl mn op"
    row = dict(tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, **options)
    return lambda rows: collator([dict(row) for _ in range(rows)])


OF_EACH_ROW = {
    "nothing": lambda rows: {"input_ids": TOKENS.repeat(rows, 1)},
    "noise": images,
    "masked": masked,
    "masked, by the host": of_the_host(),
    "whole words, by the host": of_the_host(whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0),
    "moved": moved,
    "padded on a random side": padded_on_a_random_side,
    "shortened, right": lambda rows: shortened(rows, is_left=False),
    "shortened, left": lambda rows: shortened(rows, is_left=True),
    "a share for all": share_for_all,
    "seldom": seldom,
    "no tensors": lambda rows: {"text": ["a"] * rows},
}
OF_SEVERAL_KINDS = {"masked, by the host", "whole words, by the host", "moved", "shortened, left", "a share for all"}


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize("name", further([*OF_EACH_ROW], quick={*OF_EACH_ROW} - OF_SEVERAL_KINDS))
def test_a_look_finds_no_more_than_by_chance_where_rows_are_their_own(name, monkeypatch):
    monkeypatch.setattr(same_distribution, "_FEWEST", 16)
    # One look in a hundred may; eight of sixty with probability 3e-7.
    assert sum(is_other_beside_others(**of_one(OF_EACH_ROW[name])) for _ in range(60)) < 8
    assert not is_order_drawn(OF_EACH_ROW[name])


@pytest.mark.parametrize("share", [2, 40])
def test_a_random_order_of_the_rows_is_found_whatever_it_changes(share):
    """A fortieth of the rows is none of a few."""
    assert is_order_drawn(lambda rows: mirrored(rows, torch.randperm(rows) < rows // share))


@pytest.mark.parametrize("size", [11, 13, 40])
def test_a_random_order_of_tokens_is_none_of_the_rows(size):
    assert not is_order_drawn(lambda rows: [torch.randperm(size) for _ in range(rows)])
