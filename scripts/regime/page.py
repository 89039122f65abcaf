"""The page of the results."""

from pathlib import Path

from scripts.regime.results import Results


def write_page(results: Results, path: Path) -> None:
    """Write the page."""
