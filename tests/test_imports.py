"""What an import brings along: who designs a filter, plans a run or checks a ledger waits for no framework of training."""

import itertools
import subprocess
import sys

import pytest

from doppler_hf.extras import EXTRAS
from doppler_hf.privacy.ledger.weights import hashes
from tests.support.ledgers import MODEL, all_events

OPTIONAL = set(itertools.chain(*EXTRAS.values()))
TRAINING = OPTIONAL | {"torch", "transformers", "accelerate", "opacus"}
NUMERIC = {"numpy", "scipy", "jaxtyping", "dp_accounting"}

SCIENCE = "import jaxtyping, scipy.linalg, scipy.optimize, scipy.signal, scipy.stats"
ACCOUNTING = SCIENCE + ", dp_accounting"

# Each in a process of its own; the libraries are those that it may have, and that are there when it begins.
IMPORTS = {
    "doppler_hf": ("", TRAINING | NUMERIC),
    "doppler_hf.privacy": ("", TRAINING | NUMERIC),
    "doppler_hf.filters": (SCIENCE, TRAINING | {"dp_accounting"}),
    "doppler_hf.privacy.accounting": (ACCOUNTING, TRAINING),
    "doppler_hf.privacy.ledger": (ACCOUNTING, TRAINING),
    "doppler_hf.reports.planned_runs": (ACCOUNTING, TRAINING),
    "doppler_hf.reports.plots": (ACCOUNTING, TRAINING),
    "doppler_hf.optim": ("", TRAINING - {"torch"} | {"dp_accounting"}),
}
COMMANDS = {
    "--help": ("", TRAINING | NUMERIC),
    "plan --help": (ACCOUNTING, TRAINING),
    "filter --help": (ACCOUNTING, TRAINING),
    "filter show momentum": (ACCOUNTING, TRAINING),
    "verify --help": (ACCOUNTING, TRAINING),
}


def modules_after(*codes, libraries=""):
    """Return, for each code, what is imported once it has ended well, in a fork of an interpreter with these libraries."""
    program = f"""
import contextlib, io, os, sys
{libraries}
for code in {codes!r}:
    if os.fork():
        if os.wait()[1]:
            sys.exit(1)
        continue
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, {{}})
    except SystemExit as ended:
        if ended.code:
            raise
    print(*sys.modules, flush=True)
    os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [set(line.split()) for line in ended.stdout.splitlines()]


def modules_after_commands(*commands, libraries=""):
    run = "import sys; from runpy import run_module; sys.argv = {}; run_module('doppler_hf', run_name='__main__')"
    return modules_after(*(run.format(["", *words.split()]) for words in commands), libraries=libraries)


@pytest.mark.parametrize("libraries", ["", SCIENCE, ACCOUNTING])
def test_an_import_brings_what_it_needs(libraries):
    names = [name for name, (there, _) in IMPORTS.items() if there == libraries]
    for name, modules in zip(names, modules_after(*(f"import {name}" for name in names), libraries=libraries), strict=True):
        assert name in modules
        assert not modules & IMPORTS[name][1], name


@pytest.mark.parametrize("libraries", ["", ACCOUNTING])
def test_a_command_imports_what_it_needs(libraries):
    commands = [words for words, (there, _) in COMMANDS.items() if there == libraries]
    for words, modules in zip(commands, modules_after_commands(*commands, libraries=libraries), strict=True):
        assert "doppler_hf.cli" in modules
        assert not modules & COMMANDS[words][1], words


def test_a_ledger_is_checked_without_transformers(tmp_path):
    ledger = all_events()
    (tmp_path / "model.safetensors").write_text("weights")
    ledger.speak_for(hashes(tmp_path), model=MODEL)
    ledger.save(tmp_path)
    (modules,) = modules_after_commands(f"verify {tmp_path}")
    # Opacus computes two of the bounds, and brings torch.
    assert "opacus" in modules
    assert not modules & (OPTIONAL | {"transformers", "accelerate"})
