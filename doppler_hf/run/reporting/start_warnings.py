"""What a run warns of before its first step, when the arguments, the ledger or the noise make it likely to disappoint."""

import contextlib
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from transformers import EarlyStoppingCallback
from transformers.integrations import TensorBoardCallback

from doppler_hf.filters.noise_shape import DROWNED, in_units_of_c
from doppler_hf.privacy import PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.accounting.accounting import without_partial_round
from doppler_hf.privacy.accounting.composition import SMALLEST_DELTA
from doppler_hf.privacy.ledger.terms import total_of, why_not_private
from doppler_hf.privacy.loss_bounds import LossBound
from doppler_hf.run.planning.plan import last_with_steps, noise_of_average, target_of_equal_noise
from doppler_hf.run.precision import computes_in_bf16
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.reporting.logged_loss import copies_of_console, folder_of, local_callbacks, noise_of_loss
from doppler_hf.run.reporting.other_runs import other_runs_note
from doppler_hf.training_args import DopplerTrainingArguments

# At ε = 5, the definition alone allows an attack to recognise 99 % of the records with 1 % false positives. Usual are 1 to
# 8.
LARGEST_EPSILON: Final = 10.0
# The run notes a logged loss with more noise than this, in units of its bound, or a quarter of an untrained model's loss.
_NOISY: Final = 0.125
# The same for a bound that is a guess: losses of an unknown unit may be far smaller than it.
_NOISY_IF_GUESSED: Final = 0.01
# A run with so many times the noise of the run that it continues gets a note. With 18 times, R² fell from 0.40 to -0.19.
MUCH_NOISIER: Final = 4.0
_OF_A_PERSON: Final = re.compile("user|patient|person|customer|client|author|speaker|sample_mapping")  # columns


def start_warnings(
    run: PrivateRun,
    args: DopplerTrainingArguments,
    *,
    model: Any,
    noise: float,
    num_trained: int,
    notes: Sequence[str],
    callbacks: Sequence[Any],
) -> list[str]:
    """Return all warnings, the most important first.

    Args:
        run: The run, with its ledger.
        args: Its arguments.
        model: The model.
        noise: The noise of the average gradient per coordinate, in units of C.
        num_trained: The number of trained weights.
        notes: Remarks of the checks before the first step.
        callbacks: All callbacks of the trainer.
    """
    assert run.ledger is not None
    statement = run.statement
    return [
        *(_raw_loss_notes(callbacks, output_dir=args.output_dir) if statement.train_loss == "raw" else ()),
        *_epsilon_notes(run.ledger),
        *_delta_notes(run.ledger),
        *_other_runs_notes(run),
        *(_noisier_note(run, args) or low_signal_note(noise, num_trained=num_trained)),
        *notes,
        *_early_stop_notes(run.ledger, callbacks),
        *_length_notes(statement, args),
        *_unit_notes(run, args, notes=notes),
        *_checkpoint_notes(run, args, model=model),
        *_rounding_notes(run, model),
        *_loss_noise_notes(
            statement,
            args,
            steps_per_epoch=run.sampler.steps_per_epoch,
            is_guessed=args.per_sample_max_loss is None and run.loss_bound == LossBound.guessed(),
        ),
    ]


def low_signal_note(noise: float, *, num_trained: int) -> list[str]:
    """Return a note if the noise of the average of all gradients, in units of C, is larger than the average can be.

    With that much noise a classifier of images learnt little. The noise vector must also be longer than the average itself
    can be, since a linear classifier of 62 weights still learns with more noise per coordinate.
    """
    if noise <= DROWNED or noise * math.sqrt(num_trained) <= 1.0:
        return []
    more = "use larger batches, more epochs, more data or a larger ε"
    return [
        f"the run may learn little, because the noise of its average gradient is {in_units_of_c(noise)} per coordinate: "
        f"{more}"
    ]


def _noisier_note(run: PrivateRun, args: DopplerTrainingArguments) -> list[str]:
    """Return a note if a run gets far more noise than the run that it continues, since its target leaves little for it.

    Such a run makes a trained model worse: the noise undoes what the earlier run has learnt.
    """
    earlier, statement = run.previous.ledger, run.statement
    steps = statement.steps_planned - run.previous.step
    if args.target_epsilon is None or earlier is None or not earlier.private or not earlier.begun_plans or steps < 1:
        return []
    times = noise_of_average(statement, steps=steps) / noise_of_average(last_with_steps(earlier), steps=steps)
    if times < MUCH_NOISIER:
        return []
    target = target_of_equal_noise(earlier, statement, steps=steps)
    return [
        f"the run will probably make the model worse, because it has {times:.2g} times the noise of the earlier run, which "
        f"has spent most of target_epsilon: stop it before its first step, and set target_epsilon={target:g} for about the "
        "same noise"
    ]


def _epsilon_notes(ledger: PrivacyLedger) -> list[str]:
    """Return a note if ε is so large that it protects little."""
    if why_not_private(ledger) is not None:
        return []
    total = total_of(ledger, epsilon=ledger.planned_epsilon).epsilon
    return [f"ε above {LARGEST_EPSILON:g} protects little; usual values are 1 to 8"] if total > LARGEST_EPSILON else []


def _delta_notes(ledger: PrivacyLedger) -> list[str]:
    """Return what to do if the δ of this run and of earlier runs on the weights add up to 1/N or more."""
    earlier, largest = ledger.earlier, 1.0 / ledger.statement.num_units
    if earlier is None or why_not_private(ledger) is not None or ledger.spent.delta < largest:
        return []
    if_shared = f"the δ of all runs add up to 1/N or more for a {ledger.statement.noun} whose data several runs use"
    free = _rounded_down(0.99 * (largest - earlier.delta))
    # A run that continues its ledger has to keep its δ.
    if free >= SMALLEST_DELTA and len(ledger.runs) == 1:
        return [f"{if_shared}: stop this run before its first step, and start again with target_delta={free:g}"]
    return [
        f"{if_shared}, and no target_delta of this run changes that. If you can, train the earlier run anew with a smaller "
        f"target_delta, such as {_rounded_down(0.1 * largest):g}, and then this run with the same"
    ]


def _rounded_down(delta: float) -> float:
    """Return a positive δ with two digits, rounded down, and any other number as it is.

    Example:
        >>> _rounded_down(0.01137), _rounded_down(-0.5)
        (0.011, -0.5)
    """
    if delta <= 0.0:
        return delta
    digits = 1 - math.floor(math.log10(delta))
    return round(math.floor(delta * 10.0**digits) / 10.0**digits, digits)


def _other_runs_notes(run: PrivateRun) -> list[str]:
    """Return a note on other runs on the same data. A trial of a search says nothing, since its ε is that of the search."""
    assert run.ledger is not None
    if run.statement.search is not None or why_not_private(run.ledger) is not None:
        return []
    total = total_of(run.ledger, epsilon=run.ledger.planned_epsilon)
    return other_runs_note(run.digest_of_data, ledger=run.ledger, epsilon=total.epsilon)


def _early_stop_notes(ledger: PrivacyLedger, callbacks: Sequence[Any]) -> list[str]:
    """Return a note if a callback may stop the run early, which saves time but no ε."""
    is_used = any(isinstance(each, EarlyStoppingCallback) for each in callbacks)
    if not is_used or why_not_private(ledger) is not None:
        return []
    return [
        "EarlyStoppingCallback saves time, but no ε: the ε of the whole plan counts wherever a run stops, because "
        "intermediate results may decide that"
    ]


def _length_notes(statement: PrivacyStatement, args: DopplerTrainingArguments) -> list[str]:
    """Return notes on a length that needs more noise than a shorter one, or is too short for its warmup."""
    steps, notes = statement.steps_planned, []
    whole = without_partial_round(steps, sample_rate=statement.sample_rate, groups=statement.groups)
    if args.max_steps > 0 and whole < steps:
        notes.append(
            f"max_steps={whole} would need less noise, because only some {statement.noun}s take part in the last "
            f"{steps - whole} steps"
        )
    if args.get_warmup_steps(steps) >= steps:
        notes.append(
            f"the warmup covers all {steps} steps, so the learning rate never reaches its peak: shorten warmup_steps"
        )
    return notes


def _unit_notes(run: PrivateRun, args: DopplerTrainingArguments, *, notes: Sequence[str]) -> list[str]:
    """Return a note for each column that seems to say to whom a row belongs, unless the checks have noted it already."""
    if args.privacy_unit_column is not None:
        return []
    columns = [name for name in getattr(run.train_dataset, "column_names", None) or () if _OF_A_PERSON.search(name)]
    return [
        f"ε protects one row. If the column {name!r} says to whom a row belongs, set privacy_unit_column={name!r}"
        for name in columns
        if not any(f"privacy_unit_column={name!r}" in note for note in notes)  # of a column whose values repeat
    ]


def _checkpoint_notes(run: PrivateRun, args: DopplerTrainingArguments, *, model: Any) -> list[str]:
    """Return notes on what is lost if the run is interrupted. Users who switched saving off know it."""
    if args.save_strategy == "no":
        return []
    steps, notes = run.statement.steps_planned, []
    # Transformers' default of 500 steps is more than most private runs have.
    if _first_checkpoint(args, run) >= steps:
        notes.append(
            f"no checkpoint is saved before the end of the {steps} steps, so if the process is killed without warning, "
            f"the model is lost and its ε is spent: set save_strategy='steps' and save_steps={max(1, steps // 4)}"
        )
    if args.save_only_model:
        notes.append(
            "save_only_model=True leaves optimizer, filter and schedule out of checkpoints, so a resumed run begins them "
            "anew: leave it out to continue after an interruption"
        )
    free = free_bytes(args.output_dir)
    kept = _checkpoints_kept(args, run)
    needed = kept * _bytes_of_weights(model)
    if free is not None and free < needed:
        notes.append(
            f"the weights of {kept} checkpoint{'s' * (kept > 1)} need {needed / 1e9:.2g} GB, and output_dir has "
            f"{free / 1e9:.2g} GB left, so saving would end the run after ε was spent: free some space, or "
            f"{'set save_total_limit=1' if kept > 1 else 'choose another output_dir'}"
        )
    return notes


def free_bytes(folder: str | Path | None) -> int | None:
    """Return how many bytes can still be written into a folder, which may not exist yet; None if nobody can tell."""
    path = Path(folder or ".").resolve()
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
    return None


def _checkpoints_kept(args: DopplerTrainingArguments, run: PrivateRun) -> int:
    """Return how many checkpoints lie in the output folder at the end, or at the moment when there are most."""
    first, steps = _first_checkpoint(args, run), run.statement.steps_planned
    saved = 1 if math.isinf(first) else math.ceil(steps / first)  # the last step is saved, too
    # An old checkpoint is removed after the new one was written, and the best one is kept beside the last.
    limit = args.save_total_limit
    return saved if limit is None else min(saved, max(limit, 2 if args.load_best_model_at_end else 1) + 1)


def _bytes_of_weights(model: Any) -> int:
    """Return the bytes of the weights that a checkpoint holds: all weights, or of PEFT's models the trained ones."""
    only_trained = hasattr(model, "peft_config")
    return sum(
        value.numel() * value.element_size() for value in model.parameters() if value.requires_grad or not only_trained
    )


def _first_checkpoint(args: DopplerTrainingArguments, run: PrivateRun) -> float:
    """Return after how many steps the arguments save the first checkpoint, or infinity if they save none."""
    if args.save_strategy == "steps":
        every = args.save_steps if args.save_steps >= 1 else args.save_steps * run.statement.steps_planned
        return math.ceil(every)
    every = args.eval_steps or math.inf
    return {"epoch": run.sampler.steps_per_epoch, "best": every}.get(args.save_strategy, math.inf)


def _rounding_notes(run: PrivateRun, model: Any) -> list[str]:
    """Return a note if rows of different lengths are rounded differently, which ε does not cover."""
    lengths = run.sampler.lengths
    is_rounded = computes_in_bf16(model, run.mixed_precision) and not run.pads_each_row_alone
    may_differ = not run.probe.are_of_one_length if lengths is None else lengths.min() < lengths.max()
    if not (is_rounded and may_differ):
        return []
    how = (
        "rows have unknown lengths and are padded to the longest row of their micro-batch. Pad"
        if lengths is None
        else "the data_collator pads each row to the longest row of its micro-batch. Give it an attribute "
        "pad_to_multiple_of that it follows, pad"
    )
    return [f"ε does not cover rounding in bf16: {how} all rows to one length, or use float32"]


def _loss_noise_notes(
    statement: PrivacyStatement, args: DopplerTrainingArguments, *, steps_per_epoch: int, is_guessed: bool
) -> list[str]:
    """Return a note on the noise of the logged loss if a single value says little about the loss, and what helps."""
    planned, largest = statement.steps_planned, statement.per_sample_max_loss
    if statement.train_loss != "private" or not statement.loss_noise_multiplier or args.logging_strategy == "no":
        return []
    assert largest is not None
    every = args.logging_steps if args.logging_steps >= 1 else math.ceil(args.logging_steps * planned)
    every = min(int(every) if args.logging_strategy == "steps" else steps_per_epoch, planned)
    noise, of_step = noise_of_loss(statement, steps=every), noise_of_loss(statement, steps=1)
    if noise <= _NOISY * largest and is_guessed and noise > _NOISY_IF_GUESSED * largest:
        return [
            f"each value of the logged training loss has noise of ± {noise:.2g}, because losses are clipped to "
            f"{largest:.3g}, which is a guess. If yours are smaller, set per_sample_max_loss to a number that they seldom "
            "exceed and that does not come from the data: the noise is in proportion to it"
        ]
    if noise <= _NOISY * largest:
        return []
    enough = math.ceil((of_step / (_NOISY * largest)) ** 2)
    clipped = f"losses are between 0 and {largest:.3g}"
    if enough > planned:
        over_all = noise_of_loss(statement, steps=planned)
        return [
            f"the logged training loss says little, because {clipped}, and even its mean over all {planned:,} steps has "
            f"noise of ± {over_all:.2g}: look at evaluations instead (eval_strategy), and set report_train_loss='none'"
        ]
    return [
        f"each value of the logged training loss has noise of ± {noise:.2g}, while {clipped}: set "
        f"logging_strategy='steps' and logging_steps={enough} for noise of ± {noise_of_loss(statement, steps=enough):.2g}"
    ]


def _raw_loss_notes(callbacks: Sequence[Any], *, output_dir: str) -> list[str]:
    """Return notes on who sees the raw loss, which has no noise, and who does not."""
    words = [
        "the training loss shown here is NOT PRIVATE, so it is not saved: report_train_loss='private' adds noise, and "
        "'none' hides it"
    ]
    if copying := copies_of_console(callbacks):
        words = [f"the raw training loss is not printed, because {' and '.join(copying)} would upload what is printed"]
    local = local_callbacks(callbacks, output_dir=output_dir)
    for each in callbacks:
        if isinstance(each, TensorBoardCallback):
            is_local = any(each is other for other in local)
            words += [
                f"TensorBoard's files in {folder_of(each)} hold the raw training loss, which is NOT PRIVATE: do not share "
                "them"
                if is_local
                else "TensorBoard does not get the raw training loss, because its files are in output_dir or on another "
                f"machine ({folder_of(each)}). Set TENSORBOARD_LOGGING_DIR to a different folder, or leave it out"
            ]
    return words
