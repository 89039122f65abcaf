"""Print every message of the package, with its code, its place and its kind: python -m scripts.messages.

A message is an error, a warning, a line that is logged or a line that is printed. They are collected from the source, so
that placeholders are shown as they are written there.
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
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[code, text], keywords=[]) if name in errors:
                yield Message(path, node.lineno, "error", _text(code, texts), _text(text, texts))
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"), args=[
                ast.Constant(value=str(code)), text
            ]):  # fmt: skip
                yield Message(path, node.lineno, "error", code, _text(text, texts))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="warnings"), attr="warn"), args=[text, *_]):
                yield Message(path, node.lineno, "warning", "", _text(text, texts))
            case ast.Call(func=ast.Attribute(attr=level, value=of), args=[text, *_]) if level in LEVELS and _is_log(of):
                yield Message(path, node.lineno, "logged line", "", _text(text, texts))
            case ast.Call(func=ast.Name(id="print") | ast.Attribute(attr="print"), args=[_, *_] as lines):
                yield Message(path, node.lineno, "printed line", "", " ".join(_text(line, texts) for line in lines))


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
