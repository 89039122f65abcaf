"""Left of the privacy boundary: everything that touches an example."""

from doppler_hf.privacy.accounting import default_delta, get_epsilon, get_noise_multiplier
from doppler_hf.privacy.clipping import ClippedGradients
from doppler_hf.privacy.ledger import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.mechanism import GaussianMechanism
from doppler_hf.privacy.sampling import PoissonSampler
from doppler_hf.privacy.self_check import check_per_sample_gradients
from doppler_hf.privacy.statement import PrivacyStatement

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
