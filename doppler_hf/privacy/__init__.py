"""Left of the privacy boundary: everything that touches an example.

- batching: who is in a step
- losses: one loss per example
- clipping: per-sample gradients, clipped and summed
- noise: from clipped sums to a private gradient
- accounting: what that costs
- ledger: what was spent, for someone else to check
- bits: secret random words, for draws and noise
"""

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
