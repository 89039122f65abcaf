"""Everything that a private run leaves behind follows from its arguments and its private gradients, and from nothing else.

Two runs differ in their training examples and in their draws, and have the same private gradients: what they write, print
and log must be the same, but for clocks and random names. What is written is listed too, so that what Transformers adds is
noticed.
"""

import contextlib
import copy
import json
import logging
import re

import pytest
import torch
from datasets import Dataset

from doppler_hf import GradientRecorder
from doppler_hf.privacy import GaussianMechanism
from tests.support.tiers import thorough
from tests.support.trainers import On, trainer_of

CLOCKS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime", "eval_samples_per_second",
          "eval_steps_per_second"}  # fmt: skip
IN_STATE = {
    "best_global_step", "best_metric", "best_model_checkpoint", "epoch", "eval_steps", "global_step", "log_history",
    "is_hyper_param_search", "is_local_process_zero", "is_world_process_zero", "logging_steps", "max_steps",
    "num_input_tokens_seen", "num_train_epochs", "save_steps", "stateful_callbacks", "total_flos", "train_batch_size",
    "trial_name", "trial_params",
}  # fmt: skip
IN_LOGS = {"grad_norm", "learning_rate", "epoch", "eval_loss", "epsilon", "epsilon_planned", "total_flos", *CLOCKS}
IN_CHECKPOINT = {"config.json", "privacy_ledger.json", "trainer_state.json", "training_args.bin"}
FOR_RESUMING = {"optimizer.pt", "scheduler.pt"}


def examples(kind):
    """Two sets of as many examples with the same columns, and nothing else in common."""
    length, word = (3, 5) if kind == 0 else (13, 45)
    rows = [[word + (number + column) % 5 for column in range(length)] for number in range(24)]
    return Dataset.from_list([{"input_ids": row, "attention_mask": [1] * length, "labels": kind} for row in rows])


def fixed(self, sums, *, step, shards=None):
    """A private gradient of which nothing is known but its step and its shapes."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(value.shape, generator=generator).to(value.device) for name, value in sums.items()}


def clockless(value):
    """Without what the time of day decides, and the random name of a run, on which the hashes of a ledger hang."""
    if isinstance(value, dict):
        masked = CLOCKS | {"time", "run_id", "hash", "previous_hash"}
        return {name: None if name in masked else clockless(inner) for name, inner in value.items()}
    return [clockless(inner) for inner in value] if isinstance(value, list) else value


def content(path):
    if path.suffix == ".json":
        return clockless(json.loads(path.read_text()))
    return masked(path.read_text()) if path.suffix == ".md" else path.read_bytes()


def masked(text):
    """The same for what is printed."""
    text = re.sub(r"[0-9a-f]{64}", "HASH", text)
    return re.sub(rf"({'|'.join(CLOCKS)})('?: '?)[0-9.e+-]+", r"\1\2CLOCK", text)


def written_by(kind, folder, monkeypatch, capsys, **options):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(GaussianMechanism, "privatize", fixed)
    logged = []
    logger = On(log=lambda logs, **_: logged.append(copy.deepcopy(logs)))  # as TensorBoard's
    recorders = [] if "low_pass_filter" in options else [GradientRecorder(dimensions=16)]
    torch.manual_seed(kind)
    trainer = trainer_of(
        folder, data=examples(kind), callbacks=[logger, *recorders], output_dir="out",
        max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip
    metrics = trainer.train().metrics
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    files = {path.relative_to(folder).as_posix(): path for path in sorted((folder / "out").rglob("*")) if path.is_file()}
    return {
        "files": {name: content(path) for name, path in files.items()},
        "printed": masked(capsys.readouterr().out),
        "logged": clockless(logged),
        "returned": clockless(metrics),
    }


@pytest.mark.parametrize(
    ("options", "also"),
    [
        (dict(report_train_loss="private", per_sample_max_loss=5.0), {"loss", "train_loss"}),
        (dict(report_train_loss="raw"), set()),
        *thorough((dict(clipping="vanilla"), set()), (dict(low_pass_filter="second-order"), set())),
    ],
)
def test_what_is_written_follows_from_private_gradients(tmp_path, monkeypatch, capsys, options, also):
    options = dict(report_train_loss="none") | options
    runs = []
    for kind in range(2):
        (tmp_path / str(kind)).mkdir()
        runs.append(written_by(kind, tmp_path / str(kind), monkeypatch, capsys, **options))
    one, other = runs
    if options["report_train_loss"] == "raw":  # which is shown, and kept nowhere
        assert one.pop("printed") != other.pop("printed")
    for what in one:
        if isinstance(one[what], dict):
            assert one[what].keys() == other[what].keys()
            assert [name for name in one[what] if one[what][name] != other[what][name]] == []
        assert one[what] == other[what]

    checkpoint = {name.rpartition("/")[2] for name in one["files"] if name.startswith("out/checkpoint-2/")}
    assert checkpoint == IN_CHECKPOINT | FOR_RESUMING | {"model.safetensors"}
    state = one["files"]["out/checkpoint-2/trainer_state.json"]
    assert state.keys() == IN_STATE
    assert state["num_input_tokens_seen"] == state["total_flos"] == 0
    logged = set().union(*one["logged"])
    assert ("out/private_gradients.npz" in one["files"]) == ("low_pass_filter" not in options)
    assert logged == IN_LOGS | also
    assert set().union(*state["log_history"]) <= IN_LOGS | also | {"step"}
    clocks = {name for name in CLOCKS if name.startswith("train_")}
    assert one["returned"].keys() == {"epoch", "epsilon"} | clocks | (also & {"train_loss"})


@pytest.mark.parametrize("users", [True, *thorough(False)])
def test_how_many_rows_users_have_is_told_nowhere(tmp_path, caplog, users):
    """Of runs whose length is given in epochs Transformers logs the number of rows, and their number in a second."""
    told = []
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        for each in (2, 5):
            rows = [*examples(0)] * each
            data = Dataset.from_list(rows).add_column("user", [number // each for number in range(24 * each)])
            data = data if users else data.remove_columns("user").select(range(24))
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="transformers"):
                unit = {"privacy_unit_column": "user"} if users else {}
                trainer = trainer_of(tmp_path / str(each), data=data, num_train_epochs=2, max_steps=-1, **unit)
                metrics = trainer.train().metrics
            told += [re.search(r"Num examples = (\d+)", caplog.text)[1]]
            assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(48, rel=0.01)
    finally:
        logger.removeHandler(caplog.handler)
    assert told == ["24", "24"]


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ends", ["after its plan", "early", "by an error", "refused"])
def test_no_lock_stays_in_a_folder_once_a_run_has_ended(tmp_path, monkeypatch, ends):
    """However it has ended, in the output folder, in checkpoints, and in other folders where the model is saved."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    seen = []

    def look(state, control, **_):
        seen.append("out/_privacy_ledger.lock" in names_in(tmp_path))
        control.should_training_stop = ends == "early"
        if ends == "by an error":
            raise OSError("the disk is full")

    options = dict(learning_rate=9.0) if ends == "refused" else {}
    trainer = trainer_of(tmp_path, callbacks=[On(step_end=look)], save_strategy="steps", save_steps=1, **options)
    with pytest.raises((OSError, ValueError)) if ends in ("by an error", "refused") else contextlib.nullcontext():
        trainer.train()
    assert seen == [True] * {"after its plan": 4, "refused": 0}.get(ends, 1)
    if ends != "refused":
        for folder in ("out", "elsewhere", "elsewhere"):
            trainer.save_model(str(tmp_path / folder))
    assert not [name for name in names_in(tmp_path) if "lock" in name]
    # Nothing but the register of trained weights, and the secret of a round that can go on.
    states = {name for name in names_in(tmp_path) if name.startswith("state/") and "/trainings/" not in name}
    assert len(states) == (ends in ("early", "by an error"))
