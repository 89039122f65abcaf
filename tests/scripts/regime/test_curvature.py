"""The largest eigenvalue is that of the Jacobian of the mean clipped gradient."""

import json
import re

import pytest
import torch


def test_the_power_method_finds_the_largest_eigenvalue():
    from scripts.regime.curvature import largest_eigenvalue

    generator = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    matrix = turn @ torch.diag(torch.tensor([5.0, 2.0, -1.5, *[0.1] * 9], dtype=torch.float64)) @ turn.T
    start = torch.randn(12, generator=generator, dtype=torch.float64)
    value, direction = largest_eigenvalue(lambda at: matrix @ at, torch.ones(12).double(), start=start, step=0.1)
    assert value == pytest.approx(5.0, rel=1e-3)
    assert abs(float(direction @ turn[:, 0])) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_the_field_is_the_mean_of_clipped_gradients(tiny, clip_norm):
    from scripts.regime.curvature import mean_clipped_gradient
    from scripts.regime.tasks import TASKS, network_of

    network = network_of(TASKS["tiny"])
    weights = {name: each.detach() for name, each in network.named_parameters()}
    found = mean_clipped_gradient(network, weights, tiny, clip_norm=clip_norm)
    wanted = torch.zeros_like(found)
    for row in tiny.held_out:
        network.zero_grad()
        batch = tiny.batch([row])
        torch.nn.functional.cross_entropy(network(batch["inputs"]).logits, batch["labels"]).backward()
        gradient = torch.cat([each.grad.flatten() for each in network.parameters()]).double()
        wanted += gradient * min(1.0, clip_norm / float(gradient.norm())) / len(tiny.held_out)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8)


def test_the_run_itself_is_as_without_a_measurement(tiny, tmp_path):
    from scripts.regime.cells import Cell, train_cell
    from scripts.regime.curvature import SHARES, measured

    cell = Cell("tiny", "DPSGD", 0.5, batch_size=10, epochs=5)
    found = measured(cell, tiny, folder=tmp_path / "a")
    assert [*found["largest_eigenvalue"]] == [f"{share:g}" for share in SHARES]
    assert all(value > 0 for value in found["largest_eigenvalue"].values())
    assert found["held_out"] == train_cell(cell, tiny, folder=tmp_path / "b")["held_out"]


def test_the_command_measures_what_is_missing_and_writes_it_on_the_page(tiny, tmp_path, monkeypatch):
    from scripts.regime import command
    from scripts.regime.cells import Cell

    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    cell = Cell("tiny", "DPSGD", 0.5, batch_size=10, epochs=5)
    monkeypatch.setattr(command, "cells_to_measure", lambda task, results: [cell])
    words = ["--tasks", "tiny", "--results", str(tmp_path / "found.jsonl"), "--out", str(tmp_path / "out"), "--curvature"]
    for _ in range(2):
        assert command.main(words) == 0
    (row,) = map(json.loads, (tmp_path / "found-curvature.jsonl").read_text().splitlines())
    first = f"{0.5 * row['largest_eigenvalue']['0.3']:.2f}"
    page = (tmp_path / "found.md").read_text()
    assert re.search(rf"\| tiny \| none \| 0\.5 \| [0-9.]+ \| {re.escape(first)} \|", page)
