"""Write the notebooks of docs/gallery from the scripts beside them, in which cells begin with "# %%".

    python -m scripts.gallery

A notebook has no output: each reader runs it. Its cells are numbered, so that the same script gives the same file.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

GALLERY: Final = Path(__file__).parents[1] / "docs" / "gallery"
_MARK: Final = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells_of(script: str) -> list[tuple[str, str]]:
    """Return the cells of a script, each as "markdown" or "code" and its text."""
    _, *parts = _MARK.split(script)
    found = []
    for mark, text in zip(parts[::2], parts[1::2], strict=True):
        if mark:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        found.append(("markdown" if mark else "code", text.strip("\n")))
    return found


def notebook_of(script: str) -> str:
    """Return a script as a Jupyter notebook (format 4.5)."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells_of(script)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every notebook."""
    for script in sorted(GALLERY.glob("*.py")):
        script.with_suffix(".ipynb").write_text(notebook_of(script.read_text("utf-8")), "utf-8")
        print(f"docs/gallery/{script.stem}.ipynb")


if __name__ == "__main__":
    main()
