"""Find the ledger of an earlier run that a new run continues: of a checkpoint, or in a folder if it covers the model."""

from pathlib import Path
from typing import Final, NamedTuple

from torch import nn

from doppler_hf.errors import Refusal
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.ledger import latest, ledgers_in
from doppler_hf.run.digests import parameters_digest, whole_digest
from doppler_hf.run.processes.processes import on_process_0
from doppler_hf.run.weights.trained_model import TrainedModel

_ALONE: Final = (
    f"{{checkpoint}} has no {LEDGER_NAME} of its run beside it, so nobody knows how the run went on. All its planned steps "
    f"count, and this training is a plan of its own. To count only what was made, put the {LEDGER_NAME} from the run's "
    "output_dir beside the folder of the checkpoint."
)


class Previous(NamedTuple):
    """The checkpoint, ledger and model that a run continues."""

    checkpoint: str | None = None  # The folder of the checkpoint.
    step: int = 0  # The step at which the checkpoint was written.
    ledger: PrivacyLedger | None = None  # The ledger that the run continues.
    model: TrainedModel | None = None  # The model of the same trainer's earlier run.


NOTHING: Final = Previous()


def ledgers_of(checkpoint: Path) -> list[PrivacyLedger]:
    """Return the ledger in a checkpoint and the ledgers of its run, which may have continued after the checkpoint."""
    own = PrivacyLedger.load(checkpoint)
    unknown = own.unknown_weights(checkpoint)
    if unknown:
        raise Refusal(
            "weights-without-account",
            f"The weight files {', '.join(unknown)} in {checkpoint} do not match its ledger, so the ε of their training is "
            "unknown. Put the saved files back, or load these weights with from_pretrained and train from the start.",
        )
    above = [PrivacyLedger.load(checkpoint.parent)] if (checkpoint.parent / LEDGER_NAME).exists() else []
    beside = [*above, *(aside for aside in ledgers_in(checkpoint.parent).values() if own.is_prefix_of(aside))]
    return [own, *beside]


def ledgers_of_model(folder: Path, model: nn.Module) -> list[PrivacyLedger]:
    """Return the ledger in a folder that covers the model, and the ledgers that continue it, or an empty list."""
    there = list(ledgers_in(folder).values())
    if not there:
        return []
    digests = {parameters_digest(model), whole_digest(model)}
    # Only parameters are compared: the steps of the earlier run count, whatever became of the buffers.
    first = next((ledger for ledger in there if any(known.parameters in digests for known in ledger.models)), None)
    return [] if first is None else [ledger for ledger in there if first.is_prefix_of(ledger)]


def continued_ledger(
    previous: PrivacyLedger | None, checkpoint: str | None, *, folder: str, model: nn.Module
) -> PrivacyLedger | None:
    """Return the ledger that the next run continues, the same on every process, or None.

    Args:
        previous: The ledger of the trainer's run before. A second run of the trainer continues it, whether resumed or not.
        checkpoint: The folder to resume from.
        folder: The folder in which the trainer saves.
        model: The model to be trained.
    """

    def read() -> PrivacyLedger | None:
        earlier = [previous.as_written()] if previous is not None else []
        if checkpoint is not None:
            own, *beside = ledgers_of(Path(checkpoint))
            # Privacy: a checkpoint does not know how its run went on. Without the ledger of the run all its steps count,
            # and results may have led to what follows.
            if not beside and not any(own.is_prefix_of(ledger) for ledger in earlier):
                own = own.as_finished()
                print(_ALONE.format(checkpoint=checkpoint))
            earlier += [own, *beside]
        if not earlier:
            earlier = ledgers_of_model(Path(folder), model)
        return latest(earlier) if earlier else None

    return on_process_0(read)
