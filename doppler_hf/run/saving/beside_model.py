"""Save the ledger next to a model: it covers the weights in its folder, and no other weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.ledger import set_aside
from doppler_hf.privacy.ledger.weights import hashes, stamps, weight_files
from doppler_hf.run.digests import digests_of
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.saving.card_part import BEGIN, CARD_NAME
from doppler_hf.run.saving.card_sections import ROUNDING_IF_ANY, TAGS, metadata_of, privacy_section, written_part
from doppler_hf.run.saving.model_card import HEADING, renew_card
from doppler_hf.training_args import DopplerTrainingArguments


@contextlib.contextmanager
def ledger_saved_with_model(folder: Path, trainer: Any, *, checkpoint_step: int | None) -> Iterator[None]:
    """Bind the ledger of a trainer's run to the weights that the block saves, and save it there, if it covers the model.

    If the folder has a ledger of other weights, that ledger is renamed.
    """
    args: DopplerTrainingArguments = trainer.args
    run: PrivateRun | None = trainer._run
    model: nn.Module = trainer.model
    home = folder if checkpoint_step is None else folder.parent
    with trainer._lock_of(home) if (home / LEDGER_NAME).exists() else contextlib.nullcontext():
        speaks, before, card = run is not None and run.covers_weights_of(model), stamps(folder), folder / CARD_NAME
        yield
        ledger, weights = None if run is None else run.ledger, hashes(folder, unless_as=before)
        # Files that the ledger knows are covered, whatever became of parts of the model that are not in them.
        if ledger is None or not (speaks or ledger.has_saved(weights)):
            if ledger is None and not args.disable_dp:
                print(
                    f"The model was saved in {folder} without a privacy ledger, because this trainer has not trained it. To "
                    "keep the ledger of an earlier run, copy the folder in which that run saved the model."
                )
            if ledger is not None:
                assert run is not None
                when = "after the private run"
                mend = "Save the model before you change it, and save the changed model in another folder."
                if run.trained_model is not None and not run.trained_model.only_trained_parts_changed(model):
                    when = "by something other than the steps of the private run, such as a callback"
                    mend = (
                        "Frozen weights and buffers must stay as they were at its start. Keep what else changes, such as an "
                        "average of the weights, in a copy outside of the model: copy.deepcopy(model)."
                    )
                print(
                    f"The weights saved in {folder} were changed {when}, so its ledger does not cover them and was not "
                    f"saved there. {mend}"
                )
            aside = set_aside(folder, unless=lambda there: not there.unknown_weights(folder))
            if aside is not None:
                print(
                    f"The earlier ledger in {folder} was renamed to {aside.name}, because it does not cover these weights."
                )
            if card.exists() and not (folder / LEDGER_NAME).exists():
                write_card(card, None, trainer)  # PEFT keeps what is in a card
            return
        assert run is not None
        assert run.trained_model is not None, "a ledger is opened for a model"
        if checkpoint_step is not None:
            ledger.checkpoint(checkpoint_step)
        marks = run.trained_model.marks(model, together=False)
        ledger.speak_for(weights, model=digests_of(model), trained=marks)
        run.trained_model.remember(model, ledger, marks=marks, writes=True)  # users may merge a checkpoint, too
        if checkpoint_step is not None:
            ledger.save(args.output_dir)
        set_aside(folder, unless=lambda there: there.is_prefix_of(ledger))
        ledger.save(folder)
        write_card(card, run, trainer)
        if checkpoint_step is None:
            print(f"The ledger {folder / LEDGER_NAME} covers the weights next to it. Its last hash is {ledger.head}.")


def ledger_of_weights_in(folder: Path) -> PrivacyLedger | None:
    """Return the ledger in a folder if it covers the weights there, and None if there is none or there are no weights."""
    if not (folder / LEDGER_NAME).exists() or not weight_files(folder):
        return None
    ledger = PrivacyLedger.load(folder)
    return None if ledger.unknown_weights(folder) else ledger


def has_part_of(card: Path, ledger: PrivacyLedger) -> bool:
    """Return whether a card already has a part of a run, with this ledger as it is now."""
    text = card.read_text("utf-8") if card.exists() else ""
    return BEGIN in text and ledger.head in text


def write_card(
    card: Path, run: PrivateRun | None, trainer: Any, *, before: str | None = None, ledger: PrivacyLedger | None = None
) -> None:
    """Renew the part of a card that a run writes; without a run only take it out. A fault is told and fails nothing.

    Args:
        card: The card.
        run: The run whose ledger covers the weights; None if the trainer has none.
        trainer: The trainer.
        before: The card before a library wrote over it. Without it, a card is renewed that is an adapter's or has such a
            part: another one is somebody's own file.
        ledger: Without a run, a ledger that covers the weights. The part then has the guarantee alone.
    """
    try:
        if before is None:
            if not card.exists():
                return
            text = card.read_text("utf-8")
            has_part = BEGIN in text or HEADING in text
            if not has_part and (run is None or not hasattr(trainer.model, "peft_config")):
                return
        part: str | None = None
        metadata: dict[str, object] = {}
        if run is not None:
            part, metadata = written_part(run, trainer, card.parent), metadata_of(run, trainer)
        elif ledger is not None:
            part, metadata = privacy_section(ledger, also_not_covered=[ROUNDING_IF_ANY]), {"tags": TAGS}
        # The folder of a checkpoint says only its step.
        title = (trainer.hub_model_id or trainer.args.hub_model_id or "").rpartition("/")[2]
        title = title or Path(trainer.args.output_dir).resolve().name
        renew_card(card, part, title=title, metadata=metadata, before=before)
    except Exception as error:
        print(f"The model card {card} was not completed ({type(error).__name__}: {error}). The model is saved all the same.")
