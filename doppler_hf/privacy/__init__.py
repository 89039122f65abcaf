"""Everything that touches an example, left of the privacy boundary.

- batching: the examples of a step
- losses: one loss per example
- dense_losses: one loss per example, for segmentation and speech
- token_losses: one loss per example, for tokens, which have many logits
- pair_losses: one loss per pair of answers
- loss_bounds: the bound of the private training loss, for each task
- clipping: per-sample gradients, clipped and summed
- noise: turns clipped sums into a private gradient
- accounting: the ε that this costs
- ledger: the account of the ε spent, which others can check
- known_numbers: finds random numbers of a model, loss or collator that an attacker may know
- randomness: secret random numbers for batches, noise and the global generators
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doppler_hf.privacy.accounting import default_delta, get_epsilon, get_noise_multiplier
    from doppler_hf.privacy.batching import AllocationSampler
    from doppler_hf.privacy.clipping import ClippedGradients
    from doppler_hf.privacy.ledger import LEDGER_NAME, PrivacyLedger, PrivacyStatement
    from doppler_hf.privacy.noise import GaussianMechanism

__all__ = [
    "LEDGER_NAME",
    "AllocationSampler",
    "ClippedGradients",
    "GaussianMechanism",
    "PrivacyLedger",
    "PrivacyStatement",
    "default_delta",
    "get_epsilon",
    "get_noise_multiplier",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that checking a ledger or planning a run does not import torch."""
    # The folders that do not import torch come first.
    for folder in ("accounting", "ledger", "noise", "batching", "clipping") if name in __all__ else ():
        if hasattr(module := import_module(f"{__name__}.{folder}"), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
