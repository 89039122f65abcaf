"""What an import brings along: who designs a filter, plans a run or checks a ledger waits for no framework of training."""

import itertools
import subprocess
import sys

import pytest

from doppler_hf.extras import EXTRAS
from doppler_hf.privacy.ledger.weights import hashes
from tests.support.ledgers import all_events

OPTIONAL = set(itertools.chain(*EXTRAS.values()))
TRAINING = OPTIONAL | {"torch", "transformers", "accelerate", "opacus"}
NUMERIC = {"numpy", "scipy", "jaxtyping", "dp_accounting"}

IMPORTS = {
    "doppler_hf": TRAINING | NUMERIC,
    "doppler_hf.filters": TRAINING | {"dp_accounting"},
    "doppler_hf.privacy": TRAINING | NUMERIC,
    "doppler_hf.privacy.accounting": TRAINING,
    "doppler_hf.privacy.ledger": TRAINING,
    "doppler_hf.reports.planned_runs": TRAINING,
    "doppler_hf.reports.plots": TRAINING,
    "doppler_hf.optim": TRAINING - {"torch"} | {"dp_accounting"},
}
COMMANDS = {
    "--help": TRAINING | NUMERIC,
    "plan --help": TRAINING,
    "filter --help": TRAINING,
    "filter show momentum": TRAINING,
    "verify --help": TRAINING,
}


def modules_after(code):
    """Return what is imported once a fresh interpreter has run `code`, which ends well."""
    code = f"import sys\ntry:\n    {code}\nfinally:\n    print('', *sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split())


def modules_after_command(words):
    return modules_after(
        f"from runpy import run_module; sys.argv = {['', *words]}; run_module('doppler_hf', run_name='__main__')"
    )


@pytest.mark.parametrize("module", IMPORTS)
def test_an_import_brings_what_it_needs(module):
    modules = modules_after(f"import {module}")
    assert module in modules
    assert not modules & IMPORTS[module]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_imports_what_it_needs(words):
    modules = modules_after_command(words.split())
    assert "doppler_hf.cli" in modules
    assert not modules & COMMANDS[words]


def test_a_ledger_is_checked_without_transformers(tmp_path):
    ledger = all_events()
    (tmp_path / "model.safetensors").write_text("weights")
    ledger.speak_for(hashes(tmp_path), parameters=64 * "b")
    ledger.save(tmp_path)
    modules = modules_after_command(["verify", str(tmp_path)])
    # Opacus computes two of the bounds, and brings torch.
    assert "opacus" in modules
    assert not modules & (OPTIONAL | {"transformers", "accelerate"})
