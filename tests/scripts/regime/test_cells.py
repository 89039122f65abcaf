"""A cell trains with the privacy that it says, goes on where it was interrupted, and is written once."""

import json

import numpy as np
import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.privacy import default_delta
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from tests.support.tiers import further

# How long they took.
TIMES = {"seconds": 0, "interrupted": None}


def cell_of(method="DPSGD", **more):
    from scripts.regime.cells import Cell

    return Cell("tiny", method, 0.5, **({"batch_size": 10, "epochs": 5} | more))


def methods():
    from scripts.regime.cells import METHODS

    return METHODS


def test_a_cell_has_the_privacy_that_it_says(tiny, tmp_path):
    from scripts.regime.cells import train_cell

    found = train_cell(cell_of(tests_once=True), tiny, folder=tmp_path / "a")
    releases = Releases(found["noise_multiplier"], 10 / 40, 20, (1.0,), "poisson")
    assert 7.99 < get_total_epsilon([releases], delta=default_delta(40)) <= 8.0
    assert found["delta"] == default_delta(40)
    assert (found["steps"], found["num_examples"], found["noise_shape"], found["low_pass_filter"]) == (
        20,
        40,
        "white",
        "none",
    )
    assert len(found["curve"]) == 10
    assert found["held_out"] == found["curve"][-1]
    for name, number in (("held_out", 20), ("held_out_of_average", 20), ("test", 30), ("test_of_average", 30)):
        assert found[name] * number == pytest.approx(round(found[name] * number))
    assert "test" not in train_cell(cell_of(), tiny, folder=tmp_path / "b")


@pytest.mark.parametrize(
    "name",
    further(
        ["LP-DPSGD, second-order", "DPAdam, β₁ = 0.9", "DPAdamBC, β₁ = 0", "LP-DPGaLore, first-order-v1", "ours, auto"],
        quick=["ours, auto"],
    ),
)
def test_every_method_trains(tiny, tmp_path, name):
    from scripts.regime.cells import train_cell

    sampling = "allocation" if name == "ours, auto" else "poisson"
    found = train_cell(cell_of(name, sampling=sampling), tiny, folder=tmp_path / "run")
    assert 0 <= found["held_out"] <= 1
    wanted = methods()[name].low_pass_filter
    assert wanted in ("auto", found["low_pass_filter"])
    assert (found["optim_args"] is not None) == ("GaLore" in name)
    assert ("spectrum_of_signal" in found) == (name != "ours, auto")


def test_an_interrupted_cell_goes_on_to_the_same_result(tiny, tmp_path, monkeypatch):
    from scripts.regime.cells import Follower, train_cell

    cell = cell_of("LP-DPSGD, first-order-v1", tests_once=True)
    whole = train_cell(cell, tiny, folder=tmp_path / "whole")
    follow = Follower.on_step_end

    def killed(self, args, state, *others, **more):
        follow(self, args, state, *others, **more)
        if state.global_step == 13:
            raise RuntimeError("killed")

    monkeypatch.setattr(Follower, "on_step_end", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train_cell(cell, tiny, folder=tmp_path / "cut")
    monkeypatch.setattr(Follower, "on_step_end", follow)
    steps = []
    begin = Follower.on_train_begin

    def begun(self, args, state, *others, **more):
        steps.append(state.global_step)
        begin(self, args, state, *others, **more)

    monkeypatch.setattr(Follower, "on_train_begin", begun)
    again = train_cell(cell, tiny, folder=tmp_path / "cut")
    assert steps[0] >= 12
    assert again["interrupted"]
    assert again | TIMES == whole | TIMES


def test_a_cell_killed_while_it_saves_goes_on_from_the_point_before(tiny, tmp_path, monkeypatch):
    from scripts.regime import cells

    cell = cell_of()
    whole = cells.train_cell(cell, tiny, folder=tmp_path / "whole")
    save, saves = torch.save, []

    def killed(value, path, *others, **more):
        if not isinstance(value, dict) or "average" not in value:
            return save(value, path, *others, **more)
        saves.append(path)
        if len(saves) == 6:
            path.write_bytes(b"half")
            raise RuntimeError("killed")
        return save(value, path, *others, **more)

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(RuntimeError, match="killed"):
        cells.train_cell(cell, tiny, folder=tmp_path / "cut")
    monkeypatch.setattr(torch, "save", save)
    assert cells.last_checkpoint(tmp_path / "cut").name == "checkpoint-10"
    assert cells.train_cell(cell, tiny, folder=tmp_path / "cut") | TIMES == whole | TIMES


def test_a_hopeless_run_is_stopped_and_says_so(tiny, tmp_path):
    from scripts.regime.cells import HopelessRun, train_cell

    found = train_cell(cell_of(), tiny, folder=tmp_path / "run", hopeless=HopelessRun((2.0,) * 10))
    assert found["stopped_at"] == 0.4
    assert found["held_out"] is None
    assert len(found["curve"]) == 4


@pytest.mark.thorough
def test_the_noise_of_draws_is_what_draws_differ_by(tiny, tmp_path, monkeypatch):
    """Without steps all draws have the same expected sum, so that what differs between them is their noise."""
    from scripts.regime.cells import train_cell
    from scripts.regime.spectrum import Signal

    kept = []
    spectrum = Signal.spectrum
    monkeypatch.setattr(Signal, "spectrum", lambda self: kept.append(self.series) or spectrum(self))
    cell = cell_of(epochs=100)
    train_cell(cell.__class__(**{**vars(cell), "learning_rate": 1e-12}), tiny, folder=tmp_path / "run")
    (series,) = kept
    images = series[:, 1:]
    assert np.square(images - images.mean(axis=0)).sum(axis=1).mean() == pytest.approx(series[:, 0].mean(), rel=0.1)


def test_a_run_without_noise_records_the_signal(tiny, tmp_path):
    from scripts.regime.cells import train_cell

    found = train_cell(cell_of(epsilon=None, epochs=3), tiny, folder=tmp_path / "run")
    assert found["noise_multiplier"] == 0.0
    assert found["spectrum_of_signal"]["autocorrelation"][0] == pytest.approx(1.0)
    # What is released is the signal itself, of which both keep an image in another number of dimensions.
    np.testing.assert_allclose(found["spectrum_of_released"]["unit"], found["spectrum_of_signal"]["unit"], rtol=0.2)


def test_the_signal_that_is_recorded_is_what_is_released_less_the_noise(tiny, tmp_path):
    """Over the same seed of draws and with hardly any noise both are the same."""
    from scripts.regime.cells import train_cell

    found = train_cell(cell_of(epsilon=5e4), tiny, folder=tmp_path / "run")
    signal, released = (np.array(found[f"spectrum_of_{name}"]["autocorrelation"]) for name in ("signal", "released"))
    assert len(found["spectrum_of_signal"]["of_draws"]) == 3
    assert signal[0] > 10
    np.testing.assert_allclose(released, signal, rtol=0.2, atol=0.1 * signal[0])


def test_the_average_is_that_of_de_et_al(tiny):
    from scripts.regime.cells import Follower

    model = torch.nn.Linear(1, 1, bias=False)
    follower = Follower(lambda model: 0.0, steps=100, hopeless=None)
    expected = 3.0
    with torch.no_grad():
        model.weight.fill_(expected)
        follower.on_train_begin(None, State(0), None, model=model)
        for step in range(1, 6):
            model.weight.fill_(float(step))
            decay = (1 + step) / (10 + step)
            expected = decay * expected + (1 - decay) * step
            follower.on_step_end(None, State(step), None, model=model)
    follower.exchange(model)
    assert model.weight.item() == pytest.approx(expected)
    follower.exchange(model)
    assert model.weight.item() == 5.0


class State:
    def __init__(self, step):
        self.global_step = step


# --- the file, and the command -----------------------------------------------------------------------------------------


def run(tmp_path, *more):
    from scripts.reproduce import main

    words = ["paper-regime", "--results", str(tmp_path / "found.jsonl"), "--out", str(tmp_path / "out")]
    return main([*words, "--tasks", "tiny", *more])


@pytest.fixture
def short(monkeypatch):
    """Trainings of twenty steps, of which the cells are kept."""
    from scripts.regime import command

    trained = []
    train = command.train_cell

    def of_twenty_steps(cell, data, **options):
        import dataclasses

        trained.append(cell)
        small = dataclasses.replace(cell, batch_size=10, epochs=5)
        return train(small, data, **options) | dataclasses.asdict(cell)

    monkeypatch.setattr(command, "train_cell", of_twenty_steps)
    return trained


def test_the_command_fills_the_file_goes_on_and_writes_the_page(tiny, short, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    assert run(tmp_path, "--jobs", "2") == 0
    lines = (tmp_path / "found.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == [0.8, 1.6]
    with (tmp_path / "found.jsonl").open("a") as file:
        file.write('{"task": "tiny", "meth')  # as a process leaves it that is killed while it writes
    assert run(tmp_path, "--jobs", "3") == 0
    again = (tmp_path / "found.jsonl").read_text().splitlines()
    assert again[:2] == lines
    assert len(again) == 5 == len(short) == len(set(short))
    assert not [*(tmp_path / "out" / "unfinished").iterdir()]
    page, runs = ((tmp_path / name).read_text() for name in ("found.md", "found-runs.md"))
    assert "| tiny | 5 |" in runs
    assert "| DPSGD |" in runs
    assert runs.count("### tiny: what the gradient says") == 1
    assert "| tiny | 1, 0.8 | " in page
    (tmp_path / "found.md").unlink()
    assert run(tmp_path, "--page") == 0
    assert (tmp_path / "found.md").read_text() == page


def test_the_command_begins_no_cell_when_its_time_is_over(tiny, short, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    assert run(tmp_path, "--minutes", "1e-9") == 0
    assert not short


@pytest.mark.parametrize(
    ("words", "named"),
    [(("--minutes", "0"), "--minutes"), (("--jobs", "0"), "--jobs"), (("--data-dir", "nowhere"), "nowhere")],
)
def test_what_the_command_cannot_do_is_refused(tiny, tmp_path, capsys, words, named):
    assert run(tmp_path, *words) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "found.jsonl").exists()


def test_two_processes_do_not_write_at_once(tiny, tmp_path, capsys, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / "regime.lock"):
        assert run(tmp_path, "--jobs", "1") == 2
    assert "another process" in capsys.readouterr().err


# --- what the theory says ----------------------------------------------------------------------------------------------


def test_the_spectrum_is_that_of_the_signal_beneath_the_noise():
    from scripts.regime.spectrum import spectrum_of

    generator, noise_std, rho = np.random.default_rng(0), 2.0, 0.8
    signal = np.zeros((4000, 64))
    for step in range(1, 4000):
        signal[step] = rho * signal[step - 1] + (1 - rho**2) ** 0.5 * generator.standard_normal(64)
    noise_power, noise = 64 * noise_std**2, noise_std * generator.standard_normal(signal.shape)
    expected = rho ** np.arange(64) / noise_std**2
    for series, is_in_it in ((signal + noise, True), (signal, False)):
        found = spectrum_of(series, noise_power=noise_power, is_in_it=is_in_it)
        assert found["unit"] == pytest.approx(noise_power)
        np.testing.assert_allclose(found["autocorrelation"], expected, atol=0.02)
        assert len(found["parts"]) == 3
        np.testing.assert_allclose(found["parts"], [expected[[0, 1, 10]]] * 3, atol=0.03)


@pytest.mark.parametrize("name", ["none", "momentum", "first-order-v1", "first-order-v2", "second-order"])
def test_the_power_after_a_filter_is_that_of_the_filtered_series(name):
    from scipy.signal import lfilter

    from scripts.regime.spectrum import power_after

    rho = 0.7
    series = lfilter([(1 - rho**2) ** 0.5], [1, -rho], np.random.default_rng(1).standard_normal((200_000, 4)), axis=0)
    filtered = lfilter(PAPER_FILTERS[name].b, PAPER_FILTERS[name].a, series, axis=0)
    assert power_after(PAPER_FILTERS[name], rho ** np.arange(64.0)) == pytest.approx(np.mean(filtered**2), rel=0.03)


def test_the_predicted_gain():
    from scripts.regime.spectrum import predicted_gain

    assert predicted_gain(PAPER_FILTERS["none"], np.array([3.0, 1.0, 0.0])) == pytest.approx(1.0)
    constant = np.ones(64)  # a signal that never changes: all noise that a filter takes away is a gain
    assert predicted_gain(PAPER_FILTERS["momentum"], constant) == pytest.approx(19.0, rel=1e-3)  # (1 + β)/(1 − β)
    alternating = np.array([1.0, -1.0] * 32)
    assert predicted_gain(PAPER_FILTERS["first-order-v1"], alternating) < 0.1


def test_the_mean_of_four_is_the_average_pool():
    from scripts.regime.tasks import TASKS, MeanOfFour, five_layers

    images = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(MeanOfFour()(images), torch.nn.AvgPool2d(2)(images))
    for options, number in (({"width": 16}, 103_050), ({}, 1_573_386), ({"width": 16, "side": 16}, 99_210)):
        network = five_layers(**options)
        assert sum(parameter.numel() for parameter in network.parameters()) == number
        side = options.get("side", 32)
        assert network(torch.randn(2, 3, side, side)).shape == (2, 10)
    assert len(TASKS) > 1


@pytest.mark.parametrize("period", [2.0, 3.7, 10.26, 24.0])
def test_the_period_is_where_the_power_is(period):
    from scripts.regime.spectrum import peak_period

    lags = np.arange(64)
    damped = 0.97**lags * np.cos(2 * np.pi * lags / period)
    assert peak_period(0.7 * damped + 0.3 * (lags == 0)) == pytest.approx(period, rel=0.03)


def test_a_signal_that_changes_slowly_has_no_period():
    from scripts.regime.spectrum import peak_period

    assert peak_period(0.98 ** np.arange(64.0)) == np.inf


def test_views_are_the_image_moved_by_an_eighth_and_mirrored():
    from scripts.regime.tasks import Loaded, RowNumbers

    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    data = Loaded({"train": images}, {"train": torch.arange(40)}, RowNumbers(range(40)), [])
    seen = set()
    for flips in (False, True):
        rows = [3, 7, 5] * 40
        batch = data.moved_batch(rows, flips=flips)
        assert batch["labels"].tolist() == rows
        assert batch["inputs"].shape == (120, 3, 16, 16)
        around = torch.nn.functional.pad(data.batch(rows)["inputs"], (2, 2, 2, 2), mode="reflect")
        for view, image in zip(batch["inputs"], around, strict=True):
            possible = {
                (down, right, mirrored): image[:, down : down + 16, right : right + 16].flip(2 if mirrored else ())
                for down in range(5)
                for right in range(5)
                for mirrored in ((False, True) if flips else (False,))
            }
            (found,) = [move for move, wanted in possible.items() if torch.equal(view, wanted)]
            seen.add(found)
    assert len({move[:2] for move in seen}) == 25
    assert {move[2] for move in seen} == {False, True}


def test_several_views_train_at_the_same_privacy(tiny, tmp_path):
    from scripts.regime.cells import train_cell

    found = [train_cell(cell_of(views=views), tiny, folder=tmp_path / str(views)) for views in (1, 2)]
    assert found[0]["noise_multiplier"] == found[1]["noise_multiplier"]
    assert found[1]["views"] == 2


def test_a_row_from_before_a_condition_existed_has_its_default(tmp_path):
    from scripts.regime.results import Results

    row = TIMES | vars(cell_of()) | {"held_out": 0.5}
    del row["views"]
    (tmp_path / "found.jsonl").write_text(json.dumps(row) + "\n")
    assert Results(tmp_path / "found.jsonl").get(cell_of())["held_out"] == 0.5
