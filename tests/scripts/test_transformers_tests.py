import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from tests.support.tiny import tiny_bert


def test_of_transformers(tmp_path):
    for trainer_class, arguments in ((Trainer, TrainingArguments), (Seq2SeqTrainer, Seq2SeqTrainingArguments)):
        trainer = trainer_class(tiny_bert(), arguments(str(tmp_path), use_cpu=True))
        assert trainer_class not in (transformers.trainer.Trainer, transformers.trainer_seq2seq.Seq2SeqTrainer)
        assert isinstance(trainer, transformers.trainer.Trainer) and trainer.args.disable_dp
        assert arguments.learning_rate == trainer.args.learning_rate == 5e-5
    assert Trainer(tiny_bert()).args.disable_dp
"""


@pytest.mark.slow
def test_transformers_tests_get_our_trainer(tmp_path):
    (tmp_path / "test_transformers.py").write_text(TESTS)
    plugin = "scripts.experiments.transformers_tests"
    command = [sys.executable, "-m", "pytest", "-p", plugin, "--rootdir", tmp_path, tmp_path]
    run = subprocess.run([*command, "-c", "/dev/null"], cwd=ROOT, capture_output=True, text=True)
    assert "3 trainers were DopplerTrainer with disable_dp" in run.stdout
    assert "1 passed" in run.stdout, run.stdout
