"""A study tunes on other data than it reports, runs nothing twice, and its table says what its log holds."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from scipy import stats
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import AutoModel

from doppler_hf.cli import main
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.privacy import default_delta
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from doppler_hf.privacy.batching.columns import units_of
from doppler_hf.reproduce import frozen_layers, runs, tuning
from doppler_hf.reproduce.data import Sources, apart, kept
from doppler_hf.reproduce.networks import Classifier, TopLayers, mnist_cnn, perceptron, with_trained
from doppler_hf.reproduce.runs import Run, StudyTrainer, train
from doppler_hf.reproduce.studies import STUDIES, fits
from doppler_hf.reproduce.tables import Line, table
from doppler_hf.reproduce.tasks import FULL, SMALL, TASKS
from doppler_hf.reproduce.tuning import best_on_grid
from doppler_hf.workloads.scattering import Scattering
from tests.support.folders import write_bert, write_glue, write_gpt2, write_mnist
from tests.support.tiers import further, thorough

# Of half a minute each: their layers are many.
SLOW = {"cifar10-vit", "cifar10-resnet"}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Random images, random sentences, and an encoder of three layers."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_mnist(tmp_path / "mnist", train=60, test=30)
    (tmp_path / "glue").mkdir()
    write_glue(tmp_path / "glue" / "sst2", "sst2", train=60)
    write_glue(tmp_path / "glue" / "qnli", "qnli", train=60)
    for name in ("cifar10", "cifar100"):
        write_mnist(tmp_path / name, train=60, test=30, shape=(32, 32, 3))
    return Sources(str(tmp_path), str(write_bert(tmp_path / "bert", num_hidden_layers=3)), tmp_path / "out")


@pytest.fixture
def small(monkeypatch):
    """Tasks of three steps, of which twenty examples are held out."""
    for name, task in SMALL.items():
        settings = task.settings | {"per_device_train_batch_size": 10, "max_steps": 3}
        monkeypatch.setitem(SMALL, name, dataclasses.replace(task, settings=settings))
    order = apart(60, 20)
    for module in ("data", "frozen_layers"):
        monkeypatch.setattr(f"doppler_hf.reproduce.{module}.apart", lambda count, held_out: order)


def words(sources, *more):
    return [
        *("reproduce", "noise-shaping", "--data-dir", sources.data_dir, "--encoder", sources.encoder),
        *("--out", str(sources.cache_dir), "--seeds", "2", "--tune-seeds", "1", "--epsilons", "4", *more),
    ]


def made_up(run, data):
    """Accuracies that depend on all that a run is."""
    rate = run.learning_rate or 0.002  # by the rule
    off = abs(np.log2(rate / (0.032 if "auto" in run.arguments else 0.004)))
    luck = np.random.default_rng([run.seed, len(run.arguments)]).uniform(0, 0.1)
    return {"tuning": 0.9 - 0.2 * off + luck, "report": 0.8 - 0.1 * off + luck, "first_rate": rate}


def test_the_table_says_what_the_log_holds_and_nothing_is_run_twice(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    arguments = words(sources, "--tasks", "mnist-perceptron", "--methods", "white, none", "auto, auto")
    assert main(arguments) == 0
    folder = sources.cache_dir / "noise-shaping"
    rows = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    printed, progress = capsys.readouterr()
    for method, rate in (("white", 0.004), ("auto", 0.032)):
        own = [row for row in rows if f'"noise_shape": "{method}"' in row["arguments"]]
        reported = {row["seed"]: row for row in own if row["seed"] < 100 and row["learning_rate"]}
        assert {row["learning_rate"] for row in reported.values()} == {rate}
        tuned = {row["learning_rate"]: row["tuning"] for row in own if row["seed"] >= 100}
        assert min(tuned) < rate < max(tuned)
        accuracy = 100 * np.array([reported[seed]["report"] for seed in (0, 1)])
        assert f"| {rate:g} | {accuracy.mean():.2f} ± {accuracy.std(ddof=1) / 2**0.5:.2f} |" in printed
    # The rule's rate is off by a factor of two for the one, and of sixteen for the other.
    assert "| 0.002 | -10.00 [-10.00, -10.00] |" in printed
    assert "| 0.002 | -40.00 [-40.00, -40.00] |" in printed
    assert "## mnist-perceptron, ε = 4" in printed
    assert "1 lines of mnist-perceptron to come, about 0 min" in progress
    monkeypatch.setattr(tuning, "train", lambda run, data: pytest.fail("this was done already"))
    assert main([*arguments, "--resume"]) == 0
    again = capsys.readouterr()
    assert again.out == printed
    assert "to come" not in again.err
    assert main(arguments) == 2
    assert "holds runs already. Add --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "parameters"),
    [*thorough(("mnist-perceptron", 269_322), ("mnist-scattering", 39_700), ("sst2", 1_792 + 34)), ("sst2-words", 131_170)],
)
def test_a_run_has_the_privacy_that_it_says(sources, small, name, parameters):
    task, data = SMALL[name], SMALL[name].load(sources)
    run = Run.of(name, task, data, STUDIES["noise-shaping"].methods["auto, auto"], 4.0, 0.01, 0)
    result = train(run, data=data)
    shape = NoiseShape.parse(result["noise_shape"])
    turns = Releases.in_turns(result["noise_multiplier"], 10 / 40, 3, groups=shape.bands)
    assert 3.99 < get_total_epsilon([turns], delta=default_delta(40), accountant="pld") <= 4.0
    assert result["parameters"] == parameters
    assert result["num_examples"] == 40
    assert LowPassFilter.parse(result["low_pass_filter"])
    for part in ("tuning", "report"):
        assert result[part] * len(getattr(data, part)) == pytest.approx(round(result[part] * len(getattr(data, part))))
    assert train(run, data=data) | {"seconds": 0} == result | {"seconds": 0}


def test_mixed_precision_is_of_the_network_and_in_the_log(sources, small, monkeypatch, capsys):
    precisions = []
    forward = Classifier.forward

    def watched(self, inputs, labels=None):
        precisions.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return forward(self, inputs, labels)

    monkeypatch.setattr(Classifier, "forward", watched)
    monkeypatch.setattr(tuning, "best_on_grid", lambda score, *, centre: centre)
    more = ("--tasks", "mnist-perceptron", "--methods", "white, none", "--resume")
    log = sources.cache_dir / "noise-shaping" / "runs.jsonl"
    assert main(words(sources, *more)) == 0
    full, held = set(precisions), len(log.read_text().splitlines())
    assert main(words(sources, *more, "--bf16")) == 0
    assert full == {False}
    assert set(precisions) == {False, torch.bfloat16}  # the checks before the first step are in float32
    rows = [json.loads(json.loads(line)["arguments"]) for line in log.read_text().splitlines()]
    assert ["bf16" in row for row in rows] == [False] * held + [True] * held


def test_users_have_ten_images_of_two_digits(sources, monkeypatch):
    folder = sources.cache_dir.parent / "of-users"
    folder.mkdir()
    write_mnist(folder / "mnist", train=1000, test=30)
    sources = dataclasses.replace(sources, data_dir=str(folder))
    order = apart(1000, 100)
    monkeypatch.setattr("doppler_hf.reproduce.data.apart", lambda count, held_out: order)
    whole, shared = (SMALL[name].load(sources) for name in ("mnist", "mnist-users"))
    assert whole.digest != shared.digest
    users = units_of(shared.train, column="user")
    assert np.bincount(users).tolist() == [10] * 90
    images = default_collate(shared.train.remove_columns("user").__getitems__([*range(900)]))
    expected = default_collate([*whole.train])
    assert torch.equal(images["inputs"], expected["inputs"])
    assert torch.equal(images["labels"], expected["labels"])
    labels = images["labels"].numpy()
    digits = [len(set(labels[users == user])) for user in range(90)]
    assert np.mean(np.array(digits) <= 2) > 0.8  # but for shards in which one digit ends


def test_images_are_scattered_once(sources, small, monkeypatch):
    of_pixels, of_coefficients = (SMALL[name].load(sources) for name in ("mnist", "mnist-scattering"))
    assert of_pixels.digest != of_coefficients.digest
    for part in ("train", "tuning", "report"):
        rows, labels = default_collate([*getattr(of_pixels, part)]).values()
        found = default_collate([*getattr(of_coefficients, part)])
        torch.testing.assert_close(found["inputs"], Scattering(28)(rows).half().float(), rtol=1e-3, atol=1e-3)
        assert torch.equal(found["labels"], labels)
    monkeypatch.setattr("doppler_hf.reproduce.data.Scattering", lambda side: pytest.fail("this was done already"))
    again = SMALL["mnist-scattering"].load(sources)
    assert again.digest == of_coefficients.digest
    assert torch.equal(again.train[0]["inputs"], of_coefficients.train[0]["inputs"])


def test_a_run_that_was_killed_while_it_wrote_is_run_again(sources, small, monkeypatch):
    done = []

    def train(run, data):
        done.append(run)
        rate = run.learning_rate or 0.002
        return {"tuning": 1 / (1 + abs(np.log2(rate / 0.004))), "report": 0.5 + run.seed / 10, "first_rate": rate}

    monkeypatch.setattr(tuning, "train", train)
    arguments = words(sources, "--tasks", "mnist", "--methods", "white, none")
    assert main(arguments) == 0
    path = sources.cache_dir / "noise-shaping" / "runs.jsonl"
    whole = path.read_text()
    last = done[-1]
    path.write_text(whole[:-40])
    done.clear()
    assert main([*arguments, "--resume"]) == 0
    assert done == [last]
    assert path.read_text() == whole


def test_no_example_is_trained_on_and_chosen_by():
    train, tuning_rows = apart(100, 30)
    assert len(tuning_rows) == 30
    assert sorted([*train, *tuning_rows]) == list(range(100))


def test_the_tuning_part_alone_chooses(sources, small, monkeypatch, capsys):
    """The reported accuracy is best at another rate."""

    def train(run, data):
        rate = run.learning_rate or 0.002
        return {"tuning": -abs(np.log2(rate / 0.032)), "report": -abs(np.log2(rate)), "first_rate": rate}

    monkeypatch.setattr(tuning, "train", train)
    assert main(words(sources, "--tasks", "mnist", "--methods", "white, none")) == 0
    assert "| white, none | 0.032 |" in capsys.readouterr().out


def test_a_method_without_a_rule_is_tuned_alone(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    assert main(words(sources, "--tasks", "mnist", "--methods", "SGD: white, none", "white, none")) == 0
    sgd, adam = [line for line in capsys.readouterr().out.splitlines() if "white, none" in line]
    assert sgd.endswith("| – | – |")
    assert "| 0.002 |" in adam


@pytest.mark.parametrize("best", [-5, 0, 7])
def test_the_grid_is_widened_until_the_best_is_inside(best):
    seen = []

    def score(value):
        seen.append(value)
        return -abs(np.log2(value / 0.3) - best)

    assert best_on_grid(score, centre=0.3) == 0.3 * 2.0**best
    assert min(seen) < 0.3 * 2.0**best < max(seen)


def test_differences_are_paired_and_have_students_interval():
    first, second = np.array([0.80, 0.90, 0.85]), np.array([0.82, 0.91, 0.88])
    lines = [Line("a", 1.0, first, (0.6, 0.5), None), Line("b", 2.0, second, (0.7, 0.25), (0.125, first))]
    rows = table(lines).splitlines()
    low, high = stats.ttest_1samp(100 * (second - first), 0).confidence_interval(0.95)
    assert rows[2] == "| a | 1 | 85.00 ± 2.89 | – | 60.0, 50.0 | – | – |"
    by_rule = f"0.125 | -2.00 [{-high:+.2f}, {-low:+.2f}]"
    assert rows[3] == f"| b | 2 | 87.00 ± 2.65 | +2.00 [{low:+.2f}, {high:+.2f}] | 70.0, 25.0 | {by_rule} |"


@pytest.mark.parametrize("task_name", ["sst2", "qnli"])
def test_frozen_and_trained_layers_together_are_the_encoder(sources, task_name):
    data = frozen_layers.sentences(task_name, layers=2, held_out=20)(sources)
    encoder = AutoModel.from_pretrained(sources.encoder).eval()
    network = data.network().eval()
    examples = [data.train[row] for row in range(8)]
    batch = data.collator(examples)
    length = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([example["input_ids"] + [0] * (length - len(example["input_ids"])) for example in examples])
    mask = batch["attention_mask"]
    types = torch.tensor(
        [example["token_type_ids"] + [0] * (length - len(example["token_type_ids"])) for example in examples]
    )
    with torch.no_grad():
        hidden = encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        means = torch.stack([row[: int(own.sum())].mean(0) for row, own in zip(hidden, mask)])
        expected = network.classifier(F.layer_norm(means, means.shape[-1:]))
        logits = network(**{name: value for name, value in batch.items() if name != "labels"}).logits
    # The outputs are kept in 16 bits.
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-3)
    assert batch["labels"].tolist() == [example["label"] for example in examples]
    again = frozen_layers.sentences(task_name, layers=2, held_out=20)(sources)
    torch.testing.assert_close(again.collator(examples), batch, rtol=0, atol=0)


def test_runs_on_other_data_or_another_encoder_are_other_runs(sources, small, tmp_path):
    def run_of(sources):
        task = SMALL["sst2"]
        return Run.of("sst2", task, task.load(sources), STUDIES["noise-shaping"].methods["white, none"], 4.0, 0.01, 0)

    first = run_of(sources)
    assert run_of(sources) == first
    write_bert(Path(sources.encoder), num_hidden_layers=3)  # other weights at the same place
    second = run_of(sources)
    shutil.rmtree(tmp_path / "glue" / "sst2")
    write_glue(tmp_path / "glue" / "sst2", "sst2", train=59)
    assert len({first, second, run_of(sources)}) == 3


def test_an_encoder_without_a_list_of_layers_is_refused(sources, tmp_path):
    other = dataclasses.replace(sources, encoder=str(write_gpt2(tmp_path / "gpt2")))
    with pytest.raises(ValueError, match="--encoder must be a BERT-like model with a list of layers, got a GPT2Model"):
        SMALL["sst2"].load(other)


def test_a_folder_has_one_writer(sources, small, capsys):
    folder = sources.cache_dir / "noise-shaping"
    folder.mkdir(parents=True)
    with FileLock(folder / "runs.lock"):
        assert main(words(sources, "--tasks", "mnist")) == 2
    assert "is being written to by another study" in capsys.readouterr().err


def test_parts_do_not_overlap(sources):
    data = frozen_layers.sentences("sst2", layers=2, held_out=20)(sources)
    texts = [set(part["text"]) for part in (data.train, data.tuning, data.report)]
    assert [*map(len, texts)] == [40, 20, 12]
    assert len(set.union(*texts)) == 72


def test_networks_have_the_sizes_that_they_say():
    assert sum(p.numel() for p in perceptron().parameters()) == 269_322
    assert sum(p.numel() for p in mnist_cnn().parameters()) == 26_010


@pytest.mark.parametrize("scale", TASKS)
@pytest.mark.parametrize("name", STUDIES)
def test_the_methods_of_a_study_differ_on_each_of_its_tasks(name, scale):
    """Or one run would stand in two lines, under two names."""
    study = STUDIES[name]
    for label in study.tasks if scale == "small" else study.full_tasks:
        task = TASKS[scale][label]
        runs = [
            Run.of(label, task, SimpleNamespace(digest=label), method, 3.0, 0.1, 0)
            for method in study.methods.values()
            if fits(method, task)
        ]
        assert len(set(runs)) == len(runs) > 1


@pytest.mark.parametrize("name", further([*STUDIES["peers"].methods], quick=["DP-Adam, head alone"]))
def test_every_peer_trains(sources, small, name):
    task = SMALL["sst2"]
    data = task.load(sources)
    assert 0 <= train(Run.of("sst2", task, data, STUDIES["peers"].methods[name], 4.0, 0.01, 0), data=data)["report"] <= 1


@pytest.mark.parametrize("name", further([*STUDIES["paper"].methods], quick=["LP-DPGaLore"]))
def test_every_algorithm_of_the_paper_trains(sources, small, name):
    task = SMALL["mnist-perceptron"]
    data, method = task.load(sources), STUDIES["paper"].methods[name]
    result = train(Run.of("mnist-perceptron", task, data, method, 4.0, 0.01, 0), data=data)
    assert result["low_pass_filter"] == ("first-order-v1" if name.startswith("LP-") else "none")
    assert result["noise_shape"] == "white"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.thorough) for name in FULL]
)
def test_every_task_at_full_scale_trains(sources, small, name):
    settings = FULL[name].settings | {"per_device_train_batch_size": 10, "max_steps": 1}
    task = dataclasses.replace(FULL[name], settings=settings)
    data = task.load(sources)
    assert data.train[0]["inputs"].shape == ((1, 28, 28) if name == "mnist" else (3, 32, 32))
    assert 0 <= train(Run.of(name, task, data, STUDIES["paper"].methods["LP-DPSGD"], 4.0, 0.01, 0), data=data)["report"] <= 1


def test_a_study_at_full_scale_has_tasks_of_its_own(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    more = ("--scale", "full", "--methods", "DPSGD", "LP-DPSGD", "--tasks", "cifar10")
    assert main([*words(sources, *more), "--out", str(sources.cache_dir)]) == 2
    assert "--methods must be of" in capsys.readouterr().err
    arguments = [word if word != "noise-shaping" else "paper" for word in words(sources, *more)]
    assert main(arguments) == 0
    assert "## cifar10, ε = 4" in capsys.readouterr().out
    (log,) = sources.cache_dir.rglob("runs.jsonl")
    assert {json.loads(json.loads(line)["arguments"])["max_steps"] for line in log.read_text().splitlines()} == {5400}
    assert main(["reproduce", "floor", "--scale", "full"]) == 2
    assert "--scale must be small for floor, got full. It has no tasks of that scale." in capsys.readouterr().err


@pytest.mark.thorough
def test_a_floor_is_a_fraction_of_the_noises_variance(sources, small, monkeypatch):
    """Nothing is learnt at a rate of 0, so that runs of a seed differ in nothing but the floor."""
    seen = []

    class Recorder(StudyTrainer):
        def training_step(self, *args):
            loss = super().training_step(*args)
            gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
            optimizer = self.optimizer.optimizer
            seen.append((optimizer.floor, optimizer.noise_std, gradients))
            return loss

    monkeypatch.setattr(runs, "StudyTrainer", Recorder)
    task, methods = SMALL["sst2-words"], STUDIES["floor"].methods
    data = task.load(sources)
    for name, seed in (("0.003", 0), ("3", 0), ("3", 1)):
        train(Run.of("sst2-words", task, data, methods[name], 4.0, 0.0, seed), data=data)
    assert len(seen) == 9
    for (floor, noise_std, _), fraction in zip(seen, 3 * [0.003] + 6 * [3.0]):
        assert floor == pytest.approx(fraction * noise_std**2, rel=1e-12)
    small_floor, large_floor, other_seed = ([gradients for *_, gradients in seen[at : at + 3]] for at in (0, 3, 6))
    torch.testing.assert_close(small_floor, large_floor, rtol=0, atol=0)
    assert not any(torch.allclose(first[0], second[0]) for first, second in zip(large_floor, other_seed))
    assert not torch.allclose(small_floor[0][0], small_floor[1][0])  # another step, other noise


@pytest.mark.parametrize(
    ("trained", "kinds"),
    [
        ("all", {"weight", "bias"}),
        ("head", {"classifier.weight", "classifier.bias"}),
        ("bitfit", {"bias", "classifier.weight"}),
        ("lora", {"lora_A.default.weight", "lora_B.default.weight", "classifier.modules_to_save.default"}),
    ],
)
def test_what_is_trained(bert, trained, kinds):
    network = with_trained(TopLayers(bert.bert.encoder.layer, hidden_size=bert.config.hidden_size, num_labels=2), trained)
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert names
    assert all(any(kind in name for kind in kinds) for name in names)
    assert all(any(kind in name for name in names) for kind in kinds)


def test_a_classifier_returns_what_the_trainer_evaluates():
    network = Classifier(perceptron())
    images, labels = torch.randn(4, 1, 28, 28), torch.tensor([1, 2, 3, 4])
    output = network(images, labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    assert network(images).loss is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--tasks", "cola"],
            "--tasks must be of digits; mnist; mnist-perceptron; sst2-words; sst2-words-long; sst2; sst2-full; qnli, got "
            "'cola'",
        ),
        (["--methods", "best"], "got 'best'"),
        (["--tasks", "sst2", "--encoder", "nowhere"], "Cannot load 'nowhere' ("),
        (["--seeds", "1"], "--seeds 2 to 100, got 1 and 1. Of one run there is no standard error."),
        (["--seeds", "101"], "got 1 and 101"),
        (["--epsilons", "3", "-1"], "must be positive numbers, got -1"),
        (["--epsilons", "3", "nan"], "must be positive numbers, got nan"),
        (["--data-dir", "elsewhere"], "--data-dir must have mnist for the task mnist, got elsewhere without it"),
    ],
)
def test_mistakes_are_one_line(sources, capsys, more, message):
    assert main([*words(sources), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not sources.cache_dir.exists()


def test_a_study_that_there_is_not_is_named(capsys):
    assert main(["reproduce", "everything"]) == 2
    assert f"NAME must be one of {', '.join(STUDIES)}, got 'everything'." in capsys.readouterr().err


def test_methods_that_a_task_cannot_have_are_refused_if_they_are_named(sources, capsys):
    named = ["reproduce", "peers", "--data-dir", sources.data_dir, "--tasks", "mnist", "--methods", "DP-Adam, head alone"]
    assert main(named) == 2
    assert "got 'DP-Adam, head alone', which trains a part of a pretrained network, for mnist" in capsys.readouterr().err


def test_where_nothing_is_learnt_at_any_rate_the_first_is_kept():
    assert best_on_grid(lambda value: 0.5, centre=1.0) == 1.0


@pytest.mark.parametrize("learns_from", [3.0, 100.0])
def test_rates_at_which_nothing_is_learnt_are_not_taken_for_the_best(learns_from):
    """Of three that are far too small all scores are that of the largest class."""
    assert best_on_grid(lambda rate: 0.5 + (rate >= learns_from) / rate, centre=0.5) == min(
        rate for rate in 0.5 * 2.0 ** np.arange(12) if rate >= learns_from
    )


def test_two_studies_may_keep_the_same_at_once(tmp_path, monkeypatch):
    path, save = tmp_path / "kept.pt", torch.save

    def interrupted(found, unfinished):
        save(found, unfinished)
        monkeypatch.setattr(torch, "save", save)
        assert kept(path, lambda: torch.ones(2)).tolist() == [1, 1]  # by the other one, in the meantime

    monkeypatch.setattr(torch, "save", interrupted)
    assert kept(path, lambda: torch.ones(2)).tolist() == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["kept.pt"]
