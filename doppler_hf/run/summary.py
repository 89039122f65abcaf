"""The table that a private run prints before its first step."""

import math
from collections import Counter
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import PrivacyLedger, PrivacyStatement
from doppler_hf.run.plan import averaged_noise
from doppler_hf.run.private_run import PrivateRun

# See recipes/results/few-examples.md.
DROWNED: Final = 0.005


def print_summary(
    run: PrivateRun, *, model: Any, first_step: int, optimizer_words: str, rate_words: str, filter_words: str
) -> None:
    """Print the mechanism, its ε, the optimizer, its rate and the filter of a run from `first_step` on, as a table."""
    assert run.ledger is not None
    statement, ledger = run.statement, run.ledger
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    target = "" if statement.target_epsilon is None else f" (target {statement.target_epsilon:g})"
    mend = " (report_train_loss='private' adds noise, 'none' leaves it out)" if statement.train_loss == "raw" else ""
    rows = (
        ("unit of privacy", statement.unit_in_words),
        ("units N", f"{statement.num_units:,}"),
        ("expected batch size B", f"{statement.expected_batch_size:,}"),
        ("sampling rate q", f"{statement.sample_rate:.4g}"),
        ("steps T", f"{statement.steps_planned:,}" + (f", resumed at {first_step:,}" if first_step else "")),
        ("noise multiplier σ", statement.noise_multiplier_in_words),
        ("noise over time", run.noise_in_words),
        ("noise source", statement.noise_source),
        ("clip norm C", statement.clipping_in_words),
        ("noise per coordinate", f"{run.settled_noise_std:.3g}"),
        ("noise of the average", averaged_in_words(statement, num_trained=trainable)),
        ("at the end", epsilon_in_words(ledger, further_steps=run.affordable_steps) + target),
        ("δ", f"{statement.target_delta:.3g}"),
        ("training loss", statement.train_loss_in_words + mend),
        ("optimizer", optimizer_words),
        ("learning rate", rate_words),
        ("filter", filter_words),
        ("trainable parameters", f"{trainable:,} of {sum(p.numel() for p in parameters):,}"),
    )
    table = Table(title="Private training", show_header=False)
    for row in rows:
        table.add_row(*row)
    for how, number in Counter(run.fallbacks.values()).items():
        first = next(name for name, way in run.fallbacks.items() if way == how)
        table.add_row(f"without a rule: {number}, such as" if number > 1 else "without a rule", f"{first} ({how})")
    Console().print(table)


def averaged_in_words(statement: PrivacyStatement, *, num_trained: int) -> str:
    """Return the noise of the average of all gradients in units of C, and what to do where it drowns them.

    That is where a classifier of images learnt little, if it is also longer than the average itself can be: of 62 weights
    a linear classifier learns from less.
    """
    shape, sizes = NoiseShape.parse(statement.noise_shape), (statement.expected_batch_size, statement.steps_planned)
    noise = averaged_noise(statement.noise_multiplier, shape, batch_size=sizes[0], steps=sizes[1])
    is_drowned = noise > DROWNED and noise * math.sqrt(num_trained) > 1.0
    mend = ": little may be learnt; more epochs, more examples or a larger ε make it less" if is_drowned else ""
    return f"{noise:.2g} C{mend}"


def epsilon_in_words(ledger: PrivacyLedger, *, further_steps: int = 0) -> str:
    """Return ε so far or after `further_steps` more, and by which accountant."""
    epsilon, why_not = ledger.epsilon(further_steps=further_steps), ledger.why_not_private
    shown = "∞" if math.isinf(epsilon) else f"{epsilon:.4g} by {ledger.statement.accountant}"
    return f"ε = {shown}" + ("" if why_not is None else f": NOT PRIVATE, {why_not}")
