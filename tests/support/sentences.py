"""A tiny encoder of sentence-transformers, and pairs of texts with a score."""

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertModel, PreTrainedTokenizerFast

from tests.support.tiny import tiny_bert

WORDS = [f"w{number}" for number in range(40)]


def tokenizer():
    """Words of the pairs, with BERT's special tokens."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    special = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def encoder(folder):
    """The mean of a tiny BERT's token vectors; the pooler, which it does not use, is there."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    BertModel(tiny_bert().config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SentenceTransformer(modules=[modules.Transformer(str(folder)), modules.Pooling(16)], device="cpu")


def pairs(number, seed=0):
    """Texts of 2 to 7 words."""
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, size=random.integers(2, 8))) for _ in range(2 * number)]
    return Dataset.from_dict(
        {"sentence1": texts[:number], "sentence2": texts[number:], "score": random.random(number).tolist()}
    )
