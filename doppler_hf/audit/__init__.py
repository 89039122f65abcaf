"""The audit: train the real trainer with canaries in its data, attack what it releases, and bound ε from below.

A guarantee is an upper bound on ε that is proven for the mechanism that was meant. What was built is another matter: each
canary is put into the training set or left out by a secret coin, the attacker sees what the guarantee is about, and whoever
tells the two apart better than ε allows has found a defect. An audit finds defects; it does not prove that there are none.

- trainer: the trainer with canaries in its data
- canaries: which rows are canaries
- dirac: canaries that are a gradient coordinate of their own
- mislabelled: canaries that are examples with a wrong label
- replay: a run's noise again, to attack the last weights
- lower_bounds: from an attack's scores to a lower bound on ε
- result: what an audit says
"""

from doppler_hf.audit.dirac import DiracAuditTrainer
from doppler_hf.audit.mislabelled import GradientAuditTrainer, LossAuditTrainer
from doppler_hf.audit.result import AuditResult
from doppler_hf.audit.trainer import AuditTrainer, audit_repeatedly

__all__ = [
    "AuditResult",
    "AuditTrainer",
    "DiracAuditTrainer",
    "GradientAuditTrainer",
    "LossAuditTrainer",
    "audit_repeatedly",
]
