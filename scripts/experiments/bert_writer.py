"""A BERT encoder made into a language model: fewer word pieces, attention to earlier tokens only, public sentences.

An encoder such as MiniLM is small and knows English, and no causal model of its size is as widely used. It fills gaps, and
learns to continue a text from sentences that stand for public ones.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from scripts.studies.texts import check_encoder

PUBLIC: Final = (("mnli", "premise"), ("mnli", "hypothesis"), ("qqp", "question1"), ("qnli", "question"))
MAX_TOKENS: Final = 24  # Longer sentences are left out: those of SST-2 are short, too.


def public_model(folder: Path, data_dir: Path, encoder: str, *, vocabulary: int, epochs: int) -> Path:
    """Train an encoder's weights on public sentences to write, unless that is done; return the folder of the model."""
    if (folder / "model.safetensors").is_file():
        return folder
    from datasets import Dataset

    check_encoder(encoder)
    texts = public_sentences(data_dir)
    tokenizer, rows = cut_tokenizer(encoder, texts, size=vocabulary)
    set_seed(0)
    model = causal_model(encoder, tokenizer, rows)
    ids = tokenizer([f" {text}{tokenizer.eos_token}" for text in texts])["input_ids"]
    ids = [each for each in ids if len(each) <= MAX_TOKENS]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=32,
            learning_rate=5e-4,
            warmup_steps=50,
            num_train_epochs=epochs,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids, "length": [len(each) for each in ids]}),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def public_sentences(data_dir: Path) -> list[str]:
    """Return the public sentences, each once, in lower case as SST-2's."""
    from datasets import Dataset

    columns = (Dataset.from_parquet(str(data_dir / task / "train.parquet"))[column] for task, column in PUBLIC)
    return list(dict.fromkeys(text.lower() for column in columns for text in column))


def cut_tokenizer(encoder: str, texts: Sequence[str], *, size: int) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Return an encoder's WordPiece tokenizer with fewer pieces, and the row of each piece in the encoder's embeddings.

    Kept are the single ASCII characters, so that no English word is unknown, and the most frequent pieces of the public
    texts. Words whose piece is left out are spelt with shorter pieces. The private texts have no say in this.
    """
    whole = AutoTokenizer.from_pretrained(encoder)
    numbers = whole.get_vocab()
    pieces = {number: piece for piece, number in numbers.items()}
    counts = Counter(itertools.chain(*whole([*texts], add_special_tokens=False)["input_ids"]))
    special = [whole.pad_token, whole.unk_token, whole.sep_token]
    single = sorted(piece for piece in numbers if len(piece.removeprefix("##")) == 1 and piece.isascii())
    frequent = (pieces[number] for number, _ in counts.most_common())
    kept = list(dict.fromkeys([*special, *single, *frequent]))[:size]
    described = json.loads(whole.backend_tokenizer.to_str())
    described["model"]["vocab"] = {piece: row for row, piece in enumerate(kept)}
    added = [each for each in described["added_tokens"] if each["content"] in special]
    described["added_tokens"] = [{**each, "id": kept.index(each["content"])} for each in added]
    described.update(post_processor=None, truncation=None, padding=None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        pad_token=whole.pad_token,
        unk_token=whole.unk_token,
        eos_token=whole.sep_token,
        model_max_length=64,
    )
    return tokenizer, [numbers[piece] for piece in kept]


def causal_model(encoder: str, tokenizer: PreTrainedTokenizerFast, rows: Sequence[int]) -> BertLMHeadModel:
    """Return a language model with the weights of a BERT encoder, which attends to earlier tokens only.

    Its head is new, except for the projection onto the vocabulary, which shares the weights of the embeddings.

    Args:
        encoder: Hub name or folder.
        tokenizer: The tokenizer with fewer pieces.
        rows: For each of its tokens, the row of the encoder's embeddings.
    """
    bert = AutoModel.from_pretrained(encoder)
    end = tokenizer.eos_token_id
    config = BertConfig(**{
        **bert.config.to_dict(), "is_decoder": True, "tie_word_embeddings": True, "vocab_size": len(rows),
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": end, "eos_token_id": end,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    })  # fmt: skip
    weights = {name: weight for name, weight in bert.state_dict().items() if not name.startswith("pooler.")}
    embeddings = "embeddings.word_embeddings.weight"
    weights[embeddings] = weights[embeddings][torch.tensor(rows)]
    model = BertLMHeadModel(config)
    model.bert.load_state_dict(weights)
    return model
