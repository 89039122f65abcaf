"""A model that gives all rows one answer is reported: sets of labels, and spans of text."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import BertForQuestionAnswering
from transformers.trainer_utils import EvalLoopOutput

from doppler_hf import DopplerTrainer
from doppler_hf.run.reporting.evaluation import add_baselines
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import arguments, trainer_of

WORDS = "most frequent answer is given to 100 % of the rows"


def _several_labels(number: int, seed: int) -> Dataset:
    rows = [dict(row) for row in text_data(number, seed=seed)]
    return Dataset.from_list(
        [row | {"labels": [float(place % 2), float(place % 3 == 0), 1.0]} for place, row in enumerate(rows)]
    )


def _pad_several(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = pad([{**row, "labels": 0} for row in examples])
    return batch | {"labels": torch.tensor([row["labels"] for row in examples])}


def _evaluated(tmp_path: Any, model: Any, data: Any, collator: Any, **options: Any) -> dict[str, float]:
    trainer = DopplerTrainer(
        model=model,
        args=arguments(
            tmp_path,
            max_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            learning_rate=1e-9,
            allow_any_learning_rate=True,
            **options,
        ),
        train_dataset=data(24, 0),
        eval_dataset=data(8, 1),
        data_collator=collator,
        compute_metrics=lambda predicted: {"f1": 0.0},
    )
    trainer.train()
    return next(log for log in reversed(trainer.state.log_history) if "eval_loss" in log)


@pytest.mark.parametrize("is_collapsed", [True, False])
def test_one_set_of_labels_for_all_rows_is_reported(tmp_path, capsys, is_collapsed):
    model = tiny_bert(num_labels=3, problem_type="multi_label_classification")
    with torch.no_grad():
        model.classifier.weight.mul_(0.0 if is_collapsed else 100.0)
        model.classifier.bias.copy_(torch.tensor([-3.0, -3.0, 3.0]) if is_collapsed else torch.zeros(3))
    log = _evaluated(tmp_path, model, _several_labels, _pad_several)
    assert (log["eval_most_frequent_predicted_share"] == 1.0) == is_collapsed
    assert log["eval_most_frequent_right_share"] == 3 / 8  # of eight rows: 0 and 6, 1, 3, 5 and 7 without the third, 2, 4
    assert (WORDS in capsys.readouterr().out) == is_collapsed


def _answers(number: int, seed: int) -> Dataset:
    rows = [dict(row) for row in text_data(number, seed=seed)]
    spans = [(place % 3, place % 3 + 1) for place in range(number)]
    return Dataset.from_list(
        [
            row | {"labels": 0, "start_positions": first, "end_positions": last}
            for row, (first, last) in zip(rows, spans, strict=True)
        ]
    )


def _pad_answers(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = pad([{**row, "labels": 0} for row in examples])
    batch.pop("labels")
    return batch | {name: torch.tensor([row[name] for row in examples]) for name in ("start_positions", "end_positions")}


@pytest.mark.parametrize("is_collapsed", [True, False])
def test_one_span_for_all_rows_is_reported(tmp_path, capsys, is_collapsed):
    torch.manual_seed(0)
    model = BertForQuestionAnswering(tiny_bert().config)
    with torch.no_grad():
        # Positions alone decide, so that the first token begins and ends each answer; or the words.
        model.bert.embeddings.word_embeddings.weight.mul_(0.0 if is_collapsed else 100.0)
        model.bert.embeddings.position_embeddings.weight.mul_(1.0 if is_collapsed else 0.0)
        if is_collapsed:
            model.qa_outputs.weight.mul_(100.0)
    log = _evaluated(tmp_path, model, _answers, _pad_answers, label_names=["start_positions", "end_positions"])
    assert log["eval_most_frequent_right_share"] == 3 / 8
    assert (log["eval_most_frequent_predicted_share"] >= 0.95) == is_collapsed
    assert ("most frequent answer is given to" in capsys.readouterr().out) == is_collapsed


def test_equal_right_answers_are_no_collapse(capsys):
    from doppler_hf.run.reporting.summary import print_if_not_learnt

    print_if_not_learnt({"eval_most_frequent_predicted_share": 1.0, "eval_most_frequent_right_share": 1.0})
    assert not capsys.readouterr().out


@pytest.mark.parametrize("evaluates", [True, False])
def test_that_a_run_learnt_little_is_said_once(tmp_path, capsys, evaluates):
    """At its end, or at the first evaluation after it, and not again at each evaluation; another run says it for itself."""
    options = dict(eval_strategy="steps", eval_steps=1) if evaluates else {}
    trainer = trainer_of(tmp_path, compute_metrics=lambda _: {"accuracy": 0.0}, max_steps=2, **options)
    for _ in range(2):
        trainer.train()
        assert capsys.readouterr().out.count("may have learnt little") == evaluates
        said = [
            trainer.evaluate(metric_key_prefix=prefix) and capsys.readouterr().out for prefix in ("eval", "eval", "eval")
        ]
        assert [each.count("may have learnt little") for each in said] == [not evaluates, 0, 0]


@pytest.mark.parametrize(
    "made", [lambda logits: logits, lambda logits: 1 / (1 + np.exp(-logits)), lambda logits: 1.0 * (logits > 0)]
)
def test_labels_are_counted_of_logits_probabilities_and_decisions(made):
    logits = np.array([[2.0, -1.0], [-3.0, 0.5], [2.0, 0.5], [2.0, -4.0]])
    output = EvalLoopOutput(made(logits), (logits > 0).astype(np.float32), {}, 4)
    add_baselines(output, prefix="eval", is_own_loss=False)
    assert output.metrics == {"eval_most_frequent_predicted_share": 0.5, "eval_most_frequent_right_share": 0.5}
