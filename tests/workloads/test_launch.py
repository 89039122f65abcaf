"""What a script does, and leaves behind: the model, Transformers' state, and what was measured, beside each other."""

import json

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
