"""Errors keep their code and their message, in old code and on the way from one process to another."""

import ast
import itertools
import pickle
import re
import traceback
from pathlib import Path

import pytest

from doppler_hf import errors
from doppler_hf.errors import Failure, Refusal, TypeRefusal
from doppler_hf.extras import MissingExtraError
from doppler_hf.run.processes.processes import SharedError
from doppler_hf.training_args.checks import NoEffectError
from doppler_hf.trl_checks import RowError

ERRORS = {
    Refusal("a-code", "A message."): ValueError,
    TypeRefusal("a-code", "A message."): TypeError,
    Failure("a-code", "A message."): RuntimeError,
    SharedError("a-code", "A message."): RuntimeError,
    RowError("a-code", "A message."): ValueError,
    MissingExtraError("a-code", "A message."): ImportError,
    NoEffectError("seed", 1, beside="b", because="2", fix="Leave it out"): ValueError,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_caught_as_before_and_survives_pickling(error):
    assert isinstance(error, ERRORS[error])
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.code, str(again), again.__notes__) == (error.code, str(error), [f"Error code: {error.code}", "a note"])
    assert vars(again) == vars(error)
    assert error.code not in str(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_traceback_shows_the_code_once_below_the_message(error):
    """In another process too, and if the error is raised again."""
    for each in (type(error)(*error.args) if type(error) is not NoEffectError else error, pickle.loads(pickle.dumps(error))):
        try:
            try:
                raise each
            except type(error):
                raise
        except type(error) as caught:
            shown = "".join(traceback.format_exception(caught))
        assert shown.count(f"Error code: {error.code}\n") == 1
        assert shown.index(str(error)) < shown.index("Error code: ")


ROOT = Path(__file__).parents[1]
TREES = [ast.parse(path.read_text()) for path in sorted((ROOT / "doppler_hf").rglob("*.py"))]


def named_pages():
    """Yield page and section of every call of `page` in the package."""
    for node in itertools.chain.from_iterable(map(ast.walk, TREES)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "page":
            yield tuple(argument.value for argument in node.args)


def test_pages_that_messages_name_exist():
    named = {*named_pages()}
    assert len(named) > 7
    for name, *section in named:
        text = (ROOT / "docs" / f"{name}.md").read_text()
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not section or section[0] in anchors, (name, section)


def test_messages_name_pages_in_one_way():
    """By `page`, since a file of the repository is not there where the package is installed."""
    texts = [
        node.value
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    docstrings = {ast.get_docstring(node, clean=False) for tree in TREES for node in ast.walk(tree) if isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef)}  # fmt: skip
    assert [text for text in texts if re.search(r"docs/[\w/-]+\.md", text) and text not in docstrings] == []


def test_a_page_is_its_address_once_there_is_one(monkeypatch):
    assert errors.page("guides/own-loss") == "docs/guides/own-loss.md in the repository"
    monkeypatch.setattr(errors, "DOCUMENTATION", "https://docs.example")
    assert errors.page("start/troubleshooting", "losses") == "https://docs.example/start/troubleshooting.html#losses"
