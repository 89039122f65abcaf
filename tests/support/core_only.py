"""Train as where only the core dependencies are installed, for a process of its own: `core_only.py FOLDER`.

YAML is left in: transformers and accelerate cannot be imported without it.
"""
# ruff: noqa: E402 (what is hidden must be so before anything is imported)

import sys
from importlib.machinery import PathFinder
from pathlib import Path

HIDDEN = {"datasets", "matplotlib", "peft", "PIL", "pyarrow", "sklearn"}


class Finder(PathFinder):
    """Finds what the usual one does, except for what is hidden."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from doppler_hf import DopplerTrainer, DopplerTrainingArguments


def tiny_bert():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16,
        )
    )  # fmt: skip


ROWS = [{"input_ids": torch.arange(6) + number, "labels": number % 2} for number in range(24)]


class Examples(Dataset):
    """A data set that knows nothing but its length and its rows."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def train(dataset, output_dir):
    arguments = DopplerTrainingArguments(
        output_dir=str(output_dir), target_epsilon=3.0, low_pass_filter="first-order-v1", base_optimizer="adam_bc",
        per_device_train_batch_size=4, max_steps=2, save_steps=1, eval_strategy="epoch", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = DopplerTrainer(model=tiny_bert(), args=arguments, train_dataset=dataset, eval_dataset=dataset)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()


if __name__ == "__main__":
    train(ROWS, Path(sys.argv[1]) / "list")
    train(Examples(), Path(sys.argv[1]) / "torch")
    found = HIDDEN & {name.split(".")[0] for name in sys.modules}
    assert not found, f"{found} can be imported after all"
