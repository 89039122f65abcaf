"""The runs that choose the floor are paired, resume where they stopped, and the table says what the file holds."""

import json

import numpy as np
import pytest
import torch

from scripts.experiments import small_tasks, tune_floor
from scripts.experiments.tune_floor import Run


@pytest.fixture
def flags(small_data):
    """A command line with random images, random sentences, and runs of three steps."""
    return [
        *(f"--data_dir={small_data}", f"--output={small_data / 'f.jsonl'}", "--steps=3", "--expected_batch_size=8"),
        *("--epsilons", "4", "--fractions", "0.1", "1", "--report_seeds", "0", "1", "2"),
    ]


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_table_says_what_the_file_holds(flags, tmp_path, capsys):
    tune_floor.main(flags)
    results, printed = written(tmp_path), capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line.endswith("3 seeds")]
    assert titles == ["mnist, ε = 4, 3 seeds", "sst2, ε = 4, 3 seeds"]
    for task in ("mnist", "sst2"):
        accuracy = {}
        for fraction in (0.1, 1.0):
            rows = [row for row in results if (row["task"], row["fraction"]) == (task, fraction)]
            tuned = {row["lr"]: [] for row in rows if row["seed"] >= 100}
            for row in rows:
                assert row["noise_std"] == pytest.approx(row["sigma"] * row["max_grad_norm"] / 8, rel=1e-12)
                if row["seed"] >= 100:
                    tuned[row["lr"]].append(row["accuracy"])
            reported = {row["seed"]: row for row in rows if row["seed"] < 100}
            (lr,) = {row["lr"] for row in reported.values()}
            # The chosen rate is the best of the grid, and neither end of it.
            assert np.mean(tuned[lr]) == max(np.mean(values) for values in tuned.values())
            assert min(tuned) < lr < max(tuned)
            accuracy[fraction] = np.array([reported[seed]["accuracy"] for seed in (0, 1, 2)]) * 100
            row = f"| {fraction:g} | {lr:.2g} | {accuracy[fraction].mean():.2f} ± {accuracy[fraction].std(ddof=1):.2f} |"
            assert row in printed
        best = max(accuracy, key=lambda fraction: accuracy[fraction].mean())
        (other,) = accuracy.keys() - {best}
        difference = accuracy[other] - accuracy[best]
        assert f"| {difference.mean():+.2f} ± {difference.std(ddof=1) / 3**0.5:.2f} |" in printed


@pytest.mark.slow
def test_what_the_file_holds_is_not_run_again(flags, tmp_path, monkeypatch, capsys):
    tune_floor.main([*flags, "--tasks", "sst2"])
    before, table = (tmp_path / "f.jsonl").read_text(), capsys.readouterr().out.split("\n\n", 1)[1]
    lines = before.splitlines(keepends=True)
    (tmp_path / "f.jsonl").write_text("".join(lines[:-4]))
    tune_floor.main([*flags, "--tasks", "sst2"])
    resumed = written(tmp_path)
    assert [row["accuracy"] for row in resumed] == [json.loads(line)["accuracy"] for line in lines]

    monkeypatch.setattr(tune_floor, "train", lambda run, data_dir: pytest.fail(f"{run} was done already"))
    capsys.readouterr()
    tune_floor.main([*flags, "--tasks", "sst2"])
    assert written(tmp_path) == resumed
    assert capsys.readouterr().out.strip() == table.strip()
    with pytest.raises(pytest.fail.Exception, match="steps=2"):  # other settings are other runs
        tune_floor.main([*flags, "--tasks", "sst2", "--steps=2"])


@pytest.mark.parametrize("task", ["mnist", "sst2"])
def test_fractions_of_a_seed_see_the_same_draws_and_noise(flags, tmp_path, monkeypatch, task):
    """With no learning rate the network stays where it began, so that every private gradient must be the same."""
    seen = []

    class Recorder(small_tasks.GaussianMechanism):
        def privatize(self, sums, *, step):
            gradients = super().privatize(sums, step=step)
            seen[-1].append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
            return gradients

    monkeypatch.setattr(small_tasks, "GaussianMechanism", Recorder)
    for fraction, seed in ((0.01, 0), (1.0, 0), (1.0, 1)):
        seen.append([])
        run = Run(task, epsilon=4.0, fraction=fraction, lr=0.0, seed=seed, steps=3, expected_batch_size=8)
        tune_floor.train(run, str(tmp_path))
    small, large, other = (torch.stack(gradients) for gradients in seen)
    torch.testing.assert_close(small, large, rtol=0, atol=0)
    for step in range(3):  # another seed, and another step, has other noise
        assert not torch.allclose(small[step], other[step])
        assert not torch.allclose(small[step], small[step - 1])


def test_the_fraction_reaches_the_optimizer(flags, tmp_path, monkeypatch):
    floors = []

    class Recorder(small_tasks.DopplerOptimizer):
        def __init__(self, params, **arguments):
            super().__init__(params, **arguments)
            floors.append(self.floor / self.noise_std**2)

    monkeypatch.setattr(small_tasks, "DopplerOptimizer", Recorder)
    for fraction in (0.003, 3.0):
        run = Run("sst2", epsilon=4.0, fraction=fraction, lr=0.0, seed=0, steps=1, expected_batch_size=8)
        tune_floor.train(run, str(tmp_path))
    np.testing.assert_allclose(floors, [0.003, 3.0], rtol=1e-12)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "cola"], "--tasks must be of mnist, sst2, got 'cola'"),
        (["--tune_seeds", "2"], "--tune_seeds must have one seed or more and --report_seeds two or more, with none in both"),
        (
            ["--report_seeds", "7"],
            "--tune_seeds must have one seed or more and --report_seeds two or more, with none in both",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(flags, more, message):
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        tune_floor.main([*flags, *more])
