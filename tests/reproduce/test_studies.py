"""The methods of a study differ."""

from types import SimpleNamespace

import pytest

from doppler_hf.reproduce.runs import Run
from doppler_hf.reproduce.studies import STUDIES, fits
from doppler_hf.reproduce.tasks import TASKS


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
