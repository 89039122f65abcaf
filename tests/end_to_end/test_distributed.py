"""Two processes train what one would: disjoint shards, one reduction, noise once, replicas identical."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

SCRIPT = """
    import os, sys
    import torch
    from tests.support.trainers import NoSignal, Recorder, weights
    from doppler_hf import DopplerTrainer, DopplerTrainingArguments
    from tests.support.tiny import pad, text_data, tiny_bert

    folder, case = sys.argv[1:3]
    common = dict(
        output_dir=f"{folder}/{case}", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, max_steps=5,
        eval_strategy="steps", eval_steps=5,
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    model = tiny_bert()
    if case == "equal":  # every example in every draw, so that one process and two draw the same
        args = dict(noise_multiplier=0.5, noise_seed=3, per_device_train_batch_size=24 // world, base_optimizer="sgd",
                    low_pass_filter="first-order-v1", learning_rate=0.1)
        cls = DopplerTrainer
    else:
        args = dict(noise_multiplier=2.0, per_sample_max_grad_norm=0.5, per_device_train_batch_size=8 // world)
        cls = NoSignal
    args = DopplerTrainingArguments(**common, **args)
    if args.process_index > 0:  # replicas must not rely on being built alike
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    recorder = Recorder()
    trainer = cls(model=model, args=args, train_dataset=text_data(), eval_dataset=text_data(7, seed=1), data_collator=pad,
                  callbacks=[recorder])
    trainer.train()
    torch.save(
        {"weights": weights(trainer), "gradients": torch.stack(recorder.gradients),
         "steps": trainer.privacy.ledger.steps_run, "batch": trainer.privacy.ledger.statement.expected_batch_size},
        f"{folder}/{case}-{world}-{args.process_index}.pt",
    )
"""


def launch(folder, case, processes):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), str(folder), case],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{case}-{processes}-{rank}.pt") for rank in range(processes)]


def test_two_processes_equal_one(tmp_path):
    (one,), two = launch(tmp_path, "equal", 1), launch(tmp_path, "equal", 2)
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    assert one["batch"] == two[0]["batch"] == 24
    torch.testing.assert_close(two[0]["gradients"], one["gradients"], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(two[0]["weights"], one["weights"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_trap_14_noise_is_added_once_whatever_the_number_of_processes(tmp_path, processes):
    runs = launch(tmp_path, "noise", processes)
    noise = runs[0]["gradients"]
    assert all(torch.equal(run["gradients"], noise) for run in runs)
    assert [run["steps"] for run in runs] == [5] * processes
    std = 2.0 * 0.5 / 8
    # Twice the noise, or half, would be off by √2; the standard error of the deviation is 1/√(2·coordinates).
    assert noise.std().item() == pytest.approx(std, rel=6 / (2 * noise.numel()) ** 0.5)
