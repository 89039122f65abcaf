"""The notebook of the documentation runs, and what is stored in it is small and of no machine."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first-run.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_what_is_stored_is_of_one_run_without_errors():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    printed = json.dumps([output for output in outputs if "image/png" not in output.get("data", {})])
    assert "VERIFIED: " in printed
    assert "NOT VERIFIED" not in printed


def test_it_is_small_and_names_no_machine():
    assert NOTEBOOK.stat().st_size < 200_000
    text = re.sub(r'"image/png": "[^"]*"', "", NOTEBOOK.read_text())
    assert not re.search(r"/(home|root|tmp|work|usr|var|Users|private|opt)/|[A-Z]:\\\\|https?://(?!arxiv)", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in CELLS:
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert names["trainer"].state.global_step == 240
    assert 7.9 < names["trainer"].privacy.epsilon() <= 8.0
    assert max(entry.get("eval_accuracy", 0) for entry in names["history"]) > 0.9
    assert "VERIFIED: " in capsys.readouterr().out
