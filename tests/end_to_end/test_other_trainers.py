"""`class Mine(DopplerTrainer, TheirTrainer)`: the trainers of docs/guides/your-trainer.md train, evaluate, log and save."""

import json
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.audit import neighbour_distances
from doppler_hf.privacy import LEDGER_NAME
from tests.support import sentences
from tests.support.models import t5_lm
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "your-trainer.md"
SEQ2SEQ, REPORTING, SENTENCES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def executed(snippet, names, folder, monkeypatch):
    """Run a snippet in a folder on the CPU, with these names, and return its trainer."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    torch.manual_seed(0)
    # A module, since arguments are pickled beside a model and their class is looked up.
    module = types.ModuleType("a_script")
    monkeypatch.setitem(sys.modules, "a_script", module)
    vars(module).update(names)
    exec(snippet, vars(module))
    trainer = module.trainer
    assert trainer.privacy.ledger.steps_run == 3
    assert (Path(trainer.args.output_dir) / LEDGER_NAME).exists()
    assert 0.0 < trainer.privacy.epsilon() <= 3.0
    return trainer


def test_seq2seq_trainer_generates_in_evaluations(tmp_path, monkeypatch):
    rows = Dataset.from_list(
        [dict(input_ids=[5 + row // 20, 5 + row % 20, 4], labels=[5 + row % 9] * 3) for row in range(204)]
    )
    names = {
        "model": t5_lm(), "train": rows.select(range(200)), "dev": rows.select(range(200, 204)),
        "tokenizer": sentences.tokenizer(),
        "metrics": lambda outcome: {"are_tokens": float(outcome.predictions.dtype.kind == "i")},
    }  # fmt: skip
    trainer = executed(SEQ2SEQ, names, tmp_path, monkeypatch)
    assert trainer.evaluate()["eval_are_tokens"] == 1.0


@dataclass
class Generating(DopplerTrainingArguments, Seq2SeqTrainingArguments):
    """Privacy and generation."""


@pytest.mark.parametrize("name", ["predict_with_generate", "generation_config"])
def test_arguments_of_a_trainer_that_generates_are_refused_without_it(tmp_path, name):
    value = {"predict_with_generate": True, "generation_config": GenerationConfig(max_length=4)}[name]
    options = dict(output_dir=str(tmp_path), target_epsilon=3.0, report_to="none", use_cpu=True, generation_max_length=4)
    args = Generating(**options, **{name: value})
    with refused("no-effect", match=rf"^{name}=.*class PrivateSeq2SeqTrainer\(DopplerTrainer, Seq2SeqTrainer\)"):
        DopplerTrainer(model=t5_lm(), args=args, train_dataset=text_data())
    type("Private", (DopplerTrainer, Seq2SeqTrainer), {})(model=t5_lm(), args=args, train_dataset=text_data())
    own = {"prediction_step": lambda self, *args, **options: (None, None, None)}  # which may generate
    type("Own", (DopplerTrainer,), own)(model=t5_lm(), args=args, train_dataset=text_data())
    late = DopplerTrainer(model=t5_lm(), args=Generating(**options), train_dataset=text_data())
    setattr(late.args, name, value)
    with refused("no-effect"):
        late.train()
    assert not (tmp_path / LEDGER_NAME).exists()


def reporting(folder, monkeypatch, **options):
    names = {
        "model": tiny_bert(), "train": text_data(200), "dev": text_data(8, seed=1), "collator": pad,
        "metrics": lambda predicted: {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())},
        "args": DopplerTrainingArguments(
            output_dir="out", target_epsilon=3.0, max_steps=3, logging_steps=1, report_to="none", use_cpu=True, **options
        ),
    }  # fmt: skip
    trainer = executed(REPORTING, names, folder, monkeypatch)
    return trainer, [json.loads(line) for line in Path("out/log.jsonl").read_text().splitlines()]


def test_a_trainer_with_its_own_evaluation_and_logging_keeps_both(tmp_path, monkeypatch):
    trainer, logs = reporting(tmp_path, monkeypatch)
    assert 0.0 <= trainer.evaluate()["eval_worst_recall"] <= 1.0
    assert sum("loss" in each for each in logs) == 3  # the private ones
    assert all("epsilon" in each for each in logs if "loss" in each)
    assert any("eval_worst_recall" in each and "eval_majority_class_accuracy" in each for each in logs)


def test_its_log_never_gets_a_raw_loss(tmp_path, monkeypatch):
    _, logs = reporting(tmp_path, monkeypatch, report_train_loss="raw")
    assert len(logs) > 3
    assert not any({"loss", "train_loss"} & each.keys() for each in logs)


def embedding(folder, monkeypatch, *, snippet=SENTENCES):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    names = {
        "encoder": sentences.encoder(folder),
        "pairs": sentences.pairs(200),
        "held_out_pairs": sentences.pairs(8, seed=1),
    }
    return executed(snippet, names, folder, monkeypatch)


def test_sentence_transformers_trains_on_pairs(tmp_path, monkeypatch, capsys, recwarn):
    trainer = embedding(tmp_path, monkeypatch)
    assert trainer.evaluate()["eval_loss"] > 0.0
    assert not [each for each in recwarn if "no predictions" in str(each.message)]
    assert "BaseTrainer.get_train_dataloader" in capsys.readouterr().out
    # One pair, of two calls of the model, moves the sum of a step by at most C.
    result = neighbour_distances(trainer, pairs=4)
    assert not result.contradicts_claim


def test_its_model_card_shows_no_record(tmp_path, monkeypatch):
    trainer = embedding(tmp_path, monkeypatch)
    trainer.save_model("final")
    card = Path("final/README.md").read_text()
    assert "SentenceTransformer" in card
    assert re.findall(r"\bw\d+\b", card) == []


def test_it_resumes(tmp_path, monkeypatch):
    first = embedding(
        tmp_path, monkeypatch, snippet=SENTENCES.replace("target_epsilon=3.0", "noise_multiplier=2.0, save_steps=1")
    )
    assert first.state.global_step == 3
    first.train(resume_from_checkpoint="out/checkpoint-2")
    assert first.state.global_step == 3


@pytest.mark.parametrize(
    ("loss", "code", "said"),
    [
        ("losses.MultipleNegativesRankingLoss(encoder)", "other-number-of-losses", "compares the records of a batch"),
        ("losses.CoSENTLoss(encoder)", "other-number-of-losses", "compares the records of a batch"),
        ("losses.SoftmaxLoss(encoder, 16, 2)", "weights-of-the-loss", "classifier.weight"),
    ],
)
def test_a_loss_of_the_batch_or_with_weights_costs_nothing(tmp_path, monkeypatch, loss, code, said):
    snippet = re.sub(r"losses\.CosineSimilarityLoss\(.*\)(?=,\n)", loss, SENTENCES)
    assert snippet != SENTENCES
    with refused(code, match=said):
        embedding(tmp_path, monkeypatch, snippet=snippet)
    assert not (tmp_path / "out" / LEDGER_NAME).exists()


def test_a_loader_of_an_own_trainer_is_refused_still(tmp_path):
    class Theirs(Trainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    with refused("method-without-effect", match="Theirs.get_train_dataloader"):
        type("Mine", (DopplerTrainer, Theirs), {})(
            model=tiny_bert(), train_dataset=text_data(), data_collator=pad,
            args=DopplerTrainingArguments(output_dir=str(tmp_path), target_epsilon=3.0, report_to="none", use_cpu=True),
        )  # fmt: skip
