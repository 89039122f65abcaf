"""What the audits ask of a training run, and the trainer and arguments of a run that leaves nothing behind."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, Final

from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from doppler_hf.errors import Refusal
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments

# An audited model is discarded, so it is neither evaluated, saved nor reported.
_DISCARDED: Final[dict[str, Any]] = {
    "eval_strategy": IntervalStrategy.NO,
    "eval_on_start": False,
    "save_strategy": SaveStrategy.NO,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": [],
}
# An audit needs coins of both sides. Twenty coins all fall on the same side in one of half a million audits.
_FEWEST: Final = 20
_MOST: Final = 1_000_000


def discarded_run(args: DopplerTrainingArguments, *, folder: str) -> DopplerTrainingArguments:
    """Return the arguments of the same training run, which leaves nothing behind outside of `folder`."""
    args = copy.copy(args)
    for name, value in {**_DISCARDED, "output_dir": folder}.items():
        setattr(args, name, value)
    return args


def motionless_run(args: DopplerTrainingArguments, *, steps: int, folder: str) -> DopplerTrainingArguments:
    """Return the arguments of a discarded run that moves no weight."""
    args = discarded_run(args, folder=folder)
    changes = {
        "max_steps": steps, "learning_rate": 0.0, "allow_any_learning_rate": True, "target_epsilon": None,
        "noise_multiplier": 1.0,
        "noise_shape": "white",  # under another shape a unit could not be in two consecutive batches
        "logging_strategy": IntervalStrategy.NO, "disable_tqdm": True,
        # Rows are fetched in this process, so that it is known which are in a micro-batch.
        "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    for name, value in changes.items():
        setattr(args, name, value)
    return args


@contextmanager
def hidden_prints() -> Iterator[None]:
    """Show nothing of what the block prints: about a discarded run it is wrong, as its folder and its canaries are removed.

    So the run's warnings are not shown either. Each training shows them. Progress bars go to the standard error.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def copied(trainer: DopplerTrainer) -> DopplerTrainer:
    """Return a trainer of the same model, without a ledger and with only the callbacks that training needs."""
    tested, handler = copy.copy(trainer), copy.copy(trainer.callback_handler)
    handler.callbacks = [each for each in handler.callbacks if isinstance(each, DefaultFlowCallback)]
    tested.callback_handler, tested.state = handler, copy.copy(trainer.state)
    tested._run = tested.optimizer = tested.lr_scheduler = None
    return tested


def claims_privacy(args: DopplerTrainingArguments) -> bool:
    """Return whether the run has an ε that an audit could contradict."""
    return not args.disable_dp and args.noise_multiplier != 0.0 and args.noise_seed is None


def check_size(args: DopplerTrainingArguments, *, num_canaries: int) -> None:
    """Refuse several processes, and too few or too many canaries."""
    if args.world_size > 1:
        raise Refusal(
            "audit-in-processes",
            f"An audit runs in one process only; this run has {args.world_size}. Start the script without a launcher.",
        )
    if not _FEWEST <= num_canaries <= _MOST:
        raise Refusal(
            "out-of-range",
            f"num_canaries, the number of records that the audit attacks, must be from {_FEWEST} to {_MOST:,}; "
            f"got {num_canaries}. Use some hundreds: the more there are, the higher the bound on ε can be.",
        )
