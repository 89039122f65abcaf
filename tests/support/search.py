"""A search of a tiny model: its trainer, a space, and a number of trials that a test chooses."""

import types
from pathlib import Path

from doppler_hf import DopplerTrainer
from doppler_hf.run.planning.plan import Trial
from doppler_hf.run.search import search
from doppler_hf.run.search.interrupted_searches import SearchCall
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import arguments

NO_CALL = SearchCall({}, {})


def trainer_of_search(
    tmp_path, *, model_init=lambda: tiny_bert(), evaluated=None, callbacks=None, cls=DopplerTrainer, **overrides
):
    terms = dict(noise_multiplier=None, target_epsilon=3.0, noise_shape="white", max_steps=3) | overrides
    return cls(
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


def make_trials(monkeypatch, number):
    monkeypatch.setattr(search, "another_trial", lambda trials, begun: begun < number)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Mechanism:
    """Stands in for a trainer: a trial is a score that is uniform between 0 and 1."""

    def __init__(self, random):
        self.random, self.callback_handler = random, types.SimpleNamespace(callbacks=[])
        self.accelerator = types.SimpleNamespace(free_memory=lambda: None)
        for name in search._KEPT:
            setattr(self, name, None)
        self.model = types.SimpleNamespace(to=lambda device: None)
        self.args, self.state = types.SimpleNamespace(check=lambda: None), types.SimpleNamespace(log_history=[])

    def train(self):
        self.model = types.SimpleNamespace(to=lambda device: None)
        self._run = types.SimpleNamespace(
            ledger=types.SimpleNamespace(runs=[types.SimpleNamespace(steps_reserved=1)], run_id="none"),
            forget_rounds=lambda: None,
            words={},
            chosen_step=None,
        )

    def evaluate(self):
        return {"score": self.random.random()}


def best_of(trainer, running, trials):
    """Return the best trial of a `Mechanism`."""
    trial = Trial(types.SimpleNamespace(trials=trials), {}, Path("."))
    return search._best_of(
        trainer, lambda trial: {}, trial, compute_objective=lambda metrics: metrics["score"], direction="maximize",
        running=running,
    )  # fmt: skip
