"""The ledger: the account of the ε that a run has spent, in a file that others can check.

- statement: the terms of a run's guarantee
- ledger: `PrivacyLedger`, which counts steps before they are computed
- record: runs, steps and claims, from the entries
- file: the entries on disk, with one writer at a time, and their chain of hashes
- terms: the terms as text, for `doppler-hf verify` and the model card
- weights: the weight files next to a ledger, and their hashes
"""

from doppler_hf.privacy.ledger.ledger import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.statement import PrivacyStatement

__all__ = ["LEDGER_NAME", "PrivacyLedger", "PrivacyStatement"]
