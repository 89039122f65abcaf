"""Put `DopplerTrainer` with `disable_dp` where transformers' own tests have `Trainer`: a plugin of pytest.

In a checkout of transformers, with and without `-p`:

    PYTHONPATH=DOPPLER_HF python -m pytest -p scripts.experiments.transformers_tests tests/trainer/test_trainer*.py
"""

from dataclasses import dataclass
from typing import Any

import transformers.testing_utils  # first, since it replaces the module `transformers`, whose names are set below
from transformers import Seq2SeqTrainer as HFSeq2SeqTrainer
from transformers import Seq2SeqTrainingArguments as HFSeq2SeqTrainingArguments

from doppler_hf import DopplerTrainer, DopplerTrainingArguments

made = 0


@dataclass
class TrainingArguments(DopplerTrainingArguments):
    """Arguments without privacy, unless they say otherwise."""

    disable_dp: bool = True
    learning_rate: float | None = DopplerTrainingArguments.non_private_learning_rate


@dataclass
class Seq2SeqTrainingArguments(DopplerTrainingArguments, HFSeq2SeqTrainingArguments):
    """Those of Transformers' sequence-to-sequence trainer."""

    disable_dp: bool = True
    learning_rate: float | None = DopplerTrainingArguments.non_private_learning_rate


class Trainer(DopplerTrainer):
    """`DopplerTrainer`, which makes arguments of its own where it is given none, as Transformers does."""

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        global made
        made += 1
        super().__init__(model, TrainingArguments("tmp_trainer") if args is None else args, *others, **options)


class Seq2SeqTrainer(Trainer, HFSeq2SeqTrainer):
    """Transformers' sequence-to-sequence trainer beneath ours."""


for stand_in in (TrainingArguments, Seq2SeqTrainingArguments, Trainer, Seq2SeqTrainer):
    setattr(transformers, stand_in.__name__, stand_in)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many trainers were ours, so that a run in which none was is noticed."""
    terminalreporter.write_line(f"{made} trainers were DopplerTrainer with disable_dp")
