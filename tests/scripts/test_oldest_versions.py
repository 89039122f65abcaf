"""The constraints of `make test-oldest` against `packaging`, which pip reads requirements with."""

import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from doppler_hf.extras import EXTRAS
from scripts.oldest_versions import PROJECT, oldest_versions

PROJECT_TABLE = tomllib.loads(PROJECT.read_text("utf-8"))["project"]


def test_each_package_of_a_user_has_its_lowest_version():
    extras = PROJECT_TABLE["optional-dependencies"]
    users = [Requirement(each) for each in sum((extras[name] for name in EXTRAS), PROJECT_TABLE["dependencies"])]
    printed = subprocess.run(
        [sys.executable, "-m", "scripts.oldest_versions"], cwd=PROJECT.parent, capture_output=True, check=True
    )
    constraints = [Requirement(line) for line in printed.stdout.decode().splitlines()]
    assert [constraint.name for constraint in constraints] == [requirement.name for requirement in users]
    for constraint, requirement in zip(constraints, users, strict=True):
        (exact,) = constraint.specifier
        assert exact.operator == "=="
        assert exact.version in requirement.specifier
        assert exact.version in [each.version for each in requirement.specifier if each.operator == ">="]


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy==2.0"])
def test_a_requirement_without_a_lowest_version_is_named(requirement):
    with pytest.raises(ValueError, match=f"The requirement '{requirement}' in pyproject.toml has no lowest version"):
        list(oldest_versions({"dependencies": [requirement], "optional-dependencies": {}}))
