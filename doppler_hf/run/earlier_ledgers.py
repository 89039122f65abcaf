"""The ledgers of earlier trainings that a run may continue: a checkpoint's, or one in a folder that speaks for the model."""

from pathlib import Path

from torch import nn

from doppler_hf.errors import Refusal
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.ledger import latest, ledgers_in
from doppler_hf.run.digests import parameters_digest, whole_digest
from doppler_hf.run.processes import on_process_0


def ledgers_of(checkpoint: Path) -> list[PrivacyLedger]:
    """Return the ledgers of a checkpoint: its own, and those of its run, which may have continued after it."""
    own = PrivacyLedger.load(checkpoint)
    unknown = own.unknown_weights(checkpoint)
    if unknown:
        raise Refusal(
            "weights-without-account",
            f"The weights in {checkpoint} must match its ledger, got others in {', '.join(unknown)}, whose training is not "
            "accounted for. Put back the saved weights, or load these with from_pretrained and train from the start.",
        )
    above = [PrivacyLedger.load(checkpoint.parent)] if (checkpoint.parent / LEDGER_NAME).exists() else []
    return [own, *above, *(aside for aside in ledgers_in(checkpoint.parent).values() if own.is_prefix_of(aside))]


def ledgers_of_model(folder: Path, model: nn.Module) -> list[PrivacyLedger]:
    """Return the ledger in a folder that speaks for the model, with those that continue it; none if there is none."""
    there = list(ledgers_in(folder).values())
    if not there:
        return []
    digests = {parameters_digest(model), whole_digest(model)}
    # Whatever became of its buffers: the steps count.
    first = next((ledger for ledger in there if any(known.parameters in digests for known in ledger.models)), None)
    return [] if first is None else [ledger for ledger in there if first.is_prefix_of(ledger)]


def continued_ledger(
    previous: PrivacyLedger | None, checkpoint: str | None, *, folder: str, model: nn.Module
) -> PrivacyLedger | None:
    """Return the ledger that the next run continues, the same on every process, or None.

    Args:
        previous: That of the trainer's run before. A second run of the same trainer continues it, whether resumed or not.
        checkpoint: The folder to resume from.
        folder: Where the trainer saves.
        model: The model to be trained.
    """

    def read() -> PrivacyLedger | None:
        earlier = [previous.as_written()] if previous is not None else []
        if checkpoint is not None:
            earlier += ledgers_of(Path(checkpoint))
        if not earlier:
            earlier = ledgers_of_model(Path(folder), model)
        return latest(earlier) if earlier else None

    return on_process_0(read)
