"""A hyperparameter search: its ε, what it publishes, what it refuses, and what an interruption costs."""

import functools
import json
import logging
import math
import sys
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from scipy.stats import norm
from transformers import BertForSequenceClassification, TrainerCallback

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main
from doppler_hf.errors import Failure
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting.composition import gaussian_delta, gaussian_epsilon
from doppler_hf.privacy.accounting.selection import NumberOfTrials, selection_of
from doppler_hf.privacy.ledger.terms import claim_in_words
from doppler_hf.run import lineage, search
from doppler_hf.run.plan import Trial
from doppler_hf.run.search import NOTE_NAME, SEARCHED, Draw, arguments_of_trial, draw_number_of_trials, drawn_trials
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, arguments, at

pytestmark = pytest.mark.filterwarnings("ignore")


def trainer_of_search(tmp_path, *, model_init=lambda: tiny_bert(), evaluated=None, callbacks=None, **overrides):
    terms = dict(noise_multiplier=None, target_epsilon=3.0, noise_shape="white", max_steps=3) | overrides
    return DopplerTrainer(
        model_init=model_init,
        args=arguments(tmp_path, **terms),
        train_dataset=text_data(48),
        eval_dataset=text_data(8, seed=1) if evaluated is None else evaluated,
        data_collator=pad,
        callbacks=callbacks,
    )


def space(trial):
    return {
        "per_sample_max_grad_norm": trial.suggest_float("per_sample_max_grad_norm", 0.5, 2.0, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
        "max_steps": trial.suggest_int("max_steps", 2, 4),
    }


def searched(tmp_path, monkeypatch, *, trials, **options):
    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: trials)
    trainer = trainer_of_search(tmp_path, **options)
    return trainer, trainer.hyperparameter_search(space, n_trials=3)


def test_the_best_trial_is_published_with_the_epsilon_of_the_search_and_verify_recomputes_it(tmp_path, monkeypatch, capsys):
    seen = []
    watching = On(evaluate=lambda metrics, **_: seen.append(metrics["eval_loss"]))
    watching.__deepcopy__ = lambda memo: watching  # the test sees all trials
    trainer, best = searched(tmp_path, monkeypatch, trials=3, callbacks=[watching])
    _, *losses = seen
    assert len(losses) == 3
    assert best.objective == min(losses)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best.objective)
    assert best.hyperparameters == {name: getattr(trainer.args, name) for name in best.hyperparameters}
    assert trainer.args.output_dir == str(tmp_path / "out")
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert ledger.run_id == best.run_id
    terms = ledger.statement.search
    assert (terms.expected_trials, terms.first_delta) == (3, pytest.approx(ledger.statement.target_delta / 3))
    assert ledger.epsilon() == pytest.approx(3.0, rel=1e-9)
    assert ledger.epsilon_of_trial < terms.first_epsilon < 3.0
    assert ledger.spent.epsilon == pytest.approx(3.0, rel=1e-9)
    assert ledger.claims[-1].epsilon == pytest.approx(3.0, rel=1e-9)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "VERIFIED: (3, " in said
    assert "3 expected" in said
    words = claim_in_words(ledger)
    assert "This ε is that of a whole search, of which only the best trial was published" in words
    assert f"The published trial alone would cost ε = {ledger.epsilon_of_trial:.4g}." in words
    # A ledger that states less for its trials does not pass, though its hashes fit.
    path = tmp_path / "out" / "privacy_ledger.json"
    entries = json.loads(path.read_text("utf-8"))["entries"]
    entries[0]["statement"]["search"]["first_epsilon"] /= 2
    rewritten(path, entries)
    assert main(["verify", str(tmp_path / "out")]) == 1


def rewritten(path, entries):
    from doppler_hf.privacy.ledger.file import ORIGIN, digest, write_entries

    before = ORIGIN
    for entry in entries:
        entry.pop("hash")
        entry["previous_hash"] = before
        entry["hash"] = before = digest(entry)
    write_entries(path, entries)


def test_a_search_whose_delta_is_not_divided_is_no_ledger(tmp_path, monkeypatch):
    searched(tmp_path, monkeypatch, trials=1)
    path = tmp_path / "out" / "privacy_ledger.json"
    entries = json.loads(path.read_text("utf-8"))["entries"]
    entries[0]["statement"]["search"]["first_delta"] *= 3
    rewritten(path, entries)
    with refused("impossible-entry"):
        PrivacyLedger.load(path)


def test_a_user_in_both_sets_is_refused(tmp_path):
    train, evaluated = (
        data.add_column("user", [first + row // 2 for row in range(len(data))])
        for data, first in ((text_data(48), 0), (text_data(8, seed=1), 23))
    )
    trainer = trainer_of_search(tmp_path, evaluated=evaluated, privacy_unit_column="user")
    trainer.train_dataset = train
    with refused("search-on-users", match="'user'"):
        trainer.hyperparameter_search(space, n_trials=3)
    trainer.eval_dataset = evaluated.map(lambda row: {"user": row["user"] + 1})
    assert trainer.hyperparameter_search(space, n_trials=3).run_id


def test_only_the_best_model_is_left_for_callbacks(tmp_path, monkeypatch):
    """And none of the locks of the folders of trials."""
    trainer, _ = searched(tmp_path, monkeypatch, trials=3)
    handler = trainer.callback_handler
    assert handler.model is trainer.model
    assert handler.optimizer is handler.lr_scheduler is None
    assert [*trainer._locks] == [(tmp_path / "out").resolve()]


def test_what_the_space_prints_is_not_shown_for_the_trials(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: 3)

    def loud(trial):
        print("drawn")
        return space(trial)

    trainer_of_search(tmp_path).hyperparameter_search(loud, n_trials=3)
    assert capsys.readouterr().out.count("drawn") == 100  # by the check before the search


def test_a_search_finds_the_ledgers_of_folders_beside_its_own(tmp_path, monkeypatch):
    before = trainer_of_search(tmp_path, output_dir=str(tmp_path / "first"), noise_multiplier=1.0, target_epsilon=None)
    before.train()
    before.save_model()
    weights = {name: value.clone() for name, value in before.model.state_dict().items()}
    monkeypatch.setattr(lineage, "_OF_PROCESS", {})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))

    def loaded():
        model = tiny_bert()
        model.load_state_dict({name: value.clone() for name, value in weights.items()})
        return model

    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: 2)
    trainer_of_search(tmp_path, output_dir=str(tmp_path / "second"), model_init=loaded).hyperparameter_search(
        space, n_trials=3
    )
    ledger = PrivacyLedger.load(tmp_path / "second")
    assert ledger.spent.epsilon == pytest.approx(3.0 + before.privacy.ledger.epsilon(), rel=1e-6)


def test_the_default_objective_is_the_loss_or_the_sum_of_the_users_metrics():
    metrics = {
        "eval_loss": 0.5,
        "eval_accuracy": 0.75,
        "eval_f1": 0.5,
        "eval_majority_class_accuracy": 0.6,
        "eval_runtime": 2.0,
    }
    assert search.default_objective(metrics | {"eval_most_frequent_predicted_share": 1.0}, direction="maximize") == 1.25
    assert search.default_objective(metrics, direction="minimize") == 0.5


class Loud(TrainerCallback):
    """Shows every evaluation in each way that a program has."""

    def on_evaluate(self, args, state, control, **_):
        print("printed")
        sys.stderr.write("written")
        warnings.warn("warned", stacklevel=1)
        logging.getLogger("of_the_user").error("logged")


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_nothing_that_is_left_or_shown_depends_on_the_number_of_trials(tmp_path, monkeypatch, capfd, caplog):
    """All that a search leaves, anywhere, is that of its best trial: no file of a loser, no time and no line."""
    found = {}
    for trials in (1, 4):
        place = tmp_path / str(trials)
        for name in ("temporary", "states"):
            (place / name).mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))
        monkeypatch.setenv("XDG_STATE_HOME", str(place / "states"))
        caplog.clear()
        capfd.readouterr()
        trainer, best = searched(
            place, monkeypatch, trials=trials, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            plot_training_curve=True, disable_tqdm=False, callbacks=[Loud()],
        )  # fmt: skip
        shown = capfd.readouterr()
        folder = place / "out"
        assert len({path.stat().st_mtime for path in [folder, *folder.rglob("*")]}) == 1, "times tell when the search ended"
        entries = PrivacyLedger.load(folder).entries
        assert len({entry["time"] for entry in entries}) == 1, "times tell which trial was the best"
        assert not any(str(place / "temporary") in str(value) for value in vars(trainer.args).values())
        # The lengths of trials differ, and so do the losses.
        found[trials] = (
            [name.replace(best.run_id, "RUN") for name in files_below(place)],
            sorted({entry["event"] for entry in entries}),
            shown.out.count("\n"),
            [shown.out.count(word) + shown.err.count(word) for word in ("printed", "written", "warned", "eval_loss")],
            len(caplog.records),
        )
        assert not [*(place / "temporary").iterdir()], "files of trials are left"
    assert found[1] == found[4]
    names, _, _, counts, _ = found[1]
    assert counts[:2] == [1, 1], "the untrained model's evaluation is shown, and no other"
    assert NOTE_NAME not in {Path(name).name for name in names}
    assert [name for name in names if name.startswith("out/checkpoint")] == []


def test_a_trial_that_fails_is_the_worst_one_and_is_not_shown(tmp_path, monkeypatch, capsys):
    calls = []

    def objective(metrics):
        calls.append(metrics["eval_loss"])
        if len(calls) in (2, 3):  # the first call is that of the untrained model
            raise KeyError("nothing")
        return math.nan if len(calls) == 4 else metrics["eval_loss"]

    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: 4)
    best = trainer_of_search(tmp_path).hyperparameter_search(space, objective, n_trials=3, direction="maximize")
    assert best.objective == calls[4]
    shown = capsys.readouterr()
    assert "KeyError" not in shown.out + shown.err


def test_a_search_without_a_result_is_an_error_and_its_epsilon_is_spent(tmp_path, monkeypatch):
    calls = []

    def fails(metrics):
        calls.append(0)
        if len(calls) == 3:
            raise KeyError("nothing")
        return 0.0 if len(calls) == 1 else math.nan

    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: 2)
    trainer = trainer_of_search(tmp_path)
    with pytest.raises(Failure, match="KeyError: 'nothing'") as failure:
        trainer.hyperparameter_search(space, fails, n_trials=3)
    assert failure.value.code == "search-failed"
    assert search.interrupted_in(tmp_path / "out")
    assert trainer.args.output_dir == str(tmp_path / "out")
    trainer.train()  # the trainer is as it was before the search
    assert trainer.privacy.ledger.earlier.epsilon == pytest.approx(3.0)


def test_an_error_before_the_first_step_costs_nothing_and_is_passed_on(tmp_path, monkeypatch):
    trainer = trainer_of_search(tmp_path)
    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: 3)
    with refused("batch-out-of-range"):
        trainer.hyperparameter_search(lambda trial: {"per_device_train_batch_size": 48}, n_trials=3)
    assert not search.interrupted_in(tmp_path / "out")


def test_an_interrupted_search_counts_in_the_next_run_of_its_folder(tmp_path, monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, monkeypatch, trials=2, callbacks=[On(step_end=at(2, interrupt))])
    assert "cannot be resumed. Its ε = 3 counts all the same" in capsys.readouterr().out
    out = tmp_path / "out"
    (note,) = json.loads((out / NOTE_NAME).read_text("utf-8"))["searches"]
    assert note["epsilon"] == 3.0
    assert [path.name for path in out.iterdir()] == [NOTE_NAME]
    trainer, _ = searched(tmp_path, monkeypatch, trials=1)
    ledger = PrivacyLedger.load(out)
    assert ledger.spent.epsilon == pytest.approx(6.0)
    assert ledger.spent.delta == pytest.approx(2 * ledger.statement.target_delta)
    assert not (out / NOTE_NAME).exists()
    assert main(["verify", str(out)]) == 0
    # A model that is trained further counts the whole search, and the ledger of a search has no continuation.
    further = DopplerTrainer(
        trainer.model, arguments(tmp_path / "further", max_steps=2), pad, text_data(48), text_data(8, seed=1)
    )
    further.train()
    assert further.privacy.ledger.earlier.epsilon == pytest.approx(6.0)
    with refused("search-continued"):
        trainer.train()


def test_what_a_kill_has_left_is_removed_and_an_ordinary_run_counts_it_too(tmp_path):
    left, other = tmp_path / "doppler-hf-search-left", tmp_path / "mine"
    for each in (left, other):
        each.mkdir(parents=True)
        (each / "weights").write_text("of a loser")
    out = tmp_path / "out"
    out.mkdir()
    notes = [
        {"name": name, "epsilon": 2.0, "delta": 1e-3, "trials": str(each)} for name, each in (("a", left), ("b", other))
    ]
    search._write_notes(out, notes)
    trainer = trainer_of_search(tmp_path)
    trainer.train()
    assert trainer.privacy.ledger.earlier.epsilon == pytest.approx(4.0)
    assert not left.exists()
    assert other.exists(), "the note may have been edited, and names a folder that is no search's"
    with pytest.raises(ZeroDivisionError), search._noted(out, epsilon=1.0, delta=1e-3):
        raise ZeroDivisionError
    assert search.interrupted_in(out).keys() == {"a", "b"}, "a search that spent nothing leaves no note"
    (out / NOTE_NAME).write_text("{")
    with refused("search-note-damaged"):
        search.interrupted_in(out)


def test_a_chain_of_runs_adds_up(tmp_path, monkeypatch):
    first = trainer_of_search(tmp_path / "first", target_epsilon=2.0)
    first.train()
    first.save_model()
    folder = tmp_path / "first" / "out"
    trainer, _ = searched(
        tmp_path, monkeypatch, trials=2, model_init=lambda: BertForSequenceClassification.from_pretrained(folder)
    )
    assert trainer.privacy.ledger.earlier.epsilon == pytest.approx(2.0, rel=1e-2)
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(5.0, rel=1e-2)
    assert main(["verify", str(tmp_path / "out")]) == 0


ONE = tiny_bert()
REFUSED = {
    "search-backend": (dict(), dict(backend="optuna")),
    "search-direction": (dict(), dict(direction=["minimize", "maximize"])),
    "search-without-target": (dict(target_epsilon=None, noise_multiplier=1.0), dict()),
    "search-with-seed": (dict(noise_seed=1), dict()),
    "search-reports": (dict(report_train_loss="raw"), dict()),
    "search-same-model": (dict(model_init=lambda: ONE), dict()),
    "search-on-training-data": (dict(evaluated=text_data(48)), dict()),
    "search-on-copies": (dict(evaluated=Dataset.from_list(text_data(48).to_list()[5:25])), dict()),
    "search-space": (dict(), dict(hp_space=None)),
    "search-setting": (dict(), dict(hp_space=lambda trial: {"target_epsilon": 8.0})),
    "search-objective": (dict(), dict(compute_objective=lambda metrics: metrics["eval_accuracy"])),
    "out-of-range": (dict(), dict(n_trials=1)),
}


@pytest.mark.parametrize("code", REFUSED)
def test_a_search_that_would_break_its_guarantee_is_refused_before_anything_is_spent(tmp_path, code, monkeypatch):
    options, call = REFUSED[code]
    trainer = trainer_of_search(tmp_path, **options)
    with refused(code):
        trainer.hyperparameter_search(**dict(hp_space=space, n_trials=3) | call)
    assert not (tmp_path / "out" / NOTE_NAME).exists()
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()


@pytest.mark.parametrize(
    "settings", [{"learning_rat": 1e-3}, {"base_optimizer": "adamw"}, {"per_sample_max_grad_norm": -1.0}, 3]
)
def test_settings_that_no_trial_could_have_are_refused(tmp_path, settings):
    with refused("search-setting" if isinstance(settings, dict) else "search-space"):
        trainer_of_search(tmp_path).hyperparameter_search(lambda trial: settings, n_trials=3)


def test_a_search_without_a_function_that_makes_models_or_without_evaluation_data_is_refused(tmp_path):
    given = DopplerTrainer(
        tiny_bert(), arguments(tmp_path, noise_multiplier=None, target_epsilon=3.0), pad, text_data(48), text_data(8, seed=1)
    )
    with refused("search-without-model-init"):
        given.hyperparameter_search(space, n_trials=3)
    trainer = trainer_of_search(tmp_path)
    trainer.eval_dataset = None
    with refused("search-without-evaluation"):
        trainer.hyperparameter_search(space, n_trials=3)


def test_a_search_on_several_processes_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of_search(tmp_path)
    monkeypatch.setattr(DopplerTrainingArguments, "world_size", 2)
    with refused("search-processes"):
        trainer.hyperparameter_search(space, n_trials=3)


@pytest.mark.parametrize("name", sorted(SEARCHED))
def test_every_argument_that_may_be_searched_reaches_the_run_of_a_trial(tmp_path, name):
    values = {
        "learning_rate": 0.5, "num_train_epochs": 2, "max_steps": 7, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3, "per_sample_max_grad_norm": 0.5, "clipping": "automatic",
        "clipping_granularity": "per_layer", "augmentation_multiplicity": 2, "noise_shape": "banded:bands=2",
        "low_pass_filter": "momentum:beta=0.8", "base_optimizer": "sgd", "adam_bc_floor": 0.1, "weight_decay": 0.1,
        "adam_beta2": 0.9, "adam_epsilon": 1e-6, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "seed": 3,
    }  # fmt: skip
    args = trainer_of_search(tmp_path).args
    before = getattr(args, name)
    of_trial = arguments_of_trial(args, {name: values[name]})
    assert getattr(of_trial, name) == values[name] or str(getattr(of_trial, name)) == values[name]
    assert getattr(args, name) == before


def test_a_trial_trains_with_its_own_settings(tmp_path, monkeypatch):
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4, "noise_shape": "banded:bands=2",
        "low_pass_filter": "momentum:beta=0.8", "base_optimizer": "sgd", "learning_rate": 0.01, "seed": 7,
    }  # fmt: skip
    monkeypatch.setattr(search, "draw_number_of_trials", lambda distribution: 1)
    trainer = trainer_of_search(tmp_path)
    best = trainer.hyperparameter_search(lambda trial: settings, n_trials=3)
    assert best.hyperparameters == settings
    ledger = PrivacyLedger.load(tmp_path / "out")
    statement = ledger.statement
    assert (statement.expected_batch_size, statement.noise_shape, ledger.steps_run) == (6, "banded:bands=2", 4)
    assert ledger.epsilon() == pytest.approx(3.0, rel=1e-9)
    assert trainer.args.seed == 7


class Mechanism:
    """Stands in for a trainer: a trial is a score that is uniform between 0 and 1."""

    def __init__(self, random):
        self.random, self.callback_handler = random, types.SimpleNamespace(callbacks=[])
        self.accelerator = types.SimpleNamespace(free_memory=lambda: None)
        for name in search._KEPT:
            setattr(self, name, None)

    def train(self):
        self.model = types.SimpleNamespace(to=lambda device: None)
        self._run = types.SimpleNamespace(
            ledger=types.SimpleNamespace(runs=[types.SimpleNamespace(steps_reserved=1)], run_id="none"),
            forget_rounds=lambda: None,
        )

    def evaluate(self):
        return {"score": self.random.random()}


def published_scores(tmp_path, trials, *, number):
    trainer, note = Mechanism(np.random.default_rng(0)), search._Note("", tmp_path)
    trial = Trial(None, "", {}, tmp_path)
    for _ in range(number):
        drawn = [(each, types.SimpleNamespace()) for each in drawn_trials(lambda trial: {}, trials)]
        yield search._best_of(
            trainer, drawn, trial, compute_objective=lambda metrics: metrics["score"], direction="maximize", note=note
        ).objective


def test_the_published_trial_has_the_distribution_that_the_theorem_assumes(tmp_path):
    # With a fixed number of trials, half as many searches would have no score above 0.7.
    trials, number = NumberOfTrials(3.0), 500
    scores = np.array([*published_scores(tmp_path, trials, number=number)])
    for score in (0.3, 0.5, 0.7, 0.9):
        expected = trials.generating(score)
        assert np.mean(scores <= score) == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / number))


@functools.cache
def numbers_of_trials():
    return np.array([len(drawn_trials(lambda trial: {}, NumberOfTrials(10.0))) for _ in range(2500)])


def largest_delta(numbers, *, mu, epsilon):
    """δ at ε of searches with these numbers of trials, whose objective prefers what a record makes rare.

    A trial releases x from N(µ, 1) with the record and from N(0, 1) without it. The trial of least x is published.
    """
    thresholds = np.linspace(-5, 5, 400)
    with_record, without = (
        np.mean(np.power(norm.sf(thresholds - shift)[:, None], numbers[None, :]), axis=1) for shift in (mu, 0.0)
    )
    return float(np.max(with_record - math.exp(epsilon) * without))


def test_searches_of_a_gaussian_mechanism_keep_their_epsilon_and_a_fixed_number_of_trials_would_not():
    mean, mu, delta = 10, 0.5, 0.01
    trials = NumberOfTrials(mean)
    terms = dict(
        epsilon_at=lambda share: gaussian_epsilon(mu, delta=share),
        deltas_at=lambda epsilons: gaussian_delta(mu, np.maximum(epsilons, 1e-12)),
    )
    epsilon = selection_of(trials, delta=delta, **terms).epsilon
    assert largest_delta(numbers_of_trials(), mu=mu, epsilon=epsilon) < delta
    assert largest_delta(np.array([mean]), mu=mu, epsilon=epsilon) > 2 * delta


def test_a_search_spends_the_delta_of_all_its_trials():
    # A trial gives its record away with probability δ₁, and the objective prefers that. So δ of the search is E K·δ₁.
    trials, delta = NumberOfTrials(10.0), 0.01
    numbers = numbers_of_trials()

    def given_away(of_trial):
        return float(np.mean(1.0 - (1.0 - of_trial) ** numbers))

    selection = selection_of(trials, delta=delta, epsilon_at=lambda share: 0.0, deltas_at=np.zeros_like)
    assert given_away(selection.first.delta) < 1.3 * delta
    assert given_away(delta) > 3 * delta, "each trial would have the δ of the whole search"


def test_the_number_of_trials_has_its_distribution():
    # The logarithmic distribution of mean 3. A fixed number of trials would fail both.
    distribution = NumberOfTrials(3.0)
    numbers = [draw_number_of_trials(distribution) for _ in range(4000)]
    first = sum(number == 1 for number in numbers) / len(numbers)
    expected = 1.0 - distribution.another_after(1)
    assert first == pytest.approx(expected, abs=6 * math.sqrt(expected * (1 - expected) / len(numbers)))
    assert sum(numbers) / len(numbers) == pytest.approx(3.0, abs=0.5)


def test_settings_are_drawn_from_their_ranges_and_once_for_each_name():
    draws = [Draw() for _ in range(300)]
    wide = [draw.suggest_float("a", 1e-4, 1.0, log=True) for draw in draws]
    assert all(1e-4 <= value <= 1.0 for value in wide)
    assert 0.3 < sum(value < 1e-2 for value in wide) / 300 < 0.7
    assert [draw.suggest_float("a", 5.0, 6.0) for draw in draws] == wide
    assert {draw.suggest_float("b", 0.0, 1.0, step=0.5) for draw in draws} == {0.0, 0.5, 1.0}
    assert {draw.suggest_int("c", 1, 5, step=2) for draw in draws} == {1, 3, 5}
    assert {draw.suggest_int("d", 1, 3, log=True) for draw in draws} == {1, 2, 3}
    assert {draw.suggest_categorical("e", "xy") for draw in draws} == {"x", "y"}
    with refused("out-of-range"):
        Draw().suggest_float("f", 0.0, 1.0, log=True)
