"""The table of what trains is made by training, and the page of results is the one that is made."""

import re
from pathlib import Path

import pytest

from scripts.experiments import compatibility

PAGE = Path(__file__).parents[2] / "recipes" / "results" / "compatibility.md"


def cells_of(page):
    """Return model → way → ✓, –, or the number of a note in brackets, of a page."""
    found = {}
    for models, left in re.findall(r"^\| (`.*) \| (.*) \|$", page, flags=re.MULTILINE):
        cells = dict.fromkeys(compatibility.WAYS, compatibility.TRAINS)
        for part in left.split("; ") if left != compatibility.NOTHING else ():
            names, _, mark = part.rpartition(" ")
            cells |= dict.fromkeys(compatibility.WAYS if names == compatibility.ALL else names.split(", "), mark)
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", models), cells)
    return found


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
    assert sorted(table) == sorted(compatibility.MODELS)
    assert all(list(row) == list(compatibility.WAYS) for row in table.values())
    cells = [cell for row in table.values() for cell in row.values()]
    marks = {mark.strip("[]") for mark in cells} - {compatibility.TRAINS, "–"}
    assert marks == notes_of(PAGE.read_text()).keys()
    # The figures of the text are those of the table.
    counts = len(cells), cells.count(compatibility.TRAINS), sum("[" in cell for cell in cells), cells.count("–")
    assert "{1} of {0} combinations train, {2} are refused with a message, and {3} are".format(*counts) in PAGE.read_text()
