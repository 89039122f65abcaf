"""Print the oldest versions that pyproject.toml admits, as constraints for pip: python -m scripts.oldest_versions.

`make test-oldest` installs them. The list has the dependencies and the extras of users. It leaves out the tools of
development, which no user's program runs.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
TOOLS = {"dev", "docs"}


def oldest_versions(project: dict[str, Any]) -> Iterator[str]:
    """Yield a constraint for each package in a project's dependencies and in the extras of its users."""
    extras = [requirements for name, requirements in project["optional-dependencies"].items() if name not in TOOLS]
    for requirement in sum(extras, project["dependencies"]):
        found = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        if found is None:
            raise ValueError(
                f"The requirement {requirement!r} in pyproject.toml has no lowest version. Add one, as in 'torch>=2.11'."
            )
        yield f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    print(*oldest_versions(tomllib.loads(PROJECT.read_text("utf-8"))["project"]), sep="\n")
