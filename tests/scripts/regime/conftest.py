"""A task of sixty small images for the tests of the paper's regime, imported late: see `pytest_sessionstart`."""

import pytest


@pytest.fixture
def tiny(monkeypatch):
    """The only task: a perceptron of 4 x 4 pixels, which has forty images to train on and twenty that are held out."""
    import torch

    from scripts.regime import command, page, tasks
    from scripts.regime.tasks import Loaded, RowNumbers, Task

    generator = torch.Generator().manual_seed(0)
    labels = {"train": torch.arange(60) % 3, "test": torch.arange(30) % 3}
    inputs = {
        split: (
            40 * of_split[:, None, None, None] + torch.randint(0, 90, (len(of_split), 1, 4, 4), generator=generator)
        ).byte()
        for split, of_split in labels.items()
    }

    def network():
        # A matrix that a projection of rank 16 makes smaller is among its weights.
        hidden = (torch.nn.Linear(16, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Tanh())
        return torch.nn.Sequential(torch.nn.Flatten(), *hidden, torch.nn.Linear(20, 3))

    # One dictionary, which all modules of the study share.
    for name in list(tasks.TASKS):
        monkeypatch.delitem(tasks.TASKS, name)
    monkeypatch.setitem(tasks.TASKS, "tiny", Task("mnist", network, 5))
    data = Loaded(inputs, labels, RowNumbers(range(40)), range(40, 60))
    monkeypatch.setattr(command, "load", lambda task, **options: data)
    assert page.TASKS is command.TASKS is tasks.TASKS
    return data
