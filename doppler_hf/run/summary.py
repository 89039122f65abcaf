"""What a private run prints: six lines before its first step, all its terms with log_level="info", and what it has spent."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.batching.columns import labels_of
from doppler_hf.privacy.ledger.terms import terms_in_words
from doppler_hf.run.optimizer import optimizer_in_words
from doppler_hf.run.plan import averaged_noise
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.training_args import DopplerTrainingArguments

# See recipes/results/few-examples.md.
DROWNED: Final = 0.005
_RAW_LOSS: Final = "the logged training loss is not private: report_train_loss='private' adds noise, 'none' leaves it out"


def print_start(
    run: PrivateRun,
    args: DopplerTrainingArguments,
    *,
    model: Any,
    first_step: int,
    rate_words: str,
    filter_words: str,
    notes: Sequence[str],
) -> None:
    """Print what a run from `first_step` on guarantees, takes and trains, and what to watch for."""
    assert run.ledger is not None
    statement, ledger = run.statement, run.ledger
    who = "record" if args.privacy_unit_column is None else "user"
    turns = "" if statement.groups == 1 else f", from {statement.groups} groups in turn"
    shape = "independent in each step" if statement.groups == 1 else f"partly cancels over {statement.groups} steps"
    chosen = " (auto)" if args.noise_shape == "auto" else ""
    resumed = f"; resumed at step {first_step:,}" if first_step else ""
    sizes = {parameter: parameter.numel() for parameter in model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    kinds = {config.peft_type.value for config in getattr(model, "peft_config", {}).values()}
    adapters = f"; adapters: {', '.join(sorted(kinds))}" if kinds else ""
    watched = [_RAW_LOSS] * (statement.train_loss == "raw") + drowned(statement, num_trained=trained) + [*notes]
    lines = (
        ("privacy", f"at the end {spent_in_words(ledger, args, further_steps=run.affordable_steps)}"),
        (
            "data",
            f"{statement.num_units:,} {who}s; {statement.steps_planned:,} Poisson-sampled batches of "
            f"{statement.expected_batch_size:,} on average{turns}{resumed}",
        ),
        ("noise", f"noise multiplier {statement.effective_noise_multiplier:.4g}, {shape}{chosen}; filter: {filter_words}"),
        ("learning rate", f"{rate_words}; optimizer: {optimizer_in_words(args)}"),
        ("trained", f"{trained:,} of {sum(sizes.values()):,} parameters{adapters}"),
        *(("watch for" if number == 0 else "", note) for number, note in enumerate(watched)),
    )
    # The first line may hold the host's progress bar.
    print("", *(f"{name:<14} {words}" for name, words in lines), sep="\n")
    if args.get_process_log_level() > logging.INFO:
        return
    table = Table(title="Private training", show_header=False)
    for row in terms_in_words(ledger):
        table.add_row(*row)
    table.add_row("noise per coordinate", f"{run.settled_noise_std:.3g}")
    table.add_row("noise of the average", f"{averaged(statement):.2g} C")
    for how, number in Counter(run.fallbacks.values()).items():
        first = next(name for name, way in run.fallbacks.items() if way == how)
        table.add_row(f"without a rule: {number}, such as" if number > 1 else "without a rule", f"{first} ({how})")
    Console().print(table)


def print_end(ledger: PrivacyLedger, args: DopplerTrainingArguments, *, logs: Sequence[Any], evaluated: Any) -> None:
    """Print what a run has spent, where its ledger is, and whether the last of its logs shows that nothing was learnt.

    Args:
        ledger: The ledger, closed.
        args: The arguments.
        logs: The host's log history.
        evaluated: The data set of the last evaluation, or None.
    """
    print(
        f"Privacy spent: {spent_in_words(ledger, args)} in {ledger.steps_run:,} steps.\n"
        f"The ledger is in {args.output_dir}/{LEDGER_NAME}: check it with `doppler-hf verify {args.output_dir}`. What it "
        "means: docs/start/dp-in-ten-minutes.md."
    )
    accuracy = next((log["eval_accuracy"] for log in reversed(logs) if "eval_accuracy" in log), None)
    labels = None if accuracy is None else labels_of(evaluated)
    if labels is not None and len(labels):
        share = np.unique(labels, return_counts=True)[1].max() / len(labels)
        # Within a standard error.
        if accuracy <= share + math.sqrt(share * (1 - share) / len(labels)):
            print(
                f"The model may not have learnt: its accuracy, {accuracy:.3g}, is not above the share of the most frequent "
                f"class of the evaluation set, {share:.3g}. See docs/start/troubleshooting.md#it-does-not-learn."
            )


def averaged(statement: PrivacyStatement) -> float:
    """Return the noise of the average of all gradients, in units of C."""
    shape, sizes = NoiseShape.parse(statement.noise_shape), (statement.expected_batch_size, statement.steps_planned)
    return averaged_noise(statement.noise_multiplier, shape, batch_size=sizes[0], steps=sizes[1])


def drowned(statement: PrivacyStatement, *, num_trained: int) -> list[str]:
    """Return what to do where the noise of the average of all gradients drowns them; nothing where it does not.

    That is where a classifier of images learnt little, if it is also longer than the average itself can be: of 62 weights
    a linear classifier learns from less.
    """
    noise = averaged(statement)
    if noise <= DROWNED or noise * math.sqrt(num_trained) <= 1.0:
        return []
    return [f"little may be learnt, as the noise of the average gradient is {noise:.2g} C: take more epochs, records or ε"]


def spent_in_words(ledger: PrivacyLedger, args: DopplerTrainingArguments, *, further_steps: int = 0) -> str:
    """Return ε so far or after `further_steps` more, δ, the accountant, and what is protected."""
    epsilon, statement = ledger.epsilon(further_steps=further_steps), ledger.statement
    column = args.privacy_unit_column
    who = "one record" if column is None else f"one user (all records with the same {column!r})"
    if ledger.why_not_private is not None:
        return f"ε = {'∞' if math.isinf(epsilon) else f'{epsilon:.4g}'}: NOT PRIVATE, {ledger.why_not_private}"
    return f"ε = {epsilon:.4g}, δ = {statement.target_delta:.3g} for {who} (accountant: {statement.accountant})"
