"""The core trains without the extras, and what needs one of them says so in one line."""

import ast
import functools
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import doppler_hf
from doppler_hf.cli import main
from doppler_hf.extras import EXTRAS, require
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from scripts import image_classification
from tests.support.refusals import refused

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = str(ROOT / "recipes" / "image" / "digits-eps8.yaml")


def names_of(requirements):
    return {canonicalize_name(Requirement(line).name) for line in requirements}


INSTALLED = functools.cache(packages_distributions)  # which reads what every package has installed


def distributions_of(module):
    return set(map(canonicalize_name, INSTALLED()[module]))


def imported_modules():
    """Every module that is not ours and not Python's, wherever in the package it is imported."""
    for path in Path(doppler_hf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module.split(".")[0]


def test_extras_bring_the_modules_that_they_are_said_to():
    for extra, modules in EXTRAS.items():
        assert set().union(*map(distributions_of, modules)) == names_of(PROJECT["optional-dependencies"][extra])


def test_what_the_package_imports_is_declared():
    modules = set(imported_modules()) - sys.stdlib_module_names - {"doppler_hf"}
    assert modules >= {"torch", "matplotlib"}
    core = names_of(PROJECT["dependencies"])
    core |= {"triton"}  # with torch's builds for GPUs; where it is missing, the CPU makes the noise
    assert not {module for module in modules.difference(*EXTRAS.values()) if not core & distributions_of(module)}


@pytest.mark.thorough
def test_the_core_trains_without_the_extras(tmp_path):
    command = [sys.executable, "-m", "tests.support.core_only", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in ("list", "torch"):
        ledger = PrivacyLedger.load(tmp_path / kind / LEDGER_NAME)
        assert (ledger.private, ledger.steps_run) == (True, 2)
        assert (tmp_path / kind / "model.safetensors").exists()
        assert "## Differential privacy" in (tmp_path / kind / "README.md").read_text()


def test_a_trainer_without_its_extra_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    for name in ("DopplerSFTTrainer", "DopplerSFTConfig", "DopplerDPOTrainer", "DopplerDPOConfig"):
        with refused("missing-extra", match=r'trl.*pip install "doppler_hf\[trl\]"'):
            getattr(doppler_hf, name)


def test_require_names_all_that_is_missing(monkeypatch):
    require("recipes")
    for module in ("PIL", "peft"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused("missing-extra", match=r'peft, PIL.*pip install "doppler_hf\[recipes\]"'):
        require("recipes")


@pytest.mark.parametrize("module", ["datasets", "peft"])
def test_a_recipe_without_its_packages_is_refused_in_one_line(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    line = f'error: This needs packages that are not installed: {module}. Run pip install "doppler_hf[recipes]".'
    words = [RECIPE, f"--output_dir={tmp_path}"]
    assert main(["audit", *words]) == 2
    assert capsys.readouterr().err == f"{line}\n"
    with pytest.raises(SystemExit) as ended:
        image_classification.main(words)
    assert ended.value.code == line
