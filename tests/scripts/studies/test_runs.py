"""A run trains, by every method and on every task, with the privacy that it says."""

from types import SimpleNamespace

import pytest

from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.privacy import default_delta
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from scripts.studies.runs import Run, train
from scripts.studies.studies import STUDIES, fits
from scripts.studies.tasks import SMALL, TASKS
from tests.support.tiers import further, thorough


@pytest.mark.parametrize(
    ("name", "parameters"),
    [*thorough(("mnist-perceptron", 269_322), ("mnist-scattering", 39_700), ("sst2", 1_792 + 34)), ("sst2-words", 131_170)],
)
def test_a_run_has_the_privacy_that_it_says(sources, small, name, parameters):
    task, data = SMALL[name], SMALL[name].load(sources)
    run = Run.of(name, task, data, STUDIES["noise-shaping"].methods["auto, auto"], 4.0, 0.01, 0)
    result = train(run, data=data)
    shape = NoiseShape.parse(result["noise_shape"])
    releases = Releases(result["noise_multiplier"], 10 / 40, 3, shape.c)
    assert 3.99 < get_total_epsilon([releases], delta=default_delta(40)) <= 4.0
    assert result["parameters"] == parameters
    assert result["num_examples"] == 40
    assert LowPassFilter.parse(result["low_pass_filter"])
    for part in ("tuning", "report"):
        assert result[part] * len(getattr(data, part)) == pytest.approx(round(result[part] * len(getattr(data, part))))
    assert train(run, data=data) | {"seconds": 0} == result | {"seconds": 0}


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


@pytest.mark.parametrize("name", STUDIES)
def test_the_methods_of_a_study_differ_on_each_of_its_tasks(name):
    """Or one run would stand in two lines, under two names."""
    study = STUDIES[name]
    for scale, labels in (("small", study.tasks), ("full", study.full_tasks)):
        for label in labels:
            task, data = TASKS[scale][label], SimpleNamespace(digest=label)
            methods = [method for method in study.methods.values() if fits(method, task)]
            runs = {Run.of(label, task, data, method, 3.0, 0.1, 0) for method in methods}
            assert len(runs) == len(methods) > 1
