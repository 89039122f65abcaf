"""`doppler-hf plan`: what it prints is what the accountants, SciPy and the definitions say."""

import json
import math
import re

import numpy as np
import pytest
import scipy.signal

from doppler_hf.cli import main
from doppler_hf.cli.plan import in_words
from doppler_hf.privacy.accounting.accounting import get_epsilon
from doppler_hf.reports import planned_runs as planning
from doppler_hf.reports.noise_shapes import AutoChoice
from tests.support.tiers import thorough

WORDS = ["plan", "--num-examples", "2000", "--batch-size", "100", "--epochs", "1.5", "--epsilon", "3", "--accountant", "rdp"]
FILTER = ["--low-pass-filter", "first-order-v1"]


def printed(words, capsys):
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def rows(text):
    """Return the rows of the first table, name → value."""
    return {name.strip(): value.strip() for name, value in re.findall(r"│ (.*?) +│ (.*?) *│", text)}


def alternatives(text):
    """Return the rows of the second table, as words."""
    return [line.split() for line in text.splitlines() if re.match(r"^ *→? *[\d.]+ +[\d,]+ ", line)]


@pytest.fixture
def one_cell(monkeypatch):
    monkeypatch.setattr(planning, "EPOCH_FACTORS", (1,))
    monkeypatch.setattr(planning, "BATCH_SIZE_FACTORS", (1,))


@pytest.mark.usefixtures("one_cell")
def test_json_holds_every_number(capsys):
    plan = json.loads(printed([*WORDS, *FILTER, "--json", "--max_grad_norm=0.5"], capsys))
    delta = 2000**-1.1
    sigma = plan["noise_multiplier"]
    assert plan["solved_for"] == "noise_multiplier"
    assert (plan["num_examples"], plan["batch_size"], plan["sample_rate"], plan["steps"]) == (2000, 100, 0.05, 30)
    assert (plan["max_grad_norm"], plan["epochs"], plan["target_epsilon"], plan["accountant"]) == (0.5, 1.5, 3.0, "rdp")
    assert plan["examples_processed"] == 3000
    assert plan["low_pass_filter"] == "first-order-v1"
    np.testing.assert_allclose(plan["delta"], delta, rtol=1e-15)
    np.testing.assert_allclose(plan["noise_std"], sigma * 0.5 / 100, rtol=1e-15)
    np.testing.assert_allclose(plan["average_noise_std"], sigma * 0.5 / 100 / math.sqrt(30), rtol=1e-15)
    expected = get_epsilon(noise_multiplier=sigma, sample_rate=0.05, steps=30, delta=delta, accountant="rdp")
    np.testing.assert_allclose(plan["epsilon"], expected, rtol=1e-12)
    # The filter, by SciPy's simulation and its own group delay.
    b, a = (1 / 11, 1 / 11), (1, -9 / 11)
    kappa = scipy.signal.dimpulse((b, a, 1), n=2000)[1][0].ravel()
    np.testing.assert_allclose(plan["noise_gain"], np.sum(kappa**2), rtol=1e-9)
    np.testing.assert_allclose(plan["filtered_noise_std"], plan["noise_std"] * np.sqrt(np.sum(kappa**2)), rtol=1e-9)
    np.testing.assert_allclose(plan["delay_steps"], scipy.signal.group_delay((b, a), w=[0.0])[1][0], rtol=1e-12)
    np.testing.assert_allclose(plan["delay_steps"], 5.0, rtol=1e-9)
    np.testing.assert_allclose(plan["delay_share_of_steps"], 5.0 / 30, rtol=1e-9)


def test_tables_show_the_numbers_of_the_json(capsys):
    plan = json.loads(printed([*WORDS, *FILTER, "--json"], capsys))
    text = printed([*WORDS, *FILTER], capsys)
    assert rows(text) == {
        "training examples N": "2,000",
        "expected batch size B": "100",
        "sampling rate q = B/N": "0.05",
        "epochs": "1.5",
        "steps T (max_steps)": "30",
        "clip norm C": "1",
        "noise multiplier σ": f"{plan['noise_multiplier']:.6g} (solved for)",
        "noise_std = σC/B": f"{plan['noise_std']:.4g}",
        "δ": f"{2000**-1.1:.4g}",
        "ε by rdp": f"{plan['epsilon']:.4g} (target 3)",
        "noise_shape": "white, as in the next table; for 'auto' see below",
        "filter": "first-order-v1",
        "its noise gain Σκ²": f"{plan['noise_gain']:.4g} (noise_std {plan['filtered_noise_std']:.4g} after it)",
        "its delay": "5 steps, 16.67% of T",
    }
    assert "ε = 3 (rdp), δ = 0.000234, N = 2,000, C = 1" in text
    shown = alternatives(text)
    assert len(shown) == 20
    for row, cell in zip(shown, plan["alternatives"], strict=True):
        chosen = [cell[name] for name in ("epochs", "batch_size")] == [1.5, 100]
        assert row == [
            *(["→"] if chosen else []),
            f"{cell['epochs']:.4g}",
            f"{cell['batch_size']:,}",
            f"{cell['steps']:,}",
            f"{cell['noise_multiplier']:#.4g}",
            f"{cell['noise_std']:.2e}",
            f"{cell['filtered_noise_std']:.2e}",
            f"{cell['average_noise_std']:.2e}",
            f"{cell['examples_processed']:,}",
        ]
    assert "filtered: noise_std·√Σκ²" in " ".join(text.split())


@pytest.mark.usefixtures("one_cell")
def test_the_plan_says_what_auto_takes(capsys):
    auto = json.loads(printed([*WORDS, "--json"], capsys))["auto"]
    text = " ".join(printed(WORDS, capsys).split())
    assert f"noise_shape={auto['noise_shape']!r} and low_pass_filter={auto['low_pass_filter']!r}" in text
    assert f"σ = {auto['noise_multiplier']:.4g}, and {auto['noise_std']:.4g} per coordinate of a step." in text


def test_a_long_strategy_is_not_printed():
    words = in_words(AutoChoice("banded:bands=9", "none", 1.5, 0.25))
    assert "noise_shape=a strategy of 9 bands (--json has it) and low_pass_filter='none'" in words
    assert "banded:bands=8" in in_words(AutoChoice("banded:bands=8", "none", 1.5, 0.25))


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_target_is_met_by_the_accountant_that_solves(accountant, capsys):
    words = f"plan --num-examples 67349 --batch-size 1000 --epochs 3 --epsilon 3 --accountant {accountant} --json".split()
    plan = json.loads(printed(words, capsys))
    assert plan["steps"] == 204
    assert 2.997 <= plan["epsilon"] <= 3.0


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize(
    ("left_out", "row"),
    [
        ("--epsilon", "ε by rdp"),
        *thorough(("--noise-multiplier", "noise multiplier σ"), ("--epochs", "epochs")),
        ("--batch-size", "expected batch size B"),
    ],
)
def test_what_was_solved_for_is_marked(left_out, row, capsys):
    given = {"--epsilon": "3", "--noise-multiplier": "1", "--epochs": "2", "--batch-size": "100"}
    words = [word for flag, value in given.items() if flag != left_out for word in (flag, value)]
    text = printed(["plan", "--num-examples", "2000", "--accountant", "rdp", *words], capsys)
    assert [name for name, value in rows(text).items() if value.endswith("(solved for)")] == [row]
    assert [row[0] for row in alternatives(text)] == ["→"]


@pytest.mark.usefixtures("one_cell")
def test_delta_that_permits_publishing_an_example_is_refused(capsys):
    assert main([*WORDS, "--delta", "0.0005"]) == 2
    assert "delta must be positive and less than 1/N = 0.0005, got 0.0005. Leave it out" in capsys.readouterr().err
    assert rows(printed([*WORDS, "--delta", "0.0004"], capsys))["δ"] == "0.0004"


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("ending", ["png", *thorough("svg", "pdf")])
def test_picture_is_written(ending, tmp_path, capsys):
    path = tmp_path / "new" / f"plan.{ending}"
    printed([*WORDS, "--plot", str(path)], capsys)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "plan.txt"], "--plot must end in one of .png, .svg, .pdf, got plan.txt."),
        (["--low-pass-filter", "b=0.5"], "The DC gain sum(b)/sum(a) must be 1, got 0.5. Multiply b by 2"),
        (
            ["--noise-multiplier", "1"],
            "Three of epsilon, noise_multiplier, epochs (or max_steps) and batch_size must be set, got all",
        ),
        (["--batch-size", "3000"], "batch_size must be at most 2000, got 3000. Lower batch_size."),
        (["--epsilon", "-1"], "epsilon must be a finite number > 0, got -1.0."),
        (["--accountant", "prv", "--batch-size", "2000"], "batch_size=2000 puts all examples in every step"),
    ],
)
def test_mistakes_end_with_one_line_before_anything_is_printed(words, message, capsys):
    assert main([*WORDS, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.usefixtures("one_cell")
def test_picture_that_cannot_be_written_is_a_mistake(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*WORDS, "--plot", str(tmp_path / "file" / "plan.png")]) == 2
    assert re.match(
        r"error: The picture .*plan\.png cannot be written \(.*\)\. Give another folder\.", capsys.readouterr().err
    )
