"""Tiny models and data, made on the spot."""

import copy
import functools

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification


def tiny_bert(**overrides):
    """A BERT of a few thousand parameters, without dropout."""
    options = dict(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**(options | overrides)))


def head_alone():
    """The same, of which only the head is trained."""
    model = tiny_bert()
    model.bert.requires_grad_(False)
    return model


def text_data(num_examples=24, seed=0, labels=2):
    """Tokenized examples of differing lengths whose label can be read off the first token."""
    return copy.copy(_made_once(num_examples, seed, labels))


@functools.cache
def _made_once(num_examples, seed, labels):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num_examples):
        tokens = generator.integers(5, 50, size=generator.integers(3, 9)).tolist()
        rows.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": int(tokens[0] * labels // 50)})
    return Dataset.from_list(rows)


def pad(examples):
    """Collate with padding, as DataCollatorWithPadding, without a tokenizer."""
    length = max(len(example["input_ids"]) for example in examples)
    batch = {
        name: torch.tensor([example[name] + [0] * (length - len(example[name])) for example in examples])
        for name in ("input_ids", "attention_mask")
    }
    return batch | {"labels": torch.tensor([example["labels"] for example in examples])}


def pad_numbered(examples):
    return pad(examples) | {"number": torch.tensor([example["number"] for example in examples])}


def numbered(num_examples=24):
    """Examples that can be told apart by their first token."""
    return text_data(num_examples).map(
        lambda row, index: {"input_ids": [5 + index, *row["input_ids"][1:]]}, with_indices=True
    )


class Rows(torch.utils.data.Dataset):
    """A data set of torch's, which has no columns."""

    def __init__(self, rows=None):
        self.rows = list(text_data() if rows is None else rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return dict(self.rows[index])


def hidden(row, *, random=np.random.random):
    """Hide some tokens of a row, each time others."""
    return row | {"input_ids": [4 if random() < 0.3 else token for token in row["input_ids"]]}


class OwnGenerator(Rows):
    """Hides tokens by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        return hidden(self.rows[index], random=self.generator.random)
