"""Every snippet of the README runs, and every path in it exists."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.support.tiny import pad, text_data, tiny_bert

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


# Opacus says that its own noise is not from a secure generator, and that its hooks see no gradient of the inputs.
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning", "ignore:Full backward hook is firing:UserWarning")
def test_python_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    names = {
        "torch": torch, "model": tiny_bert(), "train": text_data(1100), "dev": text_data(8), "tokenizer": None,
        "metrics": lambda prediction: {}, "x": x, "y": (x.sum(dim=1) > 0).long(), "network": torch.nn.Linear(4, 2),
    }  # fmt: skip
    snippets = blocks("python")
    assert len(snippets) == 6
    for snippet in snippets:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, names["y"]), batch_size=50)
        fresh = {"pad": pad, "loader": loader, "network": torch.nn.Linear(4, 2)}
        exec(snippet.replace("processing_class=tokenizer", "data_collator=pad"), names | fresh, ran := {})
        names |= ran
        if "cross_entropy" in snippet:  # a linear rule: 500 examples, 10 steps, ε = 3
            network = ran.get("network", fresh["network"])
            assert (network(x).argmax(dim=1) == names["y"]).float().mean() > 0.7
    assert (tmp_path / "out" / "privacy_ledger.json").exists()
    assert names["trainer"].privacy.epsilon() <= 3.0
    trainer = names["Contrast"](model=tiny_bert(), args=names["args"], train_dataset=text_data(1100), data_collator=pad)
    assert trainer.compute_per_sample_loss(trainer.model, pad(text_data(3))).shape == (3,)


def test_commands_name_files_that_exist():
    words = [word for block in blocks("sh") for line in block.splitlines() for word in shlex.split(line, comments=True)]
    assert words.count("make") == 2
    modules = [word.replace(".", "/") + ".py" for word in words if word.startswith("scripts.")]
    paths = [word for word in words if "/" in word] + modules
    assert len(paths) == 8
    for path in paths:
        assert (ROOT / path).exists(), path
