"""Left of the privacy boundary: everything that touches an example.

- batching: the examples of a step
- losses: one loss per example
- clipping: per-sample gradients, clipped and summed
- noise: from clipped sums to a private gradient
- accounting: the ε that this costs
- ledger: the record of what was spent, for others to check
- bits: secret random words, for draws and noise
- generators: the global generators, for dropout and random collators
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from doppler_hf.privacy.accounting.accounting import default_delta, get_epsilon, get_noise_multiplier
    from doppler_hf.privacy.batching.sampling import PoissonSampler
    from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients
    from doppler_hf.privacy.clipping.self_check import check_per_sample_gradients
    from doppler_hf.privacy.ledger.ledger import LEDGER_NAME, PrivacyLedger
    from doppler_hf.privacy.ledger.statement import PrivacyStatement
    from doppler_hf.privacy.noise.mechanism import GaussianMechanism

__all__ = [
    "LEDGER_NAME",
    "ClippedGradients",
    "GaussianMechanism",
    "PoissonSampler",
    "PrivacyLedger",
    "PrivacyStatement",
    "check_per_sample_gradients",
    "default_delta",
    "get_epsilon",
    "get_noise_multiplier",
]

_HOMES: Final = {
    "LEDGER_NAME": "doppler_hf.privacy.ledger.ledger",
    "ClippedGradients": "doppler_hf.privacy.clipping.clipped_gradients",
    "GaussianMechanism": "doppler_hf.privacy.noise.mechanism",
    "PoissonSampler": "doppler_hf.privacy.batching.sampling",
    "PrivacyLedger": "doppler_hf.privacy.ledger.ledger",
    "PrivacyStatement": "doppler_hf.privacy.ledger.statement",
    "check_per_sample_gradients": "doppler_hf.privacy.clipping.self_check",
    "default_delta": "doppler_hf.privacy.accounting.accounting",
    "get_epsilon": "doppler_hf.privacy.accounting.accounting",
    "get_noise_multiplier": "doppler_hf.privacy.accounting.accounting",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: who checks a ledger, or plans a run, needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
