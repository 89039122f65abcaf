"""The runs that compare shapes of the noise are tuned each, paired, of equal ε, and the table says what the file holds."""

import json
import re

import numpy as np
import pytest

from doppler_hf.privacy import default_delta, get_epsilon
from scripts.experiments import noise_shaping


@pytest.fixture
def flags(small_data):
    """A command line for runs of three steps on random sentences."""
    return [
        *(f"--data_dir={small_data}", f"--output={small_data / 'f.jsonl'}", "--steps=3", "--expected_batch_size=8"),
        *("--tasks", "sst2", "--epsilons", "4", "--bases", "sgd", "--shapes", "white", "banded:bands=2"),
        *("--filters", "none", "--report_seeds", "0", "1"),
    ]


def test_the_table_says_what_the_file_holds_and_nothing_is_run_twice(flags, small_data, monkeypatch, capsys):
    noise_shaping.main(flags)
    rows = [json.loads(line) for line in (small_data / "f.jsonl").read_text().splitlines()]
    printed = capsys.readouterr().out
    accuracy = {}
    for shape, bands in (("white", 1), ("banded:bands=2", 2)):
        own = [row for row in rows if row["noise_shape"] == shape]
        for row in own:
            turns = dict(sample_rate=bands * 8 / 40, steps=-(-3 // bands), delta=default_delta(40))
            assert 3.99 < get_epsilon(noise_multiplier=row["sigma"], **turns) <= 4.0
        reported = {row["seed"]: row for row in own if row["seed"] < 100}
        (rate,) = {row["lr"] for row in reported.values()}
        tuned = {
            lr: [row["accuracy"] for row in own if row["seed"] >= 100 and row["lr"] == lr] for lr in {r["lr"] for r in own}
        }
        assert min(tuned) < rate < max(tuned)
        assert np.mean(tuned[rate]) == max(map(np.mean, tuned.values()))
        accuracy[shape] = 100 * np.array([reported[seed]["accuracy"] for seed in (0, 1)])
        mean, std = accuracy[shape].mean(), accuracy[shape].std(ddof=1)
        assert f"| {shape} | none | {rate:g} | {mean:.2f} ± {std:.2f} |" in printed
    paired = accuracy["banded:bands=2"] - accuracy["white"]
    if paired.any():
        assert f"| {paired.mean():+.2f} ± {paired.std(ddof=1) / 2**0.5:.2f} |" in printed
    monkeypatch.setattr(noise_shaping, "train", lambda *args, **options: pytest.fail("this was done already"))
    noise_shaping.main(flags)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "cola"], "--tasks must be of mnist, mnist-perceptron, sst2, got 'cola'"),
        (["--tune_seeds", "1"], "none in both, got [1]"),
    ],
)
def test_mistakes_are_one_line(flags, more, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        noise_shaping.main([*flags, *more])
