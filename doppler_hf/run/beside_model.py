"""Save the ledger next to a model: it covers the weights in its folder, and no other weights."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.privacy.ledger.file import WriterLock
from doppler_hf.privacy.ledger.ledger import set_aside
from doppler_hf.privacy.ledger.weights import hashes, stamps
from doppler_hf.run.digests import digests_of
from doppler_hf.run.model_card import CARD_NAME, HEADING, renew_section
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.training_args import DopplerTrainingArguments


@contextlib.contextmanager
def ledger_beside(
    folder: Path,
    args: DopplerTrainingArguments,
    *,
    run: PrivateRun | None,
    model: nn.Module,
    checkpoint_step: int | None,
    lock: Callable[[Path], WriterLock],
) -> Iterator[None]:
    """Bind a run's ledger to the weights that the block saves, and save it next to them, if it covers the model.

    If the folder has a ledger of other weights, that ledger is renamed.
    """
    home = folder if checkpoint_step is None else folder.parent
    with lock(home) if (home / LEDGER_NAME).exists() else contextlib.nullcontext():
        speaks, before, card = run is not None and run.speaks_for(model), stamps(folder), folder / CARD_NAME
        yield
        ledger, weights = None if run is None else run.ledger, hashes(folder, unless_as=before)
        # Files that the ledger knows are covered, whatever became of parts of the model that are not in them.
        if ledger is None or not (speaks or ledger.has_saved(weights)):
            if ledger is None and not args.disable_dp:
                print(
                    f"The model was saved in {folder} without a privacy ledger, because this trainer has not trained it. To "
                    "keep its ledger, copy the folder in which the trainer that trained it saved it."
                )
            if ledger is not None:
                print(
                    f"The weights saved in {folder} were changed after the private run, so its ledger does not cover them "
                    "and was not saved there. Save the model before you change it, and save the changed model in another "
                    "folder."
                )
            aside = set_aside(folder, unless=lambda there: not there.unknown_weights(folder))
            if aside is not None:
                print(
                    f"The earlier ledger in {folder} was renamed to {aside.name}, because it does not cover these weights."
                )
            if card.exists() and not (folder / LEDGER_NAME).exists():
                renew_section(card, None)  # PEFT keeps the section of an earlier card
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
        if card.exists() and (hasattr(model, "peft_config") or HEADING in card.read_text("utf-8")):
            renew_section(card, ledger)
        if checkpoint_step is None:
            print(f"The ledger {folder / LEDGER_NAME} covers the weights next to it. Its last hash is {ledger.head}.")


@contextlib.contextmanager
def spoken_for_when_converted(run: PrivateRun | None, args: DopplerTrainingArguments, *, model: nn.Module) -> Iterator[None]:
    """Keep the model covered by the ledger after the block, even if Transformers converts its weights to evaluate it."""
    # During a run Transformers converts nothing.
    converts = (
        (args.bf16_full_eval or args.fp16_full_eval) and run is not None and not run.is_running and run.speaks_for(model)
    )
    yield
    if converts and run is not None:
        run.leave(model, speaks=True, writes=args.process_index == 0)
