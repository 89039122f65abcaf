"""The audit: train the real trainer with canaries in its data, attack what it releases, and bound ε from below.

A guarantee is an upper bound on ε, proven for the mechanism as it is specified. An audit tests the mechanism as it is built.
Each canary is put into the training set or left out by a secret coin, and the attacker sees what the guarantee covers. An
attacker who tells the two cases apart better than ε allows has found a defect. Finding none proves nothing.

- audited_run: what the audits ask of a run, and a run that leaves nothing behind
- trainer: the trainer with canaries in its data, and the attacker
- canaries: which rows are canaries
- text_audit: the audit of a language model, and what the model repeats
- text_canaries: canaries made of text, and their likelihood
- likelihood: the attacker's scores
- lower_bounds: from an attack's scores to a lower bound on ε
- result: the outcome of an audit
- neighbours: how far one more record moves the sum that reaches the mechanism
"""

from typing import Any

from doppler_hf.audit.neighbours import NeighbourResult, neighbour_distances
from doppler_hf.audit.result import AuditResult
from doppler_hf.audit.text_audit import FoundCanary, TextAuditResult, audit_texts
from doppler_hf.audit.trainer import AuditTrainer
from doppler_hf.deprecated import attribute_of

__all__ = [
    "AuditResult",
    "AuditTrainer",
    "FoundCanary",
    "NeighbourResult",
    "TextAuditResult",
    "audit_texts",
    "neighbour_distances",
]


def __getattr__(name: str) -> Any:
    """Return an attribute of an earlier version, with a deprecation warning."""
    return attribute_of(__name__, name)
