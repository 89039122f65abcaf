"""The house keeps its shape: who may import whom, and which names are public."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import doppler_hf
import doppler_hf.filters
import doppler_hf.optim
import doppler_hf.privacy

PACKAGE = Path(doppler_hf.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# What a folder must not import. The privacy boundary runs between `privacy` and `optim`: one float crosses it.
FORBIDDEN = {
    "filters": ("doppler_hf.privacy", "doppler_hf.optim", "torch", "opacus", "transformers", "accelerate"),
    "optim": ("doppler_hf.privacy", "opacus", "transformers", "accelerate"),
    "privacy": ("doppler_hf.optim", "doppler_hf.filters", "transformers", "accelerate"),
}


# The layers that transformers defines have their rules in one file.
ALLOWED = {"privacy/host_layers.py": "transformers.pytorch_utils.Conv1D"}


def imported(path):
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, so that this test sees them"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_import_crosses_the_boundary(path):
    for forbidden in FORBIDDEN.get(path.parts[0], ()):
        names = imported(path) - {ALLOWED.get(path.as_posix())}
        crossing = [name for name in names if name == forbidden or name.startswith(forbidden + ".")]
        assert not crossing, f"{path} imports {crossing}"


def test_inner_floors_do_not_import_the_roof():
    for path in MODULES:
        if path.parts[0] in FORBIDDEN:
            own = {name.split(".")[1] for name in imported(path) if name.startswith("doppler_hf.")}
            assert own <= {"filters", "optim", "privacy"}, path


def test_nothing_imports_the_command_line():
    for path in MODULES:
        if path.parts[0] != "cli" and path.as_posix() != "__main__.py":
            assert not any(f"{name}.".startswith("doppler_hf.cli.") for name in imported(path)), path


def test_public_names():
    assert doppler_hf.__all__ == ["DopplerTrainer", "DopplerTrainingArguments"]
    assert sorted(doppler_hf.filters.__all__) == [
        "FilterFigures", "LowPassFilter", "PAPER_FILTERS", "PowerEstimate", "auto_filter", "autocorrelation",
        "autocorrelation_from_products", "autocorrelation_standard_error", "best_filter", "butterworth", "chebyshev1",
        "chebyshev2", "convergence_noise_factor", "corrected_noise_gain", "corrected_output",
        "estimate_autocorrelation", "estimate_power", "filter_figures", "frequency_response", "from_coefficients",
        "group_delay", "impulse_response", "measure_noise_gain", "momentum", "moving_average", "noise_gain",
        "optimal_fir", "parse_name", "partial_fraction_response", "power_spectral_density", "signal_to_noise_ratio",
        "step_response", "write_coefficients",
    ]  # fmt: skip
    assert doppler_hf.optim.__all__ == ["DopplerOptimizer", "LowPassOptimizer", "OptimalFIR", "WeightFilter"]
    assert sorted(doppler_hf.privacy.__all__) == [
        "ClippedGradients", "GaussianMechanism", "LEDGER_NAME", "PoissonSampler", "PrivacyLedger",
        "PrivacyStatement", "check_per_sample_gradients", "default_delta",
        "get_epsilon", "get_noise_multiplier",
    ]  # fmt: skip


def test_plotting_and_metrics_are_imported_where_they_are_used():
    code = "import sys, doppler_hf.workloads; print({'matplotlib', 'evaluate'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
