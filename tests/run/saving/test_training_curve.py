"""The picture of a training has what may be published, is drawn only where it can be, and fails no run."""

import struct
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from doppler_hf.run.saving import training_curve
from doppler_hf.run.saving.training_curve import PICTURE_NAME, draw_training_curve
from tests.support.ledgers import all_events
from tests.support.tiny import tiny_bert
from tests.support.trainers import trained, trainer_of

DRAWN = dict(max_steps=4, eval_strategy="steps", eval_steps=2, plot_training_curve=True)


def logs(**more):
    return [{"step": step, "loss": 0.7 - 0.1 * step, "eval_loss": 0.6 - 0.1 * step, **more} for step in (1, 2, 3)]


def trainer_with(tmp_path, history, *, plot=True, best_by=None, chosen=None):
    """What of a trainer the picture is drawn from."""
    return SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path), plot_training_curve=plot, metric_for_best_model=best_by),
        train_dataset=[1], eval_dataset=[2], evaluations_of_training_data=[], sets_with_training_rows=frozenset(),
        state=SimpleNamespace(log_history=history), _run=SimpleNamespace(chosen_step=chosen),
    )  # fmt: skip


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, in place of the one that is a file."""
    found, write = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (found.append(self), write(self, *args, **options))
    )
    return found


def lines_of(figure):
    return {line.get_label(): [*line.get_ydata()] for axes in figure.axes for line in axes.lines}


PRIVATE = dict(train_loss="private", per_sample_max_loss=2.0, loss_noise_multiplier=10.0)


@pytest.mark.parametrize("train_loss", ["private", "none", "raw"])
def test_only_a_private_training_loss_is_drawn(tmp_path, figures, train_loss):
    history = logs(eval_accuracy=0.5, eval_majority_class_accuracy=0.4, eval_runtime=9.0, epsilon=3.0)
    ledger = all_events(**(PRIVATE if train_loss == "private" else dict(train_loss=train_loss)))
    assert draw_training_curve(ledger, trainer_with(tmp_path, history), guarantee="ε = 3, δ = 1e-05 for one record")
    (figure,) = figures
    lines = lines_of(figure)
    assert lines["evaluation: loss"] == [log["eval_loss"] for log in history]
    assert lines["evaluation: accuracy"] == [0.5] * 3
    assert lines["always the most frequent class"] == [0.4] * 3
    private = "training, private: with noise, covered by ε"
    assert lines.get(private) == ([log["loss"] for log in history] if train_loss == "private" else None)
    assert len(lines) == (4 if train_loss == "private" else 3)
    title = figure.get_suptitle()
    assert "Accuracy on the evaluation data: 0.5" in title
    assert "ε = 3, δ = 1e-05" in title
    # 750 points wide at least, so that a phone shows it whole and its letters are legible.
    width, height = struct.unpack(">II", (tmp_path / PICTURE_NAME).read_bytes()[16:24])
    assert (width, height > width) == (750, True)


def test_what_one_answer_for_all_rows_reaches_is_no_result(tmp_path, figures):
    history = logs(eval_f1=0.7, eval_most_frequent_predicted_share=0.9, eval_most_frequent_right_share=0.3)
    assert draw_training_curve(all_events(train_loss="none"), trainer_with(tmp_path, history), guarantee="ε = 3")
    (figure,) = figures
    assert lines_of(figure).keys() == {"evaluation: loss", "evaluation: f1"}


def test_the_picture_shows_by_which_metric_the_saved_weights_were_chosen_and_their_step(tmp_path, figures):
    history = logs(eval_accuracy=0.5)
    for log, recall in zip(history, (0.2, 0.9, 0.4), strict=True):
        log["eval_macro_recall"] = recall
    history += [{"step": 3, "total_flos": 0}, {"step": 3, "eval_loss": 9.0, "eval_macro_recall": 0.8, "eval_accuracy": 0.6}]
    trainer = trainer_with(tmp_path, history, best_by="eval_macro_recall", chosen=2)
    assert draw_training_curve(all_events(**PRIVATE), trainer, guarantee="ε = 3")
    (figure,) = figures
    lines = lines_of(figure)
    assert lines["evaluation: macro recall"] == [0.2, 0.9, 0.4]
    assert lines["evaluation: accuracy"] == [0.5] * 3
    assert lines["evaluation: loss"] == pytest.approx([0.5, 0.4, 0.3])
    for axes in figure.axes:
        (chosen,) = [line for line in axes.lines if line.get_label() == "the saved weights"]
        assert [*chosen.get_xdata()] == [2, 2]
    assert "Macro recall on the evaluation data: 0.8" in figure.get_suptitle()  # evaluated again after the training


def test_a_run_without_privacy_says_so_and_its_loss_is_not_drawn(tmp_path, figures):
    ledger = all_events(private=False, **PRIVATE)
    why = f"ε = ∞ (NOT PRIVATE: {ledger.why_not_private})"
    assert draw_training_curve(ledger, trainer_with(tmp_path, logs()), guarantee=why)
    (figure,) = figures
    assert "NOT PRIVATE" in figure.get_suptitle()
    assert max(map(len, figure.get_suptitle().split("\n"))) < 60
    assert lines_of(figure).keys() == {"evaluation: loss"}


@pytest.mark.parametrize(
    ("history", "options"),
    [([], {}), (logs()[:1], {}), (logs(), dict(plot=False))],
    ids=["no logs", "one point", "switched off"],
)
def test_nothing_is_drawn_where_there_is_no_curve_or_none_is_wanted(tmp_path, capsys, history, options):
    assert not draw_training_curve(all_events(**PRIVATE), trainer_with(tmp_path, history, **options), guarantee="ε")
    assert not [*tmp_path.iterdir()]
    assert capsys.readouterr().out == ""


def test_nothing_is_drawn_or_said_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training_curve, "find_spec", lambda module: None)
    assert not draw_training_curve(all_events(**PRIVATE), trainer_with(tmp_path, logs()), guarantee="ε")
    assert not [*tmp_path.iterdir()]
    assert capsys.readouterr().out == ""


def test_an_evaluation_of_the_training_set_is_not_drawn(tmp_path, figures):
    trainer = trainer_with(tmp_path, logs())
    trainer.eval_dataset = {"mine": trainer.train_dataset, "other": [3]}
    assert draw_training_curve(all_events(**PRIVATE), trainer, guarantee="ε")
    assert lines_of(figures[0]).keys() == {"training, private: with noise, covered by ε"}
    assert "Training loss, private" in figures[0].get_suptitle()


def test_a_training_leaves_its_picture_and_the_card_shows_it(tmp_path):
    trainer = trained(trainer_of(tmp_path, model=tiny_bert(), **DRAWN))
    trainer.create_model_card()
    out = tmp_path / "out"
    assert (out / PICTURE_NAME).read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE_NAME})" in (out / "README.md").read_text("utf-8")
    again = trained(trainer_of(tmp_path, **DRAWN | dict(plot_training_curve=False)))  # the picture there is of another one
    again.create_model_card()
    assert PICTURE_NAME not in (out / "README.md").read_text("utf-8")


def test_a_fault_of_the_picture_fails_no_run(tmp_path, capsys):
    out = tmp_path / "out"
    (out / PICTURE_NAME).mkdir(parents=True)
    trainer = trained(trainer_of(tmp_path, **DRAWN))
    trainer.create_model_card()
    said = capsys.readouterr().out
    assert f"{out / PICTURE_NAME} was not drawn (IsADirectoryError" in said
    assert trainer.state.global_step == 4
    assert PICTURE_NAME not in (out / "README.md").read_text("utf-8")
