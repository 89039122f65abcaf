"""What people look at while a run goes on: ε at every step that is logged, and its terms in the trackers of Transformers."""

import json

from transformers import TrainerCallback

from doppler_hf import DopplerTrainingArguments
from tests.support.trainers import trained, trainer_of


class Tracker(TrainerCallback):
    """Takes what TensorBoard's, W&B's and MLflow's callbacks take: the arguments as a dictionary, and the logs."""

    def __init__(self):
        self.config, self.logs = {}, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.config = args.to_dict()
        json.loads(args.to_json_string())

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_every_log_has_the_epsilon_that_holds_wherever_the_run_ends(tmp_path):
    tracker = Tracker()
    trainer = trainer_of(tmp_path, callbacks=[tracker], max_steps=6, eval_strategy="steps", eval_steps=3)
    trainer.train()
    assert len(trainer.state.log_history) == len(tracker.logs) == 6 + 2 + 1
    assert {logs["epsilon"] for logs in (*trainer.state.log_history, *tracker.logs)} == {trainer.privacy.epsilon()}
    # Of the plan, and not of the steps so far: the name says so while the run goes on.
    of_steps = [logs for logs in tracker.logs if "train_runtime" not in logs]
    assert all(logs["epsilon_planned"] == logs["epsilon"] for logs in of_steps)
    assert "epsilon_planned" not in tracker.logs[-1] | trainer.evaluate()


def test_trackers_are_given_the_terms_of_the_run_and_nobody_else(tmp_path):
    tracker = Tracker()
    trainer = trainer_of(tmp_path, callbacks=[tracker], noise_multiplier=None, target_epsilon=3.0)
    given = trainer.args.to_dict()
    trainer.train()
    statement = trainer.privacy.ledger.statement
    changed = {name for name, value in given.items() if name not in tracker.config or tracker.config[name] != value}
    assert {"optim", "adam_beta1", "max_grad_norm"} <= changed
    assert not {"adam_beta1", "max_grad_norm", "data_seed", "ddp_bucket_cap_mb"} & tracker.config.keys()
    assert tracker.config["optim"] == "DopplerOptimizer (adam_bc)"
    assert {"adam_beta2", "adam_epsilon", "weight_decay", "seed"} <= tracker.config.keys()  # which are used
    for name in ("noise_multiplier", "per_sample_max_grad_norm", "sample_rate", "num_units", "expected_batch_size",
                 "steps_planned", "target_delta", "noise_shape"):  # fmt: skip
        assert tracker.config[f"privacy/{name}"] == getattr(statement, name), name
    assert tracker.config["noise_multiplier"] is None
    assert tracker.config["privacy/low_pass_filter"] == str(trainer.optimizer.optimizer.low_pass_filter)
    assert tracker.config["privacy/noise_std"] == trainer.privacy.settled_noise_std
    # They are no arguments: what is written as arguments is read as such.
    assert trainer.args.to_dict() == given
    DopplerTrainingArguments(**{name: given[name] for name in ("output_dir", "target_epsilon")})


def test_without_privacy_trackers_are_given_what_transformers_gives(tmp_path):
    tracker = Tracker()
    trainer = trained(trainer_of(tmp_path, callbacks=[tracker], noise_multiplier=None, disable_dp=True, max_steps=1))
    assert tracker.config == trainer.args.to_dict()
    assert not any("epsilon" in logs for logs in tracker.logs)
