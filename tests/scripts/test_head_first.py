"""The measurement of a head that was fitted first runs from its command line, and its head is the regression's."""

import dataclasses
import json

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from scripts.experiments import head_first
from scripts.studies.data import Data
from scripts.studies.networks import TopLayers
from scripts.studies.tasks import SMALL
from tests.support.folders import write_bert, write_glue


class Vectors(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def together(rows):
    hidden, labels = (torch.stack([row[name] for row in rows]) for name in ("hidden", "labels"))
    return {"hidden": hidden[:, None], "attention_mask": torch.ones(len(rows), 1, dtype=torch.long), "labels": labels}


def test_the_head_is_that_of_the_regression_on_what_it_is_given():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 6, generator=generator)
    labels = (hidden[:, 0] + 0.5 * torch.randn(300, generator=generator) > 0.2).long()
    rows = Vectors({"hidden": vector, "labels": label} for vector, label in zip(hidden, labels))

    def network():
        return TopLayers(torch.nn.ModuleList(), hidden_size=6, num_labels=2)

    data = Data("", rows, None, None, network, together)
    begun = head_first.beginning_with(data, head_first.fitted_head(data)).network()
    normed = torch.nn.functional.layer_norm(hidden, (6,)).numpy()
    expected = LogisticRegression(max_iter=1000).fit(normed, labels.numpy()).predict_log_proba(normed)
    found = begun(**{name: value for name, value in together(rows).items() if name != "labels"}).logits.log_softmax(-1)
    torch.testing.assert_close(found.detach(), torch.from_numpy(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
def test_the_command_line(tmp_path, monkeypatch, capsys):
    settings = SMALL["sst2"].settings | {"per_device_train_batch_size": 10, "max_steps": 3}
    monkeypatch.setitem(SMALL, "sst2", dataclasses.replace(SMALL["sst2"], settings=settings))
    monkeypatch.setattr("scripts.studies.texts.apart", lambda count, held_out: (range(20, 60), range(20)))
    (tmp_path / "glue").mkdir()
    write_glue(tmp_path / "glue" / "sst2", "sst2", train=60)
    encoder, output = write_bert(tmp_path / "bert", num_hidden_layers=3), tmp_path / "h.jsonl"
    more = ["--rates", "0.01", "--seeds", "0", f"--cache_dir={tmp_path / 'out'}", f"--output={output}"]
    head_first.main([f"--data_dir={tmp_path}", f"--encoder={encoder}", *more])
    assert [json.loads(line)["head"] for line in output.read_text().splitlines()] == ["new", "fitted"]
    assert "sst2, fitted head, 0.01, seed 0" in capsys.readouterr().out
