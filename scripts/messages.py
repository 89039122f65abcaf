"""Print every message of the package, with its code, its place and its kind: python -m scripts.messages.

A message is an error, a warning, a line that is logged, a line that is printed, or a note that is printed when a run starts.
They are collected from the source, so that placeholders are shown as they are written there. If a placeholder is a name to
which the same function gives a text, the list shows these texts below the message.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
# Classes of errors that have a code. `NoEffectError` writes its message itself.
ERRORS: Final = ("Refusal", "TypeRefusal", "Failure", "SharedError", "RowError", "MissingExtraError")
LEVELS: Final = ("debug", "info", "warning", "error")


class Message(NamedTuple):
    """One message, as it is written in the source."""

    path: str
    line: int
    kind: str
    code: str
    text: str
    places: tuple[tuple[str, str], ...] = ()  # placeholder → a text that it may stand for


def messages() -> list[Message]:
    """Return all messages of the package, by file and line."""
    paths = sorted((ROOT / "doppler_hf").rglob("*.py"))
    return sorted(message for path in paths for message in messages_in(path.read_text("utf-8"), str(path.relative_to(ROOT))))


def messages_in(source: str, path: str) -> Iterator[Message]:
    """Yield the messages of one file."""
    tree = ast.parse(source)
    texts = {
        target.id: node.value
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    }
    errors = {*ERRORS, *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _is_refusal(node))}
    assigned = _assigned_texts(tree)

    def message(node: ast.expr, kind: str, code: str, *parts: ast.expr) -> Message:
        names = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
        places = [(name, _text(text, texts)) for name, text in assigned.get(node, ()) if name in names - {*texts}]
        return Message(path, node.lineno, kind, code, " ".join(_text(part, texts) for part in parts), tuple(places))

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[code, text], keywords=[]) if name in errors:
                yield message(node, "error", _text(code, texts), text)
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"), args=[
                ast.Constant(value=str(code)), text
            ]):  # fmt: skip
                yield message(node, "error", code, text)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="warnings"), attr="warn"), args=[text, *_]):
                yield message(node, "warning", "", text)
            case ast.Call(func=ast.Attribute(attr=level, value=of), args=[text, *_]) if level in LEVELS and _is_log(of):
                yield message(node, "logged line", "", text)
            case ast.Call(func=ast.Name(id="print") | ast.Attribute(attr="print"), args=[_, *_] as lines):
                yield message(node, "printed line", "", *lines)
            case ast.Call(func=ast.Attribute(attr="append", value=of), args=[text]) if _is_notes(of) and _is_text(text):
                yield message(node, "note", "", text)
            case ast.AugAssign(target=of, value=ast.List(elts=listed) | ast.Call(args=[ast.List(elts=listed)])) if _is_notes(
                of
            ):
                yield from (message(each, "note", "", each) for each in listed if _is_text(each))


def _assigned_texts(tree: ast.Module) -> dict[ast.AST, list[tuple[str, ast.expr]]]:
    """Return, for each node within a function, the names to which the function gives a text, with the texts."""
    found: dict[ast.AST, list[tuple[str, ast.expr]]] = {}
    # Inner functions come later, and keep what the outer ones have assigned.
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        own: list[tuple[str, ast.expr]] = []
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    own += [(name, text) for text in _alternatives(value)]
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    pairs = zip(names, values, strict=True)
                    own += [(ast.unparse(each), text) for each, value in pairs for text in _alternatives(value)]
        for node in ast.walk(function):
            found[node] = [*found.get(node, ()), *(each for each in own if each not in found.get(node, ()))]
    return found


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return the texts that a value may be, without empty ones; nothing if it is no text."""
    if isinstance(node, ast.IfExp):
        return [*_alternatives(node.body), *_alternatives(node.orelse)]
    return [node] if _is_text(node) else []


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _is_text(left) or _is_text(right)
    return isinstance(node, ast.JoinedStr)


def _is_notes(node: ast.expr) -> bool:
    return ast.unparse(node) in ("run.notes", "notes", "watched")


def _is_refusal(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ERRORS for base in node.bases)


def _is_log(node: ast.expr) -> bool:
    return ast.unparse(node) in ("logger", "logging.getLogger(__name__)")


def _text(node: ast.expr, texts: Mapping[str, ast.expr]) -> str:
    """Return a text with its placeholders in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, texts) for value in values)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _text(left, texts) + _text(right, texts)
        case ast.Name(id=name) if isinstance(texts.get(name), ast.Constant | ast.JoinedStr):
            return _text(texts[name], {})
        case ast.Starred(value=value):
            return f"{{{ast.unparse(value)}}}"
    return f"{{{ast.unparse(node)}}}"


if __name__ == "__main__":
    for message in messages():
        print(f"{message.path}:{message.line}: {' '.join(filter(None, (message.kind, message.code)))}: {message.text!r}")
        for name, text in message.places:
            print(f"    {{{name}}} may be {text!r}")
