"""What a script does, and leaves behind: the model, Transformers' state, and what was measured, beside each other."""

import json

import pytest
import torch

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.workloads.arguments import parse_args
from doppler_hf.workloads.launch import train_and_evaluate
from tests.support.tiny import text_data
from tests.support.trainers import checked_trainer_of as trainer_of


def test_model_state_and_metrics_lie_in_the_output_folder(tmp_path):
    trainer = trainer_of(tmp_path, do_train=True, do_eval=True)
    eval_datasets = {"eval": text_data(8, seed=1), "other": text_data(6, seed=2)}
    train_and_evaluate(trainer, eval_datasets, complete=lambda metrics: metrics.update(added=len(metrics)))
    folder = tmp_path / "out"
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 4
    assert "train_loss" in json.loads((folder / "train_results.json").read_text())
    for prefix in eval_datasets:
        metrics = json.loads((folder / f"{prefix}_results.json").read_text())
        assert {f"{prefix}_loss", "added"} <= metrics.keys()


@pytest.mark.parametrize("left_out", ["do_train", "do_eval"])
def test_a_script_can_leave_out_one_of_training_and_evaluation(tmp_path, left_out):
    flags = ["--output_dir", str(tmp_path / "unused"), "--noise_multiplier", "1"]
    (both,), (one,) = (parse_args(DopplerTrainingArguments, argv=argv) for argv in (flags, [*flags, f"--{left_out}=false"]))
    assert both.do_train
    assert both.do_eval
    assert not getattr(one, left_out)
    trainer = trainer_of(tmp_path, do_train=one.do_train, do_eval=one.do_eval)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    train_and_evaluate(trainer, {"eval": text_data(8, seed=1)})
    trains, evaluates = left_out != "do_train", left_out != "do_eval"
    folder = tmp_path / "out"
    assert (folder / "model.safetensors").exists() == (folder / "train_results.json").exists() == trains
    assert (folder / "eval_results.json").exists() == evaluates
    moved = any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert moved == trains
