"""The terms of a guarantee in words, as `doppler-hf verify` and the model card show them."""

from typing import Final

from doppler_hf.privacy.accounting.attack import attack_in_words, percent
from doppler_hf.privacy.ledger.ledger import PrivacyLedger

HOW_COMPUTED: Final = "computed from privacy loss distributions"
_NEARLY = 0.005  # Smaller relative differences of ε are not mentioned.


def terms_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the mechanism and its numbers, each with its label."""
    statement, first = ledger.statement, ledger.entries[0]
    sigma, of_loss = f"{statement.noise_multiplier:.4g}", statement.loss_noise_multiplier
    if of_loss is not None:
        joint = f"{statement.effective_noise_multiplier:.4g}"
        sigma += f" for the gradient; σ₀ = {joint} for gradient and loss together, which determines ε"
    views, cap = statement.augmentation_multiplicity, statement.max_examples_per_unit
    clipped = f"{statement.clipping}, {statement.clipping_granularity}"
    clipped += "" if views == 1 else f", the mean gradient over {views} views of a record"
    clipped += ", the mean gradient over the records of a user" if statement.clip_unit_mean else ""
    train_loss = {"none": "not reported", "raw": "logged without noise, NOT PRIVATE"}
    if statement.train_loss == "private":
        train_loss["private"] = f"private: clipped to {statement.per_sample_max_loss:g}, noise multiplier {of_loss:.4g}"
    return [
        ("mechanism", first["mechanism"]),
        ("neighbouring data sets", first["neighbouring_relation"].replace("unit", noun_in_words(ledger))),
        ("ε covers", unit_in_words(ledger) + ("" if cap is None else f", at most {cap} of them in a batch")),
        (f"number of {noun_in_words(ledger)}s N", f"{statement.num_units:,} ({first['role_of_num_units']})"),
        ("expected batch size B", f"{statement.expected_batch_size:,}"),
        ("noise multiplier σ", sigma),
        *(
            (f"ε computed for {steps:,} steps", f"σ₀ = {joint:.6g}, sample rate q = {rate:.6g}")
            for plan in ledger.plans
            for joint, rate, steps, *_ in plan
        ),
        ("noise shape", statement.noise_shape_in_words),
        ("clip norm C", f"{statement.per_sample_max_grad_norm:g} ({clipped})"),
        ("training loss", train_loss[statement.train_loss]),
        ("noise source", statement.noise_source),
        ("δ", f"{statement.target_delta:.4g}"),
        ("target ε", "none" if statement.target_epsilon is None else f"{statement.target_epsilon:g}"),
        ("restarts", ", ".join(f"at step {step:,}" for step in ledger.restarts) or "none"),
    ]


def claim_in_words(ledger: PrivacyLedger) -> str:
    """Return what is guaranteed, and what that means."""
    statement = ledger.statement
    if ledger.why_not_private is not None:
        return f"Not differentially private: {ledger.why_not_private}."
    return (
        f"Trained with ({ledger.epsilon():.4g}, {statement.target_delta:.3g})-differential privacy for "
        f"{unit_in_words(ledger)} (adding or removing it). ε was {HOW_COMPUTED}. "
        + " ".join(filter(None, (early_stop_in_words(ledger), earlier_in_words(ledger), meaning_in_words(ledger))))
    )


def early_stop_in_words(ledger: PrivacyLedger) -> str:
    """Return why a run that stopped early costs the ε of its whole plan, and what it would have cost otherwise.

    The text is empty if the run did not stop early.
    """
    fixed = ledger.epsilon_of_fixed_length()
    if not fixed < (1.0 - _NEARLY) * ledger.epsilon():
        return ""
    return (
        "The ε of the whole plan counts, because intermediate results may have decided when the run stopped. ε would be "
        f"{fixed:.4g} if the length of {ledger.steps_run:,} steps{' and all terms' if len(ledger.plans) > 1 else ''} had "
        "been fixed beforehand."
    )


def earlier_rule_in_words(ledger: PrivacyLedger) -> str:
    """Return why ε is larger than a ledger of version 0.3.0 states, or an empty text if it is not."""
    stated = ledger.stated_epsilon
    if stated is None or not stated < (1.0 - _NEARLY) * ledger.epsilon():
        return ""
    return (
        f"The ledger itself states ε = {stated:.4g}. The version that wrote it counted a finished run and its repetition "
        "from a checkpoint as one plan. Results may have led to the repetition, so each now counts as a plan of its own, "
        f"and ε is {ledger.epsilon():.4g}."
    )


def earlier_in_words(ledger: PrivacyLedger) -> str:
    """Return what earlier training runs spent on these weights, and the sum with this one; empty if none is known."""
    if ledger.earlier is None:
        return ""
    before = [f"{spent.epsilon:.4g}" for spent in ledger.earlier_trainings.values()]
    trainings = "one other private training run" if len(before) == 1 else f"{len(before)} other private training runs"
    # The planned ε is shown, because this text appears before the first step too.
    epsilon, delta = ledger.earlier.epsilon + ledger.planned_epsilon, ledger.spent.delta
    terms = " + ".join([*before, f"{ledger.planned_epsilon:.4g}"])
    return (
        f"These weights already went through {trainings}. If all of them used the same data, they cost ε = {terms} = "
        f"{epsilon:.4g} in total, at δ = {delta:.3g}."
    )


def meaning_in_words(ledger: PrivacyLedger) -> str:
    """Return what the ε of a private run means for an attacker, in one sentence."""
    return attack_in_words(ledger.trade_off(), epsilon=ledger.epsilon(), record=record_in_words(ledger))


def record_in_words(ledger: PrivacyLedger) -> str:
    """Return "training record" or "user": what an attacker tries to recognise."""
    return "training record" if noun_in_words(ledger) == "record" else "user"


def noun_in_words(ledger: PrivacyLedger) -> str:
    """Return "record" or "user": what N counts."""
    # A ledger that covers single rows says "one example" in its file, whose format is fixed.
    return "record" if ledger.statement.unit_of_privacy == "one example" else "user"


def unit_in_words(ledger: PrivacyLedger) -> str:
    """Return what ε covers: one record, or one user and how users are told apart."""
    unit = ledger.statement.unit_of_privacy
    return "one record" if noun_in_words(ledger) == "record" else f"one user ({unit.replace('all examples', 'all records')})"


def not_covered_in_words(ledger: PrivacyLedger) -> list[str]:
    """Return what ε does not cover; a ledger says "units" and "examples" in its file, whose format is fixed."""
    lines = (line.replace("number of units", "number of records (or users)") for line in ledger.not_covered)
    return [line.replace("training examples", "training records") for line in lines]


def attacks_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return bounds on the success of any membership attack, each with its label; none if the run was not private."""
    if ledger.why_not_private is not None:
        return []
    best = ledger.trade_off()
    first, second = (percent(best.true_positive_rate(rate)) for rate in (0.01, 0.001))
    return [
        ("any attack with 1 % false positives", f"at most {first} true positives"),
        ("any attack with 0.1 % false positives", f"at most {second} true positives"),
        ("any attack's advantage (TPR − FPR)", f"at most {percent(best.advantage)}"),
    ]


def account_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the terms, the ε spent, the steps and the software of a run, each with its label."""
    last = ledger.runs[-1]
    exact = "" if last.is_closed else " (the run was interrupted; steps are counted in advance)"
    return [
        *terms_in_words(ledger),
        ("ε", f"{ledger.epsilon():.4g}, {HOW_COMPUTED}"),
        *attacks_in_words(ledger),
        ("steps", f"{ledger.steps_run:,} of {ledger.statement.steps_planned:,} planned{exact}"),
        ("software", ", ".join(f"{name} {version}" for name, version in last.versions.items())),
    ]
