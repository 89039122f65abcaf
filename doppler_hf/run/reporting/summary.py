"""Print a private run's lines: six before its first step, all its terms with log_level="info", and what it has spent."""

import contextlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from doppler_hf.filters.noise_shape import in_units_of_c
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.terms import (
    earlier_in_words,
    early_stop_in_words,
    guarantee_in_words,
    terms_in_words,
)
from doppler_hf.run.interruptions import reason_in_words
from doppler_hf.run.optimizer import optimizer_in_words
from doppler_hf.run.planning.plan import noise_of_average
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.reporting.logged_loss import noise_of_loss
from doppler_hf.run.reporting.published_results import MAJORITY, MEAN_LABEL, MOST_FREQUENT_PREDICTED, MOST_FREQUENT_RIGHT
from doppler_hf.run.reporting.start_warnings import free_bytes, start_warnings
from doppler_hf.run.resuming.checkpoints import step_of_checkpoint, whole_checkpoint
from doppler_hf.training_args import DopplerTrainingArguments

_ONE_ANSWER: Final = 0.95  # with a larger share of equal answers, a model seems not to read its inputs
_LITTLE: Final = 0.1  # a model has learnt little if it has learnt less than this share of what it can learn
_FULL: Final = 2**24  # bytes that are left when a larger file could not be written
# torchrun, or `accelerate launch` with one process, sets these variables for the script.
_OF_LAUNCHERS: Final = frozenset({"WORLD_SIZE", "ACCELERATE_USE_CPU"})


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
    units = f"{statement.num_units:,} {statement.noun}s"
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
    steps, batch, sigma = statement.steps_planned, statement.expected_batch_size, statement.effective_noise_multiplier
    noise = noise_of_average(statement, steps=steps)
    warned = start_warnings(run, args, model=model, noise=noise, num_trained=trained, notes=notes, callbacks=callbacks)
    lines = (
        ("privacy", guarantee_in_words(ledger, epsilon=ledger.planned_epsilon)),
        ("data", f"{units}; {steps:,} random batches of {batch:,} on average{resumed}{processes}"),
        ("noise", f"noise multiplier {sigma:.4g}; shape: {shape}{chosen}; filter: {run.words['filter']}"),
        ("learning rate", f"{run.words['rate']}; optimizer: {optimizer_in_words(args)}"),
        ("trained", f"{trained:,} of {sum(sizes.values()):,} parameters{adapters}"),
        *(("warning" if number == 0 else "", note) for number, note in enumerate(warned)),
    )
    # Begin with an empty line, since the current line may hold Transformers' progress bar.
    print("", *(f"{name:<14} {said}" for name, said in lines), sep="\n")
    if args.get_process_log_level() <= logging.INFO:
        _print_terms(run, args, noise=noise)


def _print_terms(run: PrivateRun, args: DopplerTrainingArguments, *, noise: float) -> None:
    """Print all terms of a run, given the noise of its average gradient in units of C."""
    assert run.ledger is not None
    statement = run.statement
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
            noises.append(("bound of the training loss", f"{statement.per_sample_max_loss:.4g} = {run.loss_bound.words}"))
    one_of_each = {how: name for name, how in run.engine.fallbacks.items()}
    slow = (("layers without a fast rule, such as", f"{name} ({how})") for how, name in one_of_each.items())
    print(*(f"{name}: {said}" for name, said in (*terms_in_words(run.ledger), *noises, *slow)), sep="\n")


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
    free = free_bytes(args.output_dir)
    is_full = free is not None and free < _FULL
    lines = (
        f"\n{reason_in_words(error)}. Privacy spent: {spent}, recorded in {args.output_dir}/{LEDGER_NAME}.",
        f"To continue from {last}, call trainer.train(resume_from_checkpoint=True)." + again
        if isinstance(last, str)
        else f"There is no checkpoint, so a new run adds its ε to this ε. Next time, {sooner} save_strategy='steps'.",
        *([f"The disk of {args.output_dir} is full: free some space before you go on."] if is_full else []),
    )
    print(*lines)
