"""The ledgers of earlier trainings that a run may continue: a checkpoint's, or one in a folder that speaks for the model.

And what trainings with ledgers elsewhere have spent on it: those of this process, or of the folder that it was loaded from.
"""

import contextlib
from pathlib import Path
from typing import Final

from torch import nn

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Spent
from doppler_hf.privacy.ledger.ledger import ledgers_in
from doppler_hf.privacy.ledger.record import ModelDigests
from doppler_hf.run.digests import parameters_digest

_SPENT: Final[dict[str, Spent]] = {}  # by the digests of the parameters that private trainings of this process have left


def ledgers_of(checkpoint: Path) -> list[PrivacyLedger]:
    """Return the ledgers of a checkpoint: its own, and those of its run, which may have continued after it."""
    own = PrivacyLedger.load(checkpoint)
    unknown = own.unknown_weights(checkpoint)
    if unknown:
        raise ValueError(
            f"The weights in {checkpoint} must match its ledger, got others in {', '.join(unknown)}, whose training is not "
            "accounted for. Put back the saved weights, or load these with from_pretrained and train from the start."
        )
    above = [PrivacyLedger.load(checkpoint.parent)] if (checkpoint.parent / LEDGER_NAME).exists() else []
    return [own, *above, *(aside for aside in ledgers_in(checkpoint.parent).values() if own.is_prefix_of(aside))]


def ledgers_of_model(folder: Path, model: nn.Module) -> list[PrivacyLedger]:
    """Return the ledger in a folder that speaks for the model, with those that continue it; none if there is none."""
    digest, there = parameters_digest(model), list(ledgers_in(folder).values())
    # Whatever became of its buffers: the steps count.
    first = next((ledger for ledger in there if any(digest == known.parameters for known in ledger.models)), None)
    return [] if first is None else [ledger for ledger in there if first.is_prefix_of(ledger)]


def note_spent_on(left: ModelDigests, spent: Spent) -> None:
    """Note what has been spent on a model as a training leaves it, such as one that a notebook's cell trains again."""
    _SPENT[left.parameters] = spent


def spent_on(model: nn.Module, begun_with: ModelDigests) -> Spent | None:
    """Return what trainings have spent on a model, in this process or before it was saved and loaded; None if unknown."""
    source = Path(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    if begun_with.parameters not in _SPENT and (source / LEDGER_NAME).exists():
        with contextlib.suppress(ValueError):  # it is no ledger
            return PrivacyLedger.load(source).spent
    return _SPENT.get(begun_with.parameters)
