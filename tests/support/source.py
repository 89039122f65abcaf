"""The package's source, as tests of its messages read it."""

import ast
from collections.abc import Iterator

# The functions that make an error from a code and a message.
ERRORS = ("Refusal", "TypeRefusal", "Failure", "MissingExtraError", "SharedError", "RowError")


def parts(node: ast.expr) -> Iterator[str | None]:
    """Yield the pieces of a message, X for a placeholder and None for what is no text."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            for value in values:
                yield from parts(value)
        case ast.FormattedValue():
            yield "X"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            yield from parts(left)
            yield from parts(right)
        case ast.IfExp(body=body):
            yield from parts(body)
        case _:
            yield None
