"""Left of the privacy boundary: everything that touches an example.

- batching: the examples of a step
- losses: one loss per example
- dense_losses: one loss per example of segmentation and of speech
- token_losses: one loss per example of tokens, whose logits are many
- pair_losses: one loss per pair of answers
- loss_bounds: the bound of the private training loss, by the task
- clipping: per-sample gradients, clipped and summed
- noise: from clipped sums to a private gradient
- accounting: the ε that this costs
- ledger: the record of what was spent, for others to check
- known_numbers: random numbers that may be known, in a model, loss or collator
- randomness: secret random words for draws and noise, and the global generators
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
    """Import a public name when it is asked for: who checks a ledger, or plans a run, needs no torch."""
    # Those without torch first.
    for folder in ("accounting", "ledger", "noise", "batching", "clipping") if name in __all__ else ():
        if hasattr(module := import_module(f"{__name__}.{folder}"), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
