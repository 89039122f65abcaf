"""Generation in evaluations: `Seq2SeqTrainer` beneath `DopplerTrainer`, with privacy and without."""

from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from tests.support.models import t5_lm
from tests.support.tiny import pad
from tests.support.trainers import ON_CPU


class GeneratingTrainer(DopplerTrainer, Seq2SeqTrainer):
    """Both, in one line."""


@dataclass
class GeneratingArguments(DopplerTrainingArguments, Seq2SeqTrainingArguments):
    """Both, in one line."""


def test_evaluations_in_a_training_generate(tmp_path):
    rows = [dict(input_ids=[5 + i] * (3 + i % 5), attention_mask=[1] * (3 + i % 5), labels=[5 + i] * 3) for i in range(24)]
    args = GeneratingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=6, per_device_train_batch_size=8, max_steps=2,
        eval_strategy="steps", eval_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=ON_CPU,
        noise_multiplier=1.0,
    )  # fmt: skip
    trainer = GeneratingTrainer(
        model=t5_lm(),
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        data_collator=lambda rows: pad(rows) | {"labels": torch.tensor([row["labels"] for row in rows])},
        compute_metrics=lambda outcome: {"are_tokens": outcome.predictions.dtype.kind == "i"},  # and no logits
    )
    trainer.train()
    assert [logs["eval_are_tokens"] for logs in trainer.state.log_history if "eval_are_tokens" in logs] == [True, True]
