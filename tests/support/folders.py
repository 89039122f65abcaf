"""Folders as `--model_name_or_path` and `--dataset_dir` take them: tiny models of random weights, random words, images."""

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
)

from scripts.training.data_sources import GLUE_TASKS

WORDS = ["good", "bad", "fine", "poor", "film", "plot", "the", "a"]
SPECIAL_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
END = 27  # the end of a text, in the tokenizer of `write_gpt2`


def write_bert(folder, num_hidden_layers=2):
    """A BERT, and a tokenizer that knows eight words."""
    vocab = [*SPECIAL_WORDS, *WORDS]
    BertTokenizerFast(vocab={word: row for row, word in enumerate(vocab)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_gpt2(folder):
    """A GPT-2 of one layer, and a tokenizer of letters with one special token, the end of a text."""
    letters = "Ġabcdefghijklmnopqrstuvwxyz"
    vocab = {letter: row for row, letter in enumerate([*letters, "<|endoftext|>"])}
    GPT2TokenizerFast(vocab=vocab, merges=[]).save_pretrained(folder)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(vocab), n_embd=16, n_layer=1, n_head=2, bos_token_id=END, eos_token_id=END)
    ).save_pretrained(folder)
    return folder


def write_glue(folder, task_name, train=48, validation=12):
    """Random sentences in the columns of a task."""
    generator = np.random.default_rng(0)
    task = GLUE_TASKS[task_name]
    folder.mkdir()
    for split, rows in (("train", train), *((name, validation) for name in task.validation_splits)):
        sentences = [" ".join(generator.choice(WORDS, generator.integers(2, 12))) for _ in range(rows)]
        data = dict.fromkeys(task.text_columns, sentences)
        labels = np.arange(rows) % task.num_labels if task.num_labels > 1 else generator.uniform(0, 5, rows)
        Dataset.from_dict({**data, "label": labels.tolist()}).to_parquet(folder / f"{split}.parquet")
    return folder


def write_mnist(folder, *, train, test, shape=(28, 28), **more):
    """Random images of the size of MNIST's, or of another shape, in its columns, and for the training in more."""
    generator = np.random.default_rng(0)
    columns = Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))})
    folder.mkdir()
    for split, rows in (("train", train), ("test", test)):
        pixels, labels = generator.integers(0, 256, (rows, *shape), dtype=np.uint8), generator.integers(0, 10, rows)
        data = Dataset.from_dict({"image": list(pixels), "label": labels}, columns)
        for name, values in more.items() if split == "train" else ():
            data = data.add_column(name, values)
        data.to_parquet(folder / f"{split}.parquet")
    return folder


def write_texts(folder):
    """Random sentences in one of two columns; the first is empty, and the second too long."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for split, rows in (("train", 24), ("validation", 6)):
        texts = ["", " ".join(WORDS), *(" ".join(generator.choice(WORDS, 3)) for _ in range(rows - 2))]
        Dataset.from_dict({"review": texts, "stars": list(range(rows))}).to_parquet(folder / f"{split}.parquet")
    return folder
