"""The measurement of a rate that follows the loss runs from its command line, and finds the lowest point of a parabola."""

import dataclasses
import json

import pytest
import torch
from transformers import TrainerState

from scripts.experiments import feedback
from scripts.studies.tasks import SMALL


@pytest.mark.parametrize("at", [0.6, 1.0, 1.7])
def test_the_lowest_point_of_a_parabola(at):
    losses = [3.0 + 0.2 * (x - at) ** 2 for x in (0.0, 1.0, 2.0)]
    assert feedback.lowest(*losses) == pytest.approx(at)


def test_a_rate_goes_half_of_the_way_and_the_weights_stay(tmp_path):
    """A loss of (w - 1)², from w = 0 by steps of which the best is 1.6 times as long."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    follower = feedback.FreeFeedback({}, every=5)
    follower._loss = lambda model: (model.weight.item() - 1.0) ** 2
    feedback.place(model, [torch.zeros(1, 1)])
    for step in (0, 1):  # of which it looks at the first alone
        follower.on_pre_optimizer_step(None, TrainerState(global_step=step), None, model=model)
        feedback.place(model, [torch.full((1, 1), 1 / 1.6)])
        follower.on_step_end(None, None, None, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    assert model.weight.item() == pytest.approx(1 / 1.6)
    assert scheduler.base_lrs == [pytest.approx(0.1 * 1.6**0.5)]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 1.6**0.5)


@pytest.mark.thorough
def test_the_command_line(tmp_path, monkeypatch, capsys):
    settings = SMALL["digits"].settings | {"max_steps": 6}
    monkeypatch.setitem(SMALL, "digits", dataclasses.replace(SMALL["digits"], settings=settings))
    output = tmp_path / "f.jsonl"
    feedback.main([f"--data_dir={tmp_path}", f"--output={output}", "--tasks", "digits", "--seeds", "0"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["feedback"] for row in rows] == [False, True, True] * 2
    assert "digits, auto noise, constant, by the losses" in capsys.readouterr().out
