"""What an import brings along: who designs a filter, plans a run or checks a ledger waits for no framework of training."""

import itertools
import subprocess
import sys

import pytest

import doppler_hf
from doppler_hf.extras import EXTRAS
from doppler_hf.privacy.ledger.weights import hashes
from tests.support.ledgers import MODEL, all_events

OPTIONAL = set(itertools.chain(*EXTRAS.values()))
TRAINING = OPTIONAL | {"torch", "transformers", "accelerate", "opacus"}
NUMERIC = {"numpy", "scipy", "jaxtyping", "dp_accounting"}

SCIENCE = "import jaxtyping, scipy.linalg, scipy.optimize, scipy.signal, scipy.stats"
ACCOUNTING = SCIENCE + ", dp_accounting"


RUN = "import sys; from runpy import run_module; sys.argv = {}; run_module('doppler_hf', run_name='__main__')"


def command(words):
    return RUN.format(["", *words.split()])


# Libraries that may be there, and what is imported then in a process of its own, with what it must not bring along.
IMPORTS = {
    "": {
        "import doppler_hf": TRAINING | NUMERIC,
        "import doppler_hf.privacy": TRAINING | NUMERIC,
        "import doppler_hf.optim": TRAINING - {"torch"} | {"dp_accounting"},
        command("--help"): TRAINING | NUMERIC,
    },
    SCIENCE: {"import doppler_hf.filters": TRAINING | {"dp_accounting"}},
    ACCOUNTING: {
        "import doppler_hf.privacy.accounting": TRAINING,
        "import doppler_hf.privacy.ledger": TRAINING,
        "import doppler_hf.cli.planned_runs": TRAINING,
        "import doppler_hf.cli.plots": TRAINING,
        command("plan --help"): TRAINING,
        command("filter --help"): TRAINING,
        command("filter momentum"): TRAINING,
        command("verify --help"): TRAINING,
    },
}


def modules_after(codes):
    """Return, for each code, what is imported once it has ended well, in a fork of an interpreter with its libraries."""
    program = f"""
import contextlib, io, os, sys
for libraries, codes in {codes!r}.items():
    exec(libraries)
    for code in codes:
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
    modules = [set(line.split()) for line in ended.stdout.splitlines()]
    return dict(zip(itertools.chain(*codes.values()), modules, strict=True))


@pytest.mark.thorough
def test_an_import_or_a_command_brings_what_it_needs():
    # The later libraries contain the earlier ones, so that one interpreter does for all.
    found = modules_after({libraries: list(codes) for libraries, codes in IMPORTS.items()})
    for code, unwanted in itertools.chain(*(codes.items() for codes in IMPORTS.values())):
        assert (code.split()[1] if code.startswith("import doppler_hf") else "doppler_hf.cli") in found[code], code
        assert not found[code] & unwanted, code


@pytest.mark.thorough
def test_a_ledger_is_checked_without_transformers(tmp_path):
    ledger = all_events()
    (tmp_path / "model.safetensors").write_text("weights")
    ledger.speak_for(hashes(tmp_path), model=MODEL)
    ledger.save(tmp_path)
    (modules,) = modules_after({"": [command(f"verify {tmp_path}")]}).values()
    assert not modules & TRAINING


WITHOUT_INSTALLATION = """
import importlib.metadata as installed
def version(name, *, own=installed.version):
    if name == "doppler_hf":
        raise installed.PackageNotFoundError(name)
    return own(name)
installed.version = version
from doppler_hf import cli
from doppler_hf.privacy.ledger.file import package_versions
print(package_versions()["doppler_hf"])
"""


def test_a_source_tree_needs_no_installation():
    command = [sys.executable, "-c", WITHOUT_INSTALLATION]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{doppler_hf.__version__}\n"
