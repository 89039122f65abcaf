"""The table of what trains is made by training, and the page of results is the one that is made."""

import re
from pathlib import Path

import pytest

from scripts.experiments import compatibility

PAGE = Path(__file__).parents[2] / "recipes" / "results" / "compatibility.md"


def cells_of(page):
    """Return model → way → cell of a page."""
    header, _, *rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    ways = [way.strip("| ") for way in header]
    return {row[0].strip("`"): dict(zip(ways, row[1:], strict=True)) for row in rows}


def notes_of(page):
    return dict(re.findall(r"^(\d+)\. (.*)$", page, flags=re.MULTILINE))


# Of each kind of outcome one: trains, refused, and not supported by Transformers or PEFT.
@pytest.mark.parametrize(
    ("model", "way", "kind"),
    [
        ("OPTForCausalLM", "LoRA", compatibility.TRAINS),
        ("ResNetForImageClassification", "all weights", r"\[\d+\]"),
        ("AlbertForSequenceClassification", "checkpointing", "–"),
        ("ViTForImageClassification", "prompts", "–"),
    ],
)
def test_a_cell_is_what_training_says(model, way, kind, capsys):
    compatibility.main(["--models", model, "--ways", way])
    printed, published = capsys.readouterr().out, PAGE.read_text()
    found, stated = cells_of(printed)[model][way], cells_of(published)[model][way]
    assert re.fullmatch(kind, found)
    if found == compatibility.TRAINS or found == "–":
        assert stated == found
    else:
        assert notes_of(published)[stated.strip("[]")] == notes_of(printed)[found.strip("[]")]


def test_the_page_has_all_flows_of_the_script():
    table = cells_of(PAGE.read_text())
    assert list(table) == list(compatibility.MODELS)
    assert all(list(row) == list(compatibility.WAYS) for row in table.values())
    assert len(table) * len(compatibility.WAYS) >= 90
