"""The folder of a model that is trained once and used again: what it was trained with, and whether it is finished.

The same command trains a model the first time, and later uses it. So the folder has a file with every argument on which
the weights depend, written before training. With other arguments, a finished model is not used and an interrupted run is not
resumed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from doppler_hf.cli.verify import mismatches_in
from doppler_hf.errors import Refusal
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.ledger.file import write_whole
from doppler_hf.privacy.ledger.terms import why_not_private
from doppler_hf.privacy.ledger.weights import weight_files

RECORD: Final = "synthesis.json"

# The trained weights do not depend on these arguments: what is logged, evaluated, saved and shown, and by which device.
_BESIDE_THE_MODEL: Final = (
    "dataloader_", "ddp_", "do_", "eval_", "hub_", "include_", "log_", "logging_", "save_", "trackio_",
)  # fmt: skip
_NOT_OF_THE_MODEL: Final = {
    "batch_eval_metrics", "bf16_full_eval", "debug", "disable_tqdm", "enable_jit_checkpoint", "fp16_full_eval",
    "grad_sample_self_check", "local_rank", "metrics_per_user", "output_dir", "per_device_eval_batch_size",
    "plot_training_curve", "prediction_loss_only", "project", "push_to_hub", "rehearse", "report_to",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "run_name", "skip_memory_metrics", "use_cpu",
}  # fmt: skip


def training_settings(args: TrainingArguments, **others: Any) -> dict[str, Any]:
    """Return every training argument on which the weights depend, and `others`, as JSON keeps them."""
    own = {
        name: value
        for name, value in args.to_dict().items()
        if name not in _NOT_OF_THE_MODEL and not name.startswith(_BESIDE_THE_MODEL)
    }
    # A folder is the same one from wherever the script is started.
    others = {
        name: str(Path(value).resolve()) if isinstance(value, str) and Path(value).is_dir() else value
        for name, value in others.items()
    }
    return dict(json.loads(json.dumps(own | others, default=str)))


def finished_labels(folder: Path, settings: Mapping[str, Any]) -> list[str] | None:
    """Return the labels of the finished model in this folder, or None if it is still to be trained.

    Raises:
        Refusal: If the model was trained or begun with other settings, or if its weights do not match its ledger.
    """
    if not (folder / RECORD).is_file():
        return None
    record = json.loads((folder / RECORD).read_text("utf-8"))
    if record["labels"] is None and get_last_checkpoint(str(folder)) is None:
        return None  # Nothing of that run is left to continue.
    before = record["settings"]
    # Only names that both have: another version of Transformers may have other arguments.
    other = [
        f"{name} was {before[name]!r} and is now {value!r}"
        for name, value in settings.items()
        if name in before and before[name] != value
    ]
    if other:
        state = "an interrupted run" if record["labels"] is None else "a finished model"
        raise Refusal(
            "other-model-finished",
            f"The folder {folder} has {state} with other settings: {'; '.join(other)}. To use it, give the same arguments "
            "as before. To train another model, which costs its own ε, give another --output_dir.",
        )
    if record["labels"] is None:
        return None
    _check_weights(folder, is_private=not before["disable_dp"])
    return list(record["labels"])


def write_record(folder: Path, settings: Mapping[str, Any], *, labels: list[str] | None) -> None:
    """Write what the model is trained with. `labels` is None until it is finished."""
    write_whole(folder / RECORD, json.dumps({"labels": labels, "settings": settings}, indent=1))


def note_histogram(folder: Path, epsilon: float) -> None:
    """Note in the record of a finished model that a histogram of its labels costs `epsilon`."""
    record = json.loads((folder / RECORD).read_text("utf-8"))
    write_whole(folder / RECORD, json.dumps(record | {"histogram_epsilon": epsilon}, indent=1))


def noted_histogram(folder: Path) -> float | None:
    """Return ε of the histogram that was begun for the model in this folder, or None if there is none."""
    return json.loads((folder / RECORD).read_text("utf-8")).get("histogram_epsilon")


def _check_weights(folder: Path, *, is_private: bool) -> None:
    """Check what the card of the synthetic texts will claim: that this ledger accounts for these weights."""
    wrong = [] if weight_files(folder) else ["There are no weights."]
    if is_private:
        try:
            ledger = PrivacyLedger.load(folder)
        except (ValueError, FileNotFoundError) as error:
            wrong.append(f"The ledger cannot be read ({error}).")
        else:
            # A run may be not private, as with a noise multiplier of 0. The card says so.
            wrong += mismatches_in(folder, ledger=ledger) if why_not_private(ledger) is None else []
    if wrong:
        raise Refusal(
            "model-not-verified",
            f"The model in {folder} was finished, but no longer passes doppler-hf verify ({' '.join(wrong)}). Put back "
            "the files that the run saved, or train another model with another --output_dir.",
        )
