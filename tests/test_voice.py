"""One voice: plain words, sentences of at most 35 words, and errors that say what was found or what to do.

Docstrings of functions are imperative, and their `Raises` says when.

What grammar cannot tell from the source, ruff's D401 and these rules leave to the reader.
"""

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import TrainingArguments

from tests.support.source import ERRORS, parts

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("doppler_hf", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
# Words that send a reader to a dictionary, or back to the start of the sentence.
UNPLAIN = re.compile(r"\b(hosts?|mended|(is|are) had|of which none|the same of|one's own)\b", re.IGNORECASE)
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "CHANGELOG.md", *sorted((ROOT / "recipes").rglob("*.md"))]
# Words that begin a noun phrase or a question, where an imperative is wanted.
NO_VERBS = {"A", "All", "An", "As", "By", "Every", "For", "How", "If", "In", "It", "Its", "No", "Of", "One", "So", "That",
            "The", "This", "To", "What", "When", "Where", "Whether", "Which", "Who", "With"}  # fmt: skip


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the messages of errors that are written where the error is made, but those that pass another one on."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[_, message]) if name in ERRORS:
                pieces = list(parts(message))
                passes_on = isinstance(message, ast.JoinedStr) and ast.unparse(message).endswith("{error}'")
                if None not in pieces and not passes_on:
                    yield "".join(str(piece) for piece in pieces)


def names_of_arguments() -> set[str]:
    """Return the names of all arguments, fields and functions, and of Transformers' training arguments."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
    return names


ARGUMENTS = names_of_arguments()


def mistakes_in(message: str) -> list[str]:
    """Return what is wrong with a message."""
    first = re.match(r"(--)?[\w.]*", message)
    assert first is not None
    sentences = len(re.findall(r"[.](?= |$)", message))
    found = {
        "ends without a full stop": not message.endswith((".", ". X")),
        "begins neither with a capital nor with an argument": not (
            first[1] or first[0][:1].isupper() or first[0].partition(".")[0] in ARGUMENTS
        ),
        "says neither what was found nor, in a sentence of its own, what to do": sentences < 2 and " got " not in message,
    }
    return [words for words, is_found in found.items() if is_found]


def test_errors_are_sentences_that_say_what_was_found_or_what_to_do():
    found = [(path, message) for path in FILES for message in messages(ast.parse(path.read_text()))]
    assert len(found) > 150
    assert {(path, message): mistakes for path, message in found if (mistakes := mistakes_in(message))} == {}


def test_functions_say_what_to_do_and_raises_says_when():
    wrong = []
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(path.read_text())) for path in FILES):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (text := ast.get_docstring(node)):
            continue
        is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
        if isinstance(node, ast.FunctionDef) and not is_property:
            word = text.split()[0].rstrip(".,:")
            if word in NO_VERBS or not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word):
                wrong.append(f"{node.name}: {text.splitlines()[0]}")
        for section in re.findall(r"^Raises:\n((?: +.*\n?)+)", text, flags=re.MULTILINE):
            wrong += [line for line in section.splitlines() if re.match(r" {4}\w+: (?!If )", line)]
    assert wrong == []


def prose(page: Path) -> str:
    """Return a page without code, tables and the targets of links; headings and items of lists end a sentence."""
    text = re.sub(r"```.*?```|`[^`]*`|^\|.*?$|<[^>\n]*>", "code", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|^\[.*$", "", text, flags=re.MULTILINE)
    text = text.replace("\\\n", "\n\n")
    return re.sub(r"^(#.*|code)$|^(?= *([-*]|\d+\.) )", r"\1\n\n", text, flags=re.MULTILINE)


def test_words_are_plain():
    strings = [(path, node.value) for path in FILES for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    texts = strings + [(page, prose(page)) for page in PAGES]
    assert [(path.name, found[0]) for path, text in texts for found in UNPLAIN.finditer(text)] == []


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than 35 words."""
    sentences = re.split(r"(?<=[.!?])\s|\n\s*\n", text)
    return [" ".join(words) for sentence in sentences if len(words := sentence.split()) > 35]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short(page):
    assert long_sentences(prose(page)) == []
