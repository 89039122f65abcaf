"""The terms of a guarantee in words, as `doppler-hf verify` and the model card show them."""

from doppler_hf.privacy.accounting.attack import attack_in_words, percent
from doppler_hf.privacy.ledger.ledger import PrivacyLedger

_NEARLY = 0.005  # a difference of ε, relative, that no one is told of


def terms_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the mechanism and its numbers, each with its name."""
    statement, first = ledger.statement, ledger.entries[0]
    sigma, of_loss = f"{statement.noise_multiplier:.4g}", statement.loss_noise_multiplier
    if of_loss is not None:
        joint = f"{statement.effective_noise_multiplier:.4g}"
        sigma += f" of the gradient; with the loss σ₀ = {joint}, which is accounted"
    views, cap = statement.augmentation_multiplicity, statement.max_examples_per_unit
    clipped = f"{statement.clipping}, {statement.clipping_granularity}"
    clipped += "" if views == 1 else f", the mean gradient over {views} views of an example"
    clipped += ", the mean gradient over a unit's examples" if statement.clip_unit_mean else ""
    train_loss = {"none": "not reported", "raw": "logged as it is, NOT PRIVATE"}
    if statement.train_loss == "private":
        train_loss["private"] = f"private: clipped to {statement.per_sample_max_loss:g}, noise multiplier {of_loss:.4g}"
    return [
        ("mechanism", first["mechanism"]),
        ("neighbouring data sets", first["neighbouring_relation"]),
        ("unit of privacy", statement.unit_of_privacy + ("" if cap is None else f", at most {cap} of them in a draw")),
        ("number of units N", f"{statement.num_units:,} ({first['role_of_num_units']})"),
        ("expected batch size B", f"{statement.expected_batch_size:,}"),
        ("noise multiplier σ", sigma),
        *(
            (f"accounted: σ₀, sampling rate q in {steps:,} steps", f"{joint:.6g}, {rate:.6g}")
            for plan in ledger.plans
            for joint, rate, steps, *_ in plan
        ),
        ("noise over time", statement.noise_shape_in_words),
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
        f"{statement.unit_of_privacy}, by the {statement.accountant} accountant. "
        + " ".join(filter(None, (of_fixed_length_in_words(ledger), earlier_in_words(ledger), meaning_in_words(ledger))))
    )


def of_fixed_length_in_words(ledger: PrivacyLedger) -> str:
    """Return why less than was planned does not cost less, if less was run; and what it would have cost."""
    fixed = ledger.epsilon_of_fixed_length()
    if not fixed < (1.0 - _NEARLY) * ledger.epsilon():
        return ""
    return (
        f"The ε of the whole plan holds, since results may have chosen what was run. It would be {fixed:.4g}, had the "
        f"length of {ledger.steps_run:,} steps{' and all terms' if len(ledger.plans) > 1 else ''} been fixed beforehand."
    )


def older_rule_in_words(ledger: PrivacyLedger) -> str:
    """Return why ε is larger than a ledger of version 0.3.0 states, if it is."""
    stated = ledger.stated_epsilon
    if stated is None or not stated < (1.0 - _NEARLY) * ledger.epsilon():
        return ""
    return (
        f"The ledger itself states ε = {stated:.4g}. The version that wrote it counted a run that had ended and was trained "
        "again from a checkpoint as one plan. Results may have led to the repetition, so each is now a plan of its own, and "
        f"ε is {ledger.epsilon():.4g}."
    )


def earlier_in_words(ledger: PrivacyLedger) -> str:
    """Return what other trainings had spent on the weights, and the sum with this one; empty if none is known."""
    if ledger.earlier is None:
        return ""
    before = [f"{spent.epsilon:.4g}" for spent in ledger.earlier_trainings.values()]
    trainings = "one other private training" if len(before) == 1 else f"{len(before)} other private trainings"
    # What this training costs is said before its first step, too.
    epsilon, delta = ledger.earlier.epsilon + ledger.planned_epsilon, ledger.spent.delta
    terms = " + ".join([*before, f"{ledger.planned_epsilon:.4g}"])
    return (
        f"These weights already went through {trainings}. If all of them used the same data, they cost ε = {terms} = "
        f"{epsilon:.4g} together, at δ = {delta:.3g}."
    )


def meaning_in_words(ledger: PrivacyLedger) -> str:
    """Return what ε of a private training means to an attacker, in one sentence."""
    return attack_in_words(ledger.trade_off(), epsilon=ledger.epsilon(), record=record_in_words(ledger))


def record_in_words(ledger: PrivacyLedger) -> str:
    """Return what a unit of privacy is called."""
    return "training record" if ledger.statement.unit_of_privacy == "one example" else "user"


def attacks_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the best rates of a membership attack, each with its name; none if the training was not private."""
    if ledger.why_not_private is not None:
        return []
    best = ledger.trade_off()
    rates = (percent(best.true_positive_rate(rate)) for rate in (0.01, 0.001))
    return [
        ("no attack exceeds, at 1 %, 0.1 % false positives", f"{', '.join(rates)} true positives"),
        ("no attack exceeds the advantage, TPR − FPR", percent(best.advantage)),
    ]


def account_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the terms, what was spent under them, and the software that did it, each with its name."""
    last = ledger.runs[-1]
    exact = "" if last.is_closed else ", counted ahead: the training was interrupted"
    return [
        *terms_in_words(ledger),
        (f"ε by {ledger.statement.accountant}", f"{ledger.epsilon():.4g}"),
        *attacks_in_words(ledger),
        ("steps", f"{ledger.steps_run:,} run, {ledger.statement.steps_planned:,} planned{exact}"),
        ("software", ", ".join(f"{name} {version}" for name, version in last.versions.items())),
    ]
