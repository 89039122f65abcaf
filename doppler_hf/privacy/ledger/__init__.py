"""What a run has spent, in a file that someone else can check.

- statement: what a run says of its mechanism
- ledger: the ledger: steps counted before they are computed
- record: what its entries amount to
- file: its entries on disk
- chain: each entry's hash over the one before
"""

from doppler_hf.privacy.ledger.ledger import LEDGER_NAME, PrivacyLedger, latest, set_aside
from doppler_hf.privacy.ledger.statement import PrivacyStatement

__all__ = ["LEDGER_NAME", "PrivacyLedger", "PrivacyStatement", "latest", "set_aside"]
