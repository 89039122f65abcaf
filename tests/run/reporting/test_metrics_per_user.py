"""Metrics of evaluations count rows; their means over users are offered, and said where training counts users."""

import warnings

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from doppler_hf.run.reporting.published_results import published_results
from doppler_hf.run.search.search import default_objective
from tests.support.refusals import refused
from tests.support.tiny import numbered, text_data
from tests.support.trainers import trained, trainer_of

NOTE = "compute_metrics counts rows, while training counts users"
USERS = ["a", "b", "a", "a", "a", "c", "b", "a"]


def of_users(rows=24, *, seed=0, users=None):
    users = [f"u{row // 2}" for row in range(rows)] if users is None else users
    return text_data(rows, seed=seed).add_column("user", users)


def metrics(predicted):
    hits = predicted.predictions.argmax(axis=-1) == predicted.label_ids
    return {"accuracy": hits.mean(), "rows": len(hits), "name": "text"}


def trainer(tmp_path, **options):
    defaults = dict(
        data=of_users(), evaluated=of_users(8, seed=1, users=USERS), compute_metrics=metrics, max_steps=1,
        privacy_unit_column="user", metrics_per_user=True,
    )  # fmt: skip
    return trainer_of(tmp_path, **defaults | options)


@pytest.mark.parametrize("several", [False, True])
def test_each_metric_is_averaged_over_users(tmp_path, several, capsys):
    evaluated = of_users(8, seed=1, users=USERS)
    options = dict(evaluated={"one": evaluated, "two": of_users(6, seed=2)} if several else evaluated)
    made = trained(trainer(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3, **options))
    assert NOTE not in capsys.readouterr().out
    predicted = made.predict(evaluated.remove_columns("user"))
    hits = predicted.predictions.argmax(axis=-1) == evaluated["labels"][:]
    expected = np.mean([hits[[user == each for each in USERS]].mean() for user in "abc"])
    found, prefix = made.evaluate(), "eval_one" if several else "eval"
    assert found[f"{prefix}_accuracy_per_user"] == pytest.approx(expected)
    assert found[f"{prefix}_accuracy"] == pytest.approx(hits.mean())
    assert found[f"{prefix}_rows_per_user"] == pytest.approx(8 / 3)
    assert f"{prefix}_name_per_user" not in found
    logged = [log for log in made.state.log_history if f"{prefix}_accuracy_per_user" in log]
    assert len(logged) == 2, "while it trained, and afterwards"
    assert "eval_accuracy_per_user" in made.evaluate(of_users(4, seed=3))
    assert "eval_accuracy_per_user" not in made.evaluate(text_data(4, seed=3))


def test_predictions_count_the_users_of_what_is_predicted(tmp_path):
    made, users = trainer(tmp_path), ["x", "y", "y", "y", "y", "y", "y", "y"]
    made.evaluate()
    tested = of_users(8, seed=7, users=users)
    predicted = made.predict(tested)
    hits = predicted.predictions.argmax(axis=-1) == predicted.label_ids
    assert predicted.metrics["test_accuracy_per_user"] == pytest.approx((hits[0] + hits[1:].mean()) / 2)
    assert "test_accuracy_per_user" not in made.predict(tested.remove_columns("user")).metrics
    assert made.predict(tested.select(range(3))).metrics["test_rows_per_user"] == 1.5


def test_rows_of_unknown_users_are_predicted_without_metrics_per_user(tmp_path, capsys):
    made = trainer(tmp_path)
    predicted = made.predict(text_data(4).add_column("user", [None] * 4))
    assert len(predicted.predictions) == 4
    assert "test_accuracy_per_user" not in predicted.metrics
    assert (
        "The predictions have no metrics per user: privacy_unit_column='user' has no value for some records of test_d"
        in capsys.readouterr().out
    )


def test_the_best_model_may_be_the_best_for_users(tmp_path):
    options = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
    made = trained(trainer(tmp_path, metric_for_best_model="accuracy_per_user", rehearse=True, **options))
    assert made.state.best_metric is not None


def test_users_for_whom_a_metric_is_undefined_are_left_out(tmp_path):
    def area(predicted):
        if len({*predicted.label_ids.tolist()}) < 2:
            raise ValueError("one class")
        return {"area": roc_auc_score(predicted.label_ids, predicted.predictions[:, 1])}

    def fails(predicted):
        if len(predicted.label_ids) < 8:
            raise ValueError("too few rows")
        return {"one": 1.0}

    data = numbered(8).map(lambda row, index: {"labels": [0, 1, 1, 0, 1, 1, 1, 0][index]}, with_indices=True)
    data = data.add_column("user", USERS)  # "c" has one row
    made = trained(trainer(tmp_path / "1", compute_metrics=area, evaluated=data, data=of_users(seed=5)))
    found = made.evaluate()
    assert 0.0 <= found["eval_area_per_user"] <= 1.0
    assert found["eval_users_with_area"] == 1  # "b" has rows of one class
    made = trained(trainer(tmp_path / "2", compute_metrics=fails))
    with pytest.warns(UserWarning, match="adds no metric"):
        made.evaluate()


def recalls(predicted):
    hits = predicted.predictions.argmax(axis=-1) == predicted.label_ids
    of_classes = [hits[predicted.label_ids == label].mean() for label in (0, 1)]  # NumPy warns of a mean of no rows
    return {"macro_recall": np.mean(of_classes), "accuracy": hits.mean()}


def test_how_many_users_a_mean_is_of_is_logged_and_said_once(tmp_path, capsys):
    # Each of "a" and "b" has rows of both classes, and "c" has one row.
    rows = of_users(8, seed=1, users=USERS)
    evaluated = rows.map(lambda row, index: {"labels": [0, 1, 1, 0, 1, 1, 0, 0][index]}, with_indices=True)
    made = trainer(tmp_path, compute_metrics=recalls, evaluated=evaluated, eval_strategy="steps", eval_steps=1, max_steps=2)
    with warnings.catch_warnings(record=True, action="always") as told:
        trained(made).create_model_card()
    assert not [each for each in told if issubclass(each.category, RuntimeWarning)]
    logged = [log for log in made.state.log_history if "eval_loss" in log]
    assert [log["eval_users_with_macro_recall"] for log in logged] == [2, 2]
    assert not any("eval_users_with_accuracy" in log for log in logged)
    found = made.evaluate()
    predicted = made.predict(evaluated.remove_columns("user"))
    hits = predicted.predictions.argmax(axis=-1) == evaluated["labels"][:]
    of_users_alone = []
    for user in "ab":
        places = np.array([each == user for each in USERS])
        labels = np.array(evaluated["labels"][:])
        of_users_alone.append(np.mean([hits[places & (labels == label)].mean() for label in (0, 1)]))
    assert found["eval_macro_recall_per_user"] == pytest.approx(np.mean(of_users_alone))
    said = capsys.readouterr().out
    assert said.count("takes the mean over 2 of 3 users for eval_macro_recall_per_user.") == 1
    assert default_objective(found, direction="maximize") == pytest.approx(
        sum(found[f"eval_{name}{end}"] for name in ("macro_recall", "accuracy") for end in ("", "_per_user"))
    )
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "- **users with macro recall**: 2\n" in card
    assert "users with" not in card.split("| step |")[1]
    shown = published_results(made)
    assert [*shown.main_metrics(), *shown.losses()] == ["accuracy", "loss"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(compute_metrics=None), "there is none"),
        (dict(batch_eval_metrics=True, compute_metrics=lambda predicted, compute_result=True: {}), "batch_eval_metrics"),
        (dict(eval_do_concat_batches=False), "eval_do_concat_batches=False passes something else. Leave"),
        (dict(include_for_metrics=["inputs"]), r"include_for_metrics=\['inputs'\] passes something else"),
        (dict(include_for_metrics=["loss"]), r"include_for_metrics=\['loss'\]"),
        (dict(evaluated=text_data(8, seed=1)), "needs the column 'user' in eval_dataset,"),
        (dict(evaluated={"a": of_users(8, seed=1), "b": text_data(8, seed=1)}), r"in eval_dataset\['b'\]"),
        (dict(evaluated=[*of_users(8, seed=1)]), "a datasets.Dataset"),
    ],
)
def test_users_that_are_unknown_are_refused_before_the_first_step(tmp_path, options, said):
    made = trainer(tmp_path, **options)
    with refused("no-metrics-of-users", match=said):
        made.train()
    assert made.privacy.ledger is None


def test_it_has_no_effect_without_users(tmp_path):
    with refused("no-effect", match="metrics_per_user"):
        trainer(tmp_path, privacy_unit_column=None)


def test_that_metrics_count_rows_is_said(tmp_path, capsys):
    trained(trainer(tmp_path / "1", metrics_per_user=False))
    said = capsys.readouterr().out
    assert NOTE in said
    assert "metrics_per_user=True adds each metric's mean over users" in said
    trained(trainer(tmp_path / "2", metrics_per_user=False, evaluated=text_data(8, seed=1)))
    assert "if eval_dataset has the column 'user'" in capsys.readouterr().out
    for number, options in enumerate((dict(compute_metrics=None), dict(privacy_unit_column=None, data=text_data()))):
        trained(trainer(tmp_path / f"no {number}", metrics_per_user=False, **options))
        assert NOTE not in capsys.readouterr().out
