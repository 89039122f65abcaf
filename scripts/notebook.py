"""Run the notebook of the documentation, and store what it prints and draws in it.

    python -m scripts.notebook          or          make notebook

It trains on the digits of scikit-learn, without a network, in about a minute. What would differ from run to run for no
reason is left out: the names of kernels, times, and warnings.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "first-run.ipynb"


def main() -> None:
    """Execute all cells in an empty folder, and write the notebook."""
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    os.environ["PYTHONWARNINGS"] = "ignore"
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": folder}})
        client.execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
