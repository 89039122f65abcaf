"""`doppler-hf plan`: what it prints is what the accountant, SciPy and the definitions say."""

import json
import re

import numpy as np
import pytest
import scipy.signal
from matplotlib.figure import Figure

from doppler_hf import DopplerTrainingArguments
from doppler_hf.cli import main, plan, random_model
from doppler_hf.cli import planned_runs as planning
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy.accounting.accounting import Releases, get_total_epsilon
from doppler_hf.privacy.accounting.attack import trade_off
from doppler_hf.privacy.accounting.selection import Guarantee, NumberOfTrials, Selection, second_epsilon
from doppler_hf.run.optimizer import first_learning_rate
from doppler_hf.run.planning.learning_rate import LayerOfSums, TrainedWeights, learning_rate_of_rule
from tests.support.tiers import thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import trained, trainer_of

WORDS = ["plan", "--num-examples", "2000", "--batch-size", "100", "--epochs", "1.5", "--epsilon", "3"]
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
@pytest.mark.parametrize("given", [*thorough("--epsilon=3"), "--noise-multiplier=1"])
def test_json_holds_every_number(capsys, given):
    words = [word for word in WORDS if word not in ("--epsilon", "3")]
    plan = json.loads(printed([*words, given, *FILTER, "--json", "--max_grad_norm=0.5"], capsys))
    delta = 2000**-1.1
    sigma, shape = plan["noise_multiplier"], NoiseShape.parse(plan["noise_shape"])
    assert shape.is_white == (given == "--noise-multiplier=1") == (sigma == 1.0)
    assert plan["solved_for"] == ("epsilon" if sigma == 1.0 else "noise_multiplier")
    assert (plan["num_examples"], plan["batch_size"], plan["sample_rate"], plan["steps"]) == (2000, 100, 0.05, 30)
    assert (plan["max_grad_norm"], plan["epochs"]) == (0.5, 1.5)
    assert plan["target_epsilon"] == (plan["epsilon"] if sigma == 1.0 else 3.0)
    assert plan["examples_processed"] == 3000
    assert plan["low_pass_filter"] == "first-order-v1"
    np.testing.assert_allclose(plan["delta"], delta, rtol=1e-15)
    releases = Releases(sigma, 0.05, 30, shape.c)
    expected = get_total_epsilon([releases], delta=delta)
    np.testing.assert_allclose(plan["epsilon"], expected, rtol=1e-12)
    best = trade_off([releases])
    rates = [best.true_positive_rate(rate) for rate in (0.01, 0.001)]
    np.testing.assert_allclose([*plan["attack"].values()], [*rates, best.advantage], rtol=1e-9)
    # Noise and filter, by SciPy's simulation and its own group delay.
    b, a = (1 / 11, 1 / 11), (1, -9 / 11)
    impulse = np.eye(1, 2000)[0]
    of_noise = sigma / np.sqrt(0.99) * np.linalg.norm(shape.c) * scipy.signal.lfilter([1.0], shape.c, impulse)
    of_filtered = scipy.signal.lfilter(b, a, of_noise)
    np.testing.assert_allclose(plan["noise_std"], np.linalg.norm(of_noise[:31]) * 0.5 / 100, rtol=1e-9)
    np.testing.assert_allclose(plan["filtered_noise_std"], np.linalg.norm(of_filtered) * 0.5 / 100, rtol=1e-9)
    averaged = np.linalg.norm(np.cumsum(of_noise[:30])) / 30 * 0.5 / 100
    np.testing.assert_allclose(plan["average_noise_std"], averaged, rtol=1e-9)
    np.testing.assert_allclose(plan["delay_steps"], scipy.signal.group_delay((b, a), w=[0.0])[1][0], rtol=1e-12)
    np.testing.assert_allclose(plan["delay_steps"], 5.0, rtol=1e-9)
    np.testing.assert_allclose(plan["delay_share_of_steps"], 5.0 / 30, rtol=1e-9)


@pytest.mark.usefixtures("one_cell")
def test_plan_and_training_name_the_same_noise_multiplier(tmp_path, capsys):
    """By the words of both, for noise and filter that nobody has named."""
    plan = printed(["plan", "--num-examples", "200", "--batch-size", "16", "--max-steps", "40", "--epsilon", "8"], capsys)
    auto = dict(noise_multiplier=None, target_epsilon=8.0, learning_rate=None, per_device_train_batch_size=8)
    trained(trainer_of(tmp_path, data=text_data(200), **auto, max_steps=40))
    start = capsys.readouterr().out
    sigma, shape = re.search(r"noise multiplier ([\d.]+); shape: (.*?) \(auto\)", start).groups()
    assert rows(plan)["noise multiplier"] == f"{sigma} (computed)"
    assert (rows(plan)["noise_shape"][:6], shape[:6]) == ("banded", "banded")
    assert f"filter: {rows(plan)['low_pass_filter'].split()[0]} (auto)" in start
    sentence = r"In this run \(ε = (8|7\.9[789])\), an attack .* recognises a training record with a probability of at most"
    assert re.search(sentence, " ".join(plan.split()))


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("given", ["--epsilon=8", "--noise-multiplier=0.7"])
def test_the_noise_of_a_plan_is_that_of_its_run_which_logs_the_loss(tmp_path, capsys, given):
    words = ["plan", "--num-examples=200", "--batch-size=16", "--max-steps=40", given, "--json"]
    plan = json.loads(printed(words, capsys))
    own = dict(target_epsilon=8.0, noise_multiplier=None) if "epsilon" in given else dict(noise_multiplier=0.7 / 0.99**0.5)
    trainer = trained(trainer_of(tmp_path, data=text_data(200), **own, per_device_train_batch_size=8, max_steps=40))
    statement = trainer.privacy.statement
    assert statement.train_loss == "private"
    shape = NoiseShape.parse(statement.noise_shape)
    noise = statement.noise_multiplier * shape.std_of_average(40) / 16
    assert plan["average_noise_std"] == pytest.approx(noise, rel=1e-3)
    assert plan["noise_multiplier"] == pytest.approx(statement.effective_noise_multiplier, rel=1e-3)
    run = planning.PlannedRun(200, 16, 40, statement.effective_noise_multiplier, 1.0)
    white = statement.noise_multiplier / (16 * 40**0.5)
    assert run.average_noise_std() == pytest.approx(white, rel=1e-9)


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("given", ["--epochs=1", "--epochs=1 --sampling=poisson", *thorough("--max-steps=51")])
def test_a_plan_in_epochs_has_the_steps_of_a_training_and_poisson_sampling_white_noise(given, capsys):
    words = ["plan", "--num-examples", "61200", "--batch-size", "1200", "--epsilon", "8", "--json", *given.split()]
    plan = json.loads(printed(words, capsys))
    shape = NoiseShape.parse(plan["noise_shape"])
    assert shape.is_white == given.endswith("poisson")
    # Of 51 steps, rounds leave one or three, by the bands.
    left_out = 51 % (shape.bands * (51 // shape.bands)) if given == "--epochs=1" else 0
    assert plan["steps"] == 51 - left_out
    assert (left_out > 0) == (given == "--epochs=1")
    releases = Releases(plan["noise_multiplier"], 1200 / 61_200, plan["steps"], shape.c, plan["sampling"])
    assert plan["epsilon"] == pytest.approx(get_total_epsilon([releases], delta=61_200**-1.1), rel=1e-12)


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize(("given", "row"), [("--noise-multiplier=1", "ε"), *thorough(("--epsilon=3", "noise multiplier"))])
def test_what_follows_is_marked(given, row, capsys):
    text = printed(["plan", "--num-examples=2000", "--batch-size=100", "--epochs=2", given], capsys)
    assert [name for name, value in rows(text).items() if value.endswith("(computed)")] == [row]
    assert [row[0] for row in alternatives(text)] == ["→"]


@pytest.mark.usefixtures("one_cell")
def test_noise_is_in_units_of_the_clip_norm_with_two_digits_everywhere(tmp_path, capsys):
    words = ["plan", "--num-examples=200", "--batch-size=16", "--max-steps=40", "--noise-multiplier=1"]
    ones, halves = (printed([*words, f"--max-grad-norm={norm}"], capsys) for norm in (1, 0.5))
    assert rows(ones)["noise per coordinate"] == rows(halves)["noise per coordinate"] == "0.0099 C"
    assert alternatives(ones)[0][-3:-1] == alternatives(halves)[0][-3:-1] == ["0.0099", "C"]
    terms = dict(noise_multiplier=1.005, per_device_train_batch_size=8, max_steps=40, per_sample_max_grad_norm=0.5)
    trained(trainer_of(tmp_path, data=text_data(200), **terms, log_level="info"))
    assert "noise per coordinate of the average gradient: 0.0099 C\n" in capsys.readouterr().out


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_the_learning_rate_is_the_one_that_a_training_chooses(tmp_path, capsys, schedule):
    model = tiny_bert()
    size, folder = sum(each.numel() for each in model.parameters()), tmp_path / "model"
    model.config.save_pretrained(folder)
    words = ["plan", "--num-examples=200", "--batch-size=16", "--max-steps=40", "--epsilon=8"]
    words.append(f"--lr-scheduler-type={schedule}")
    auto = dict(
        noise_multiplier=None,
        target_epsilon=8.0,
        learning_rate=None,
        lr_scheduler_type=schedule,
        per_device_train_batch_size=8,
    )
    trainer = trained(trainer_of(tmp_path, model=model, data=text_data(200), **auto, max_steps=40))
    (started,) = re.findall(r"learning rate +(\S+) \(auto", capsys.readouterr().out)
    exact = printed([*words, f"--model={folder}", "--task=text-classification"], capsys)
    assert rows(exact)["learning rate"] == f"{started} (auto)"
    assert rows(exact)["trained weights"] == f"{size:,}"
    most = json.loads(printed([*words, f"--trainable-parameters={size:e}", "--json"], capsys))
    assert most["trainable_parameters"] == size
    assert not most["learning_rate_is_exact"]
    assert most["learning_rate"] >= 0.999 * first_learning_rate(trainer.optimizer.optimizer)
    # Many weights: their walk together is what is bounded, and four times as many halve the rate.
    large, larger = (
        json.loads(printed([*words, f"--trainable-parameters={number}", "--json"], capsys))["learning_rate"]
        for number in ("1e8", "4e8")
    )
    assert large == pytest.approx(2 * larger, rel=1e-6)
    plain = printed(words, capsys)
    assert "learning rate" not in rows(plain)
    assert "learning rate" in rows(exact)


def test_layers_and_adapters_only_lower_the_learning_rate():
    terms = dict(noise_multiplier=1.0, batch_size=64, shape=NoiseShape.banded(2), rates=[1.0] * 50)
    most = learning_rate_of_rule(TrainedWeights(10_000), **terms)
    layers = [LayerOfSums(4096, is_of_data=False, is_first=False)]
    assert learning_rate_of_rule(TrainedWeights(10_000, layers), **terms) < most
    assert learning_rate_of_rule(TrainedWeights(10_000, has_adapters=True), **terms) <= most
    assert learning_rate_of_rule(TrainedWeights(10_000, walks_of_adapters=[0.01]), **terms) < most


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--trainable-parameters=0"], "at least 1"),
        (["--trainable-parameters=nan"], "at least 1"),
        (["--trainable-parameters=inf"], "at least 1"),
        (["--model=x"], "--task text-classification"),
        (["--model=x"], "question-answering"),
        (["--task=causal-lm"], "no effect without --model"),
        (["--model=/no/such/folder", "--task=causal-lm"], "/no/such/folder"),
    ],
)
def test_weights_that_are_none_are_one_line(given, said, capsys, one_cell):
    assert main([*WORDS, *given]) == 2
    error = capsys.readouterr().err
    assert said in error


@pytest.mark.usefixtures("one_cell")
def test_whole_numbers_may_be_written_as_floats_and_other_numbers_are_refused(capsys):
    words = ["plan", "--num-examples=2e3", "--batch-size=1e2", "--max-steps=4.0", "--noise-multiplier=1", "--json"]
    plan = json.loads(printed(words, capsys))
    assert (plan["num_examples"], plan["batch_size"], plan["steps"]) == (2000, 100, 4)
    for value in ("2.5e0", "nan", "inf", "1e300", "9" * 20, "many", "1,000"):
        with pytest.raises(SystemExit):
            main([*WORDS, f"--batch-size={value}"])
        assert f"expected a whole number below 1e+15, as 5000 or 5e3; got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--target-epsilon=3", "--epsilon"),
        ("--target_delta=1e-5", "--delta"),
        ("--num_train_epochs=3", "--epochs"),
        ("--per_device_train_batch_size=8", "--batch-size"),
        ("--per_sample_max_grad_norm=1", "--max-grad-norm"),
        ("--max-step=4", "--max-steps"),
        ("--q", None),
    ],
)
def test_a_flag_with_another_name_in_training_is_proposed_by_its_name_here(given, meant, capsys):
    with pytest.raises(SystemExit):
        main([*WORDS, given])
    told = capsys.readouterr().err
    assert f"unrecognized arguments: {given.partition('=')[0].replace('_', '-')}" in told
    assert ("did you mean" in told) == (meant is not None)
    assert meant is None or f"(did you mean '{meant}'?)" in told


def test_a_noise_multiplier_whose_epsilon_is_no_float_is_one_line(capsys, one_cell):
    words = ["plan", "--num-examples=2000", "--batch-size=100", "--max-steps=4"]
    for value in ("1e-300", "1e-120"):
        assert main([*words, f"--noise-multiplier={value}"]) == 2
        assert f"0 or at least 1e-50; got {value}" in capsys.readouterr().err
    assert main([*words, "--noise-multiplier=1e-50"]) == 0


def test_the_tasks_and_the_budget_are_those_of_the_files_that_import_torch():
    assert (*random_model.TASKS,) == plan.TASKS
    assert DopplerTrainingArguments.train_loss_budget == planning.TRAIN_LOSS_BUDGET


LONG = "b=" + ",".join(["0.0125"] * 12) + ";a=1,-0.85"
WIDE = {
    "usual": ["--num-examples=67349", "--batch-size=1000", "--epochs=3", "--epsilon=3"],
    "large": ["--num-examples=100000000", "--batch-size=250000", "--epochs=123.456", "--noise-multiplier=0.71234"],
    "small": ["--num-examples=200", "--batch-size=16", "--max-steps=40", "--epsilon=8", "--max-grad-norm=0.12345"],
    "many bands": ["--num-examples=60000", "--batch-size=100", "--epochs=4", "--epsilon=1"],
    "a long filter": ["--num-examples=2000", "--batch-size=100", "--epochs=2", "--epsilon=3", f"--low-pass-filter={LONG}"],
    "weights": ["--num-examples=2000", "--batch-size=100", "--epochs=2", "--epsilon=3", "--trainable-parameters=1.2345e9"],
}


@pytest.mark.parametrize("name", thorough(*WIDE))
def test_no_row_of_a_table_wraps_at_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(planning, "EPOCH_FACTORS", (1, *planning.EPOCH_FACTORS[-1:]))  # the ends, which are the widest
    monkeypatch.setattr(planning, "BATCH_SIZE_FACTORS", (planning.BATCH_SIZE_FACTORS[0], 1, planning.BATCH_SIZE_FACTORS[-1]))
    text = printed(["plan", *WIDE[name]], capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert "" not in rows(text), "the second line of a row has no name"
    title, *table = text[text.index("\nTraining runs with the same guarantee") :].strip().splitlines()
    assert re.fullmatch(r"Training runs with the same guarantee, ε = [\d.]+, δ = [\d.e-]+:", title)
    first = next(number for number, line in enumerate(table) if "───" in line)
    lines = [
        line
        for line in table[first + 1 : table.index(next(line for line in table if line.startswith("noise is what")))]
        if line.strip()
    ]
    assert all(re.fullmatch(r" *→? *[\d.e+]+ +[\d,]+ +[\d,]+ +[\d.e-]+ C +[\d,]+ *", line) for line in lines)
    # Two digits, neither more nor less.
    noises = re.findall(r"([\d.e-]+) C\b", text[: text.index("\nnoise is what")])
    assert all(len(re.sub(r"e.*|\.", "", noise).lstrip("0")) == 2 for noise in noises), noises


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("given", ["--epsilon=3", *thorough("--epsilon=3 --sampling=poisson", "--noise-multiplier=1")])
def test_a_search_costs_its_target_and_each_trial_less(given, capsys):
    words = ["plan", "--num-examples=2000", "--batch-size=100", "--epochs=2", "--delta=1e-4", *given.split()]
    plan = json.loads(printed([*words, "--trials=10", "--json"], capsys))
    search, shape = plan["search"], NoiseShape.parse(plan["noise_shape"])
    (first, share), (second, middle) = search["first_guarantee"], search["second_guarantee"]
    releases = Releases(plan["noise_multiplier"], 0.05, plan["steps"], shape.c, plan["sampling"])
    # A trial satisfies both guarantees, whose parts add up to ε and δ.
    assert get_total_epsilon([releases], delta=share) <= first * (1 + 1e-9)
    guarantees = Selection(NumberOfTrials(10), Guarantee(first, share), Guarantee(second, middle))
    assert second_epsilon([releases], guarantees) <= second
    assert share * 10 == pytest.approx(plan["delta"]) == pytest.approx(1e-4)
    growth = NumberOfTrials(10).growth(np.array(second), np.array(middle))
    assert first + growth == pytest.approx(plan["epsilon"]) == pytest.approx(plan["target_epsilon"])
    assert search["trial_epsilon"] == get_total_epsilon([releases], delta=1e-4) < plan["epsilon"]
    assert search["expected_examples_processed"] == 10 * plan["examples_processed"]
    (other,) = plan["alternatives"]
    assert other["noise_multiplier"] == plan["noise_multiplier"] or not shape.is_white
    if given.startswith("--noise"):
        assert plan["noise_multiplier"] == 1.0
        return
    assert plan["epsilon"] == pytest.approx(3.0)
    alone = json.loads(printed([*words, "--json"], capsys))
    assert "search" not in alone
    assert search["noise_over_single_run"] == pytest.approx(plan["average_noise_std"] / alone["average_noise_std"])
    assert 1.1 < search["noise_over_single_run"] < 10**0.5
    # Of a search only its ε and δ are known, and no more of an attack than follows from them.
    assert plan["attack"]["tpr_at_1e-3_fpr"] == pytest.approx(np.exp(3) * 1e-3 + 1e-4)


@pytest.mark.usefixtures("one_cell")
def test_the_table_of_a_search_says_what_it_costs(capsys):
    text = printed(
        ["plan", "--num-examples=2000", "--batch-size=100", "--epochs=1", "--noise-multiplier=2", "--trials=4"], capsys
    )
    found = rows(text)
    assert found["trials expected"].startswith("4 (logarithmic")
    assert float(found["ε of each trial"].split()[0]) < float(found["ε of the search"].split()[0])
    assert found["records processed"].startswith("8,000 ")
    assert "Trials of hyperparameter searches" in text


@pytest.mark.parametrize("given", ["1", "0.5", "0", "-1", "nan", "inf", "1e9"])
def test_a_search_of_one_trial_or_none_is_refused(given, capsys):
    assert main([*WORDS, f"--trials={given}"]) == 2
    error = capsys.readouterr().err
    assert "expected trials; got " in error
    assert "For a single run, call train(), or leave --trials out of the plan." in error


def test_the_picture_has_the_table_and_marks_the_plan(tmp_path, capsys, monkeypatch):
    figures, write = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (figures.append(self), write(self, *args, **options))
    )
    monkeypatch.setattr(planning, "EPOCH_FACTORS", (1, 2))
    monkeypatch.setattr(planning, "BATCH_SIZE_FACTORS", (1, 2))
    path = tmp_path / "new" / "plan.png"
    plan = json.loads(printed([*WORDS, *FILTER, "--max-grad-norm=2", "--json", f"--plot={path}"], capsys))
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    for epochs in (1.5, 3):
        runs = [each for each in plan["alternatives"] if each["epochs"] == epochs]
        sizes, noises = lines[f"{epochs:g} epochs"]
        assert sizes == [100, 200] == [each["expected_batch_size"] for each in runs]
        # Of the gradient beside a loss that takes a hundredth of the budget.
        sigmas = [each["noise_multiplier"] / 0.99**0.5 for each in runs]
        expected = [
            sigma / (each["expected_batch_size"] * each["steps"] ** 0.5) for each, sigma in zip(runs, sigmas, strict=True)
        ]
        np.testing.assert_allclose(noises, expected, rtol=1e-12)  # in units of C
    assert lines["your plan"] == ([100], lines["1.5 epochs"][1][:1])
    title = axes.get_title()
    assert "B = 100 and 1.5 epochs" in title
    assert "ε = 3," in title
    assert f"noise {lines['your plan'][1][0]:.2g} C" in title


@pytest.mark.parametrize("file", ["plan.txt", "/proc/x/plan.png"])
def test_a_picture_that_cannot_be_drawn_is_one_line(file, capsys, one_cell):
    assert main([*WORDS, *FILTER, f"--plot={file}"]) == 2
    error = capsys.readouterr().err
    assert file in error
    assert error.count("\n") == 1


def test_noise_whose_epsilon_is_next_to_nothing_is_planned_without_alternatives(capsys):
    words = ["plan", "--num-examples=1000", "--batch-size=100", "--max-steps=3", "--json"]
    found = json.loads(printed([*words, "--noise-multiplier=1e6"], capsys))
    assert found["epsilon"] == 0.0
    assert [each["noise_multiplier"] for each in found["alternatives"]] == [1e6]
