"""Print a private run's lines: six before its first step, all its terms with log_level="info", and what it has spent."""

import contextlib
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers.integrations import TensorBoardCallback

from doppler_hf.filters import NoiseShape
from doppler_hf.filters.noise_shape import DROWNED, in_units_of_c
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.accounting.accounting import without_partial_round
from doppler_hf.privacy.ledger.terms import (
    earlier_in_words,
    early_stop_in_words,
    guarantee_in_words,
    terms_in_words,
    total_of,
    why_not_private,
)
from doppler_hf.run.interruptions import reason_in_words
from doppler_hf.run.optimizer import optimizer_in_words
from doppler_hf.run.precision import computes_in_bf16
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.reporting.logged_loss import copies_of_console, folder_of, local_callbacks, noise_of_loss
from doppler_hf.run.reporting.published_results import MAJORITY, MEAN_LABEL, MOST_FREQUENT_PREDICTED, MOST_FREQUENT_RIGHT
from doppler_hf.run.resuming.checkpoints import step_of_checkpoint, whole_checkpoint
from doppler_hf.training_args import DopplerTrainingArguments

# At ε = 5, the definition alone allows an attack to recognise 99 % of the records with 1 % false positives. Usual are 1 to
# 8.
LARGEST_EPSILON: Final = 10.0
# The run notes a logged loss with more noise than this, in units of its bound, or a quarter of an untrained model's loss.
_NOISY: Final = 0.125
_ONE_ANSWER: Final = 0.95  # with a larger share of equal answers, a model seems not to read its inputs
_LITTLE: Final = 0.1  # a model has learnt little if it has learnt less than this share of what it can learn
# torchrun, or `accelerate launch` with one process, sets these variables for the script.
_OF_LAUNCHERS: Final = frozenset({"WORLD_SIZE", "ACCELERATE_USE_CPU"})
_OF_A_PERSON: Final = re.compile("user|patient|person|customer|client|author|speaker|sample_mapping")  # columns


def print_start(
    run: PrivateRun,
    args: DopplerTrainingArguments,
    *,
    model: Any,
    notes: Sequence[str],
    callbacks: Sequence[Any],
) -> None:
    """Print the guarantee, data, noise and trained parameters of a run, and its warnings."""
    assert run.ledger is not None
    statement, ledger = run.statement, run.ledger
    who = statement.noun
    shape = "white" if statement.groups == 1 else f"banded, {statement.groups} steps"
    chosen = " (auto)" if args.noise_shape == "auto" else ""
    resumed = f"; resumed at step {run.previous.step:,}" if run.previous.step else ""
    # A launcher may start an unexpected number of processes: `accelerate launch --num_processes 2 --cpu` starts only one.
    processes = ""
    if args.world_size > 1 or not _OF_LAUNCHERS.isdisjoint(os.environ):
        processes = f"; {args.world_size} process{'es' * (args.world_size > 1)}"
    sizes = {parameter: parameter.numel() for parameter in model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    kinds = {config.peft_type.value for config in getattr(model, "peft_config", {}).values()}
    adapters = f"; adapters: {', '.join(sorted(kinds))}" if kinds else ""
    noise_shape, steps = NoiseShape.parse(statement.noise_shape), statement.steps_planned
    batch, sigma = statement.expected_batch_size, statement.effective_noise_multiplier
    noise = statement.noise_multiplier * noise_shape.std_of_average(steps) / batch
    watched = [*low_signal_note(noise, num_trained=trained), *notes]
    whole = without_partial_round(steps, sample_rate=statement.sample_rate, groups=statement.groups)
    if args.max_steps > 0 and whole < steps:
        watched.append(
            f"max_steps={whole} would need less noise, because only some {who}s take part in the last {steps - whole} steps"
        )
    if args.privacy_unit_column is None:
        columns = [name for name in getattr(run.train_dataset, "column_names", None) or () if _OF_A_PERSON.search(name)]
        watched += [
            f"ε protects one row. If the column {name!r} says to whom a row belongs, set privacy_unit_column={name!r}"
            for name in columns
            if not any(f"privacy_unit_column={name!r}" in note for note in notes)  # of a column whose values repeat
        ]
    if why_not_private(ledger) is None and total_of(ledger, epsilon=ledger.planned_epsilon).epsilon > LARGEST_EPSILON:
        watched.insert(0, f"ε above {LARGEST_EPSILON:g} protects little; usual values are 1 to 8")
    if args.get_warmup_steps(steps) >= steps:
        watched.append(
            f"the warmup covers all {steps} steps, so the learning rate never reaches its peak: shorten warmup_steps"
        )
    # Users who switched saving off know it, but Transformers' default of 500 steps is more than most private runs have.
    if args.save_strategy != "no" and first_checkpoint(args, run) >= steps:
        watched.append(
            f"no checkpoint is saved before the end of the {steps} steps, so if the process is killed without warning, "
            f"the model is lost and its ε is spent: set save_strategy='steps' and save_steps={max(1, steps // 4)}"
        )
    if args.save_strategy != "no" and args.save_only_model:
        watched.append(
            "save_only_model=True leaves optimizer, filter and schedule out of checkpoints, so a resumed run begins them "
            "anew: leave it out to continue after an interruption"
        )
    lengths = run.sampler.lengths
    is_rounded = computes_in_bf16(model, run.mixed_precision) and not run.pads_each_row_alone
    may_differ = not run.probe.are_of_one_length if lengths is None else lengths.min() < lengths.max()
    if is_rounded and may_differ:
        how = (
            "rows have unknown lengths and are padded to the longest row of their micro-batch. Pad"
            if lengths is None
            else "the data_collator pads each row to the longest row of its micro-batch. Give it an attribute "
            "pad_to_multiple_of that it follows, pad"
        )
        watched.append(f"ε does not cover rounding in bf16: {how} all rows to one length, or use float32")
    if statement.train_loss == "private" and statement.loss_noise_multiplier:
        watched += loss_noise_notes(statement, args, steps_per_epoch=run.sampler.steps_per_epoch)
    if statement.train_loss == "raw":
        watched = [*raw_loss_notes(callbacks, output_dir=args.output_dir), *watched]
    lines = (
        ("privacy", guarantee_in_words(ledger, epsilon=ledger.planned_epsilon)),
        ("data", f"{statement.num_units:,} {who}s; {steps:,} random batches of {batch:,} on average{resumed}{processes}"),
        ("noise", f"noise multiplier {sigma:.4g}; shape: {shape}{chosen}; filter: {run.words['filter']}"),
        ("learning rate", f"{run.words['rate']}; optimizer: {optimizer_in_words(args)}"),
        ("trained", f"{trained:,} of {sum(sizes.values()):,} parameters{adapters}"),
        *(("warning" if number == 0 else "", note) for number, note in enumerate(watched)),
    )
    # Begin with an empty line, since the current line may hold Transformers' progress bar.
    print("", *(f"{name:<14} {said}" for name, said in lines), sep="\n")
    if args.get_process_log_level() <= logging.INFO:
        of_step = run.settled_noise_std / statement.per_sample_max_grad_norm
        noises = [
            ("noise per coordinate of a step's gradient", in_units_of_c(of_step)),
            ("noise per coordinate of the average gradient", in_units_of_c(noise)),
        ]
        # Privacy: a budget of tokens may follow from the longest record, so only limits that the arguments set are shown.
        if run.sampler.cut.max_rows is not None:
            noises.append(("micro-batches", f"up to {run.sampler.cut.most_rows(None):,} rows"))
        if statement.train_loss == "private":
            noises.append(("noise of the training loss of a step", f"{noise_of_loss(statement, steps=1):.2g}"))
            if args.per_sample_max_loss is None:
                noises.append(
                    ("bound of the training loss", f"{statement.per_sample_max_loss:.4g} = {run.loss_bound.words}")
                )
        one_of_each = {how: name for name, how in run.engine.fallbacks.items()}
        slow = (("layers without a fast rule, such as", f"{name} ({how})") for how, name in one_of_each.items())
        print(*(f"{name}: {said}" for name, said in (*terms_in_words(ledger), *noises, *slow)), sep="\n")


def print_end(ledger: PrivacyLedger, args: DopplerTrainingArguments, *, logs: Sequence[Mapping[str, float]]) -> bool:
    """Print what a run has spent, where its ledger is, and whether the last evaluation shows that it learnt little.

    Returns:
        Whether it printed that the run learnt little, which is said once.
    """
    spent = guarantee_in_words(ledger, epsilon=ledger.epsilon())
    in_steps = f" in {ledger.steps_run:,} steps" if ledger.earlier is None else f"; this run made {ledger.steps_run:,} steps"
    print(
        " ".join(
            filter(
                None,
                (
                    f"Privacy spent: {spent}{in_steps}.",
                    early_stop_in_words(ledger),
                    earlier_in_words(ledger),
                ),
            )
        ),
        f"The ledger is {args.output_dir}/{LEDGER_NAME}. Check it with `doppler-hf verify {args.output_dir}`, which also "
        "explains what ε means.",
        sep="\n",
    )
    return print_if_not_learnt(
        next((log for log in reversed(logs) if not {"eval_accuracy", "eval_loss"}.isdisjoint(log)), {})
    )


def print_if_not_learnt(metrics: Mapping[str, float]) -> bool:
    """Print if an evaluation is not clearly better than always predicting one class, the mean label, or one answer.

    Returns:
        Whether it printed that.
    """
    accuracy, majority = metrics.get("eval_accuracy", 1.0), metrics.get(f"eval_{MAJORITY}", -math.inf)
    loss, of_mean = metrics.get("eval_loss", 0.0), metrics.get(f"eval_{MEAN_LABEL}", math.inf)
    predicted, right = (metrics.get(f"eval_{name}", 0.0) for name in (MOST_FREQUENT_PREDICTED, MOST_FREQUENT_RIGHT))
    if predicted >= _ONE_ANSWER and right < predicted:
        words = (
            f"most frequent answer is given to {100 * predicted:.3g} % of the rows, while no single answer is right for "
            f"more than {100 * right:.3g} %,"
        )
    elif accuracy - majority < _LITTLE * (1.0 - majority) or accuracy <= majority:
        words = f"accuracy ({accuracy:.3g}) is not clearly above the share of the majority class ({majority:.3g})"
    elif loss > (1.0 - _LITTLE) * of_mean:
        words = f"loss ({loss:.3g}) is not clearly below the loss of always predicting the mean label ({of_mean:.3g})"
    else:
        return False
    print(
        f"The model may have learnt little: its {words} in the evaluation set. If you have set learning_rate, leave it out. "
        "Larger batches, more epochs, more data, a larger ε, or a pretrained model with LoRA may help, too. To find out "
        "whether privacy is the reason, train on public data with disable_dp=True."
    )
    return True


def print_interruption(ledger: PrivacyLedger, args: DopplerTrainingArguments, *, error: BaseException | None = None) -> None:
    """Print what a run that stopped early has spent, and how to continue."""
    if ledger.steps_run == 0 and ledger.why_not_private is None:
        print(f"\n{reason_in_words(error)} before the first step. No ε was spent.")
        return
    last: str | bool | None = None
    with contextlib.suppress(ValueError):  # no checkpoint may be complete
        last = whole_checkpoint(True, output_dir=args.output_dir)
    spent = guarantee_in_words(ledger, epsilon=ledger.epsilon())
    again = ""
    if (lost := ledger.steps_run - step_of_checkpoint(last if isinstance(last, str) else None)) > 0:
        early = ", so the run will end that many steps early." if args.target_epsilon is not None else "."
        again = f" The {lost:,} step{'s' * (lost > 1)} after it will be repeated and count twice{early}"
    sooner = "save checkpoints with" if args.save_strategy == "no" else "save earlier, with a smaller save_steps and"
    lines = (
        f"\n{reason_in_words(error)}. Privacy spent: {spent}, recorded in {args.output_dir}/{LEDGER_NAME}.",
        f"To continue from {last}, call trainer.train(resume_from_checkpoint=True)." + again
        if isinstance(last, str)
        else f"There is no checkpoint, so a new run adds its ε to this ε. Next time, {sooner} save_strategy='steps'.",
    )
    print(*lines)


def first_checkpoint(args: DopplerTrainingArguments, run: PrivateRun) -> float:
    """Return after how many steps the arguments save the first checkpoint, or infinity if they save none."""
    if args.save_strategy == "steps":
        every = args.save_steps if args.save_steps >= 1 else args.save_steps * run.statement.steps_planned
        return math.ceil(every)
    every = args.eval_steps or math.inf
    return {"epoch": run.sampler.steps_per_epoch, "best": every}.get(args.save_strategy, math.inf)


def loss_noise_notes(statement: PrivacyStatement, args: DopplerTrainingArguments, *, steps_per_epoch: int) -> list[str]:
    """Return a note on the noise of the logged loss if a single value says little about the loss, and what helps."""
    planned, largest = statement.steps_planned, statement.per_sample_max_loss
    assert largest is not None
    if args.logging_strategy == "no":
        return []
    every = args.logging_steps if args.logging_steps >= 1 else math.ceil(args.logging_steps * planned)
    every = min(int(every) if args.logging_strategy == "steps" else steps_per_epoch, planned)
    noise, of_step = noise_of_loss(statement, steps=every), noise_of_loss(statement, steps=1)
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


def raw_loss_notes(callbacks: Sequence[Any], *, output_dir: str) -> list[str]:
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
