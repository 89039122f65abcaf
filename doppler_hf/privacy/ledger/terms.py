"""The terms of a guarantee in words, as `doppler-hf verify` and the model card show them.

If earlier private runs trained the same weights, their ε counts for whoever publishes the weights. So each of these texts
states the sum first, and then the part of this run. The ε of interrupted searches in the same folder is added in the same
way.
"""

import math
from collections.abc import Callable
from typing import Final

from doppler_hf.privacy.accounting.accounting import INTERRUPTED_SEARCH, ONE_EXAMPLE, Spent
from doppler_hf.privacy.accounting.attack import TradeOff, attack_in_words, percent
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
        ("neighbouring data sets", first["neighbouring_relation"].replace("unit", statement.noun)),
        ("ε covers", unit_in_words(ledger) + ("" if cap is None else f", at most {cap} of them in a batch")),
        (f"number of {statement.noun}s N", f"{statement.num_units:,} ({first['role_of_num_units']})"),
        ("expected batch size B", f"{statement.expected_batch_size:,}"),
        ("noise multiplier σ", sigma),
        *(
            (f"ε computed for {steps:,} steps", f"σ₀ = {joint:.4g}, sample rate q = {rate:.6g}")
            for plan in ledger.allowed_plans
            for joint, rate, steps, *_ in plan
        ),
        *plan_rows(ledger),
        *search_rows(ledger),
        ("noise shape", statement.noise_shape_in_words),
        ("clip norm C", f"{statement.per_sample_max_grad_norm:g} ({clipped})"),
        ("training loss", train_loss[statement.train_loss]),
        ("noise source", statement.noise_source),
        ("δ", f"{statement.target_delta:.4g}"),
        ("target ε", "none" if statement.target_epsilon is None else f"{statement.target_epsilon:g}"),
        ("restarts", ", ".join(f"at step {step:,}" for step in ledger.restarts) or "none"),
    ]


def plan_rows(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return how the ε of several plans is added up, with its label; nothing if there is one plan."""
    own = ledger.spent_by_own_plans
    if len(own) < 2 or not ledger.private:
        return []
    delta = next(iter(own.values())).delta
    return [("ε of its plans", f"{_sum([*own.values()])}, each at δ = {delta:.3g}; results of one may have led to the next")]


def search_rows(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the terms of the search whose best trial was published, each with its label; nothing if there was none."""
    terms, of_trial = ledger.statement.search, ledger.epsilon_of_trial
    if terms is None or of_trial is None:
        return []
    first, second = terms.selection.first, terms.selection.second
    return [
        ("ε counts", f"a search with a secret number of trials, {terms.expected_trials:g} expected; the best was published"),
        (
            "ε of each trial",
            f"{first.epsilon:.4g} at δ = {first.delta:.3g}, and {second.epsilon:.4g} at δ = {second.delta:.3g}",
        ),
        ("ε of the published trial alone", f"{of_trial:.4g} at δ = {ledger.statement.target_delta:.3g}"),
    ]


def search_in_words(ledger: PrivacyLedger) -> str:
    """Return what else the ε of a search counts, in one sentence; empty if there was no search."""
    terms, of_trial = ledger.statement.search, ledger.epsilon_of_trial
    if terms is None or of_trial is None:
        return ""
    return (
        f"This ε is that of a whole search, of which only the best trial was published; the number of trials is secret, and "
        f"{terms.expected_trials:g} were expected. The published trial alone would cost ε = {of_trial:.4g} at "
        f"δ = {ledger.statement.target_delta:.3g}."
    )


def why_not_private(ledger: PrivacyLedger) -> str | None:
    """Return why the weights are not private: because of a run of this ledger, or of an earlier run. None if they are."""
    if ledger.why_not_private is None and ledger.earlier is not None and math.isinf(ledger.earlier.epsilon):
        return "an earlier run that trained these weights was not private"
    return ledger.why_not_private


def total_of(ledger: PrivacyLedger, *, epsilon: float) -> Spent:
    """Return what the weights have cost in all runs that trained them, if `epsilon` is the cost of this ledger's run."""
    earlier = 0.0 if ledger.earlier is None else ledger.earlier.epsilon
    return ledger.spent._replace(epsilon=earlier + epsilon)


def guarantee_in_words(ledger: PrivacyLedger, *, epsilon: float) -> str:
    """Return ε, δ and what they protect: for all runs that trained the weights, if there were others.

    Args:
        ledger: The ledger of the run.
        epsilon: The cost of this ledger's run: planned, or spent so far.
    """
    total, reason = total_of(ledger, epsilon=epsilon), why_not_private(ledger)
    if reason is not None:
        return f"ε = {_number(total.epsilon)} (NOT PRIVATE: {reason})"
    parts = f", {parts_in_words(ledger, epsilon=epsilon)}" if ledger.earlier is not None else ""
    return f"ε = {total.epsilon:.4g}, δ = {total.delta:.3g} for {unit_in_words(ledger)}{parts}"


def parts_in_words(ledger: PrivacyLedger, *, epsilon: float) -> str:
    """Return the runs whose ε are added up, in words; empty if no other run has trained the weights."""
    runs, searches = _earlier_kinds(ledger)
    if not runs and not searches:
        return ""
    differ = len({each.unit for each in ledger.trainings.values()}) > 1
    parts = [f"this run ({_added([Spent(epsilon, 0.0, ledger.statement.unit_of_privacy)], of_units=differ)})"]
    if runs:
        others = "an earlier run" if len(runs) == 1 else f"{len(runs)} earlier runs"
        parts.append(f"{others} on the same weights ({_added(runs, of_units=differ)})")
    if searches:
        others = "an interrupted search" if len(searches) == 1 else f"{len(searches)} interrupted searches"
        parts.append(f"{others} ({_added(searches, of_units=differ)})")
    return f"the sum of {', '.join(parts[:-1])} and {parts[-1]}"


def claim_in_words(ledger: PrivacyLedger) -> str:
    """Return what is guaranteed, and what that means."""
    reason = why_not_private(ledger)
    if reason is not None:
        return " ".join(filter(None, (f"Not differentially private: {reason}.", earlier_in_words(ledger))))
    total = total_of(ledger, epsilon=ledger.epsilon())
    parts = parts_in_words(ledger, epsilon=ledger.epsilon())
    return (
        f"Trained with ({total.epsilon:.4g}, {total.delta:.3g})-differential privacy for {unit_in_words(ledger)} "
        f"(adding or removing it){parts and f', {parts}'}. ε was {HOW_COMPUTED}. "
        + " ".join(
            filter(
                None,
                (search_in_words(ledger), early_stop_in_words(ledger), earlier_in_words(ledger), meaning_in_words(ledger)),
            )
        )
    )


def early_stop_in_words(ledger: PrivacyLedger) -> str:
    """Return why a run that stopped early costs the ε of its whole plan, and what it would have cost otherwise.

    The text is empty if the run did not stop early.
    """
    fixed = ledger.epsilon_of_fixed_length()
    if not fixed < (1.0 - _NEARLY) * ledger.epsilon():
        return ""
    which, own = "ε" if ledger.earlier is None else "ε of this run", [*ledger.spent_by_own_plans.values()]
    if len(own) > 1:
        return (
            f"The run has {len(own)} plans, and results of one may have led to the next. So each gets a part of δ, and "
            f"their ε add up: {_sum(own)}. {which} would be {fixed:.4g} if all {ledger.steps_run:,} steps and their terms "
            "had been fixed beforehand."
        )
    return (
        "The ε of the whole plan counts wherever a run stops, because intermediate results may decide that. "
        f"{which} would be {fixed:.4g} if the length of {ledger.steps_run:,} steps had been fixed beforehand."
    )


def stated_in_words(ledger: PrivacyLedger) -> str:
    """Return why ε is larger than a ledger of an earlier format states, or an empty text if it is not."""
    stated, epsilon = ledger.stated_epsilon, ledger.epsilon()
    if stated is None or not stated < (1.0 - _NEARLY) * epsilon:
        return ""
    said = [f"The ledger itself states ε = {stated:.4g}."]
    last = ledger.as_last_stated()
    if last.runs[-1].is_by_the_rule_before and stated < (1.0 - _NEARLY) * (then := last.epsilon()):
        said.append(
            "The version that wrote it counted a finished run and its repetition from a checkpoint as one plan. Results may "
            f"have led to the repetition, so each now counts as a plan of its own, which gives ε = {then:.4g}."
        )
    if last.epsilon() < (1.0 - _NEARLY) * epsilon:
        said.append(
            "Then the run was resumed, and before its next checkpoint the version that wrote the ledger did not state the ε "
            f"of what the resumed run had planned. With it, ε is {epsilon:.4g}."
        )
    return " ".join(said)


def unbegun_in_words(ledger: PrivacyLedger) -> str:
    """Return that a run has spent nothing yet, and what its plan will cost; empty if a step was reserved."""
    if ledger.steps_run or not ledger.private:
        return ""
    return (
        "This ledger was written before the first step, when nothing was released. From the first step on, the run costs "
        f"ε = {ledger.planned_epsilon:.4g} at δ = {ledger.statement.target_delta:.3g}. Verify the ledger that the run has "
        "written last, if there is another."
    )


def earlier_in_words(ledger: PrivacyLedger) -> str:
    """Return when the ε of earlier runs on these weights counts, and when it does not; empty if no such run is known."""
    if ledger.earlier is None:
        return ""
    runs, searches = _earlier_kinds(ledger)
    said = []
    if runs:
        one = len(runs) == 1
        who = "An earlier private run" if one else f"{len(runs)} earlier private runs"
        said.append(f"{who} trained these weights, so {'its' if one else 'their'} ε is included.")
    if searches:
        one = len(searches) == 1
        what = "an interrupted search" if one else f"{len(searches)} interrupted searches"
        said.append(
            f"The ε of {what} in the same folder is included. {'It' if one else 'They'} published nothing, but what "
            f"{'it' if one else 'they'} computed may have led to this run."
        )
    if (delta := ledger.spent.delta) >= (largest := 1.0 / ledger.statement.num_units):
        said.append(
            f"All δ add up to {delta:.3g}, which is above 1/N = {largest:.3g}: so large a δ would permit a run to publish "
            f"one of the {ledger.statement.noun}s."
        )
    own = f"ε = {_number(ledger.planned_epsilon)}, δ = {ledger.statement.target_delta:.3g}"
    return f"{' '.join(said)} For a {ledger.statement.noun} whose data only this run used, {own} holds."


def _earlier_kinds(ledger: PrivacyLedger) -> tuple[list[Spent], list[Spent]]:
    """Return what earlier runs have spent on the weights, and what interrupted searches have spent on the data."""
    runs: list[Spent] = []
    searches: list[Spent] = []
    for name, spent in ledger.earlier_trainings.items():
        (searches if name.startswith(INTERRUPTED_SEARCH) else runs).append(spent)
    return runs, searches


def _sum(spent: list[Spent]) -> str:
    return " + ".join(_number(each.epsilon) for each in spent)


def _added(spent: list[Spent], *, of_units: bool) -> str:
    if not of_units:
        return f"ε = {_sum(spent)}"
    return " + ".join(f"ε = {_number(each.epsilon)} for {_unit_in_words(each.unit)}" for each in spent)


def total_rows(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the total of all runs on the weights, with its label; nothing if this ledger's is the only one."""
    if ledger.earlier is None:
        return []
    total = total_of(ledger, epsilon=ledger.epsilon())
    parts = parts_in_words(ledger, epsilon=ledger.epsilon())
    return [("ε of the weights", f"{_number(total.epsilon)} at δ = {total.delta:.3g}, {parts}")]


def meaning_in_words(ledger: PrivacyLedger) -> str:
    """Return what the ε of the weights means for an attacker."""
    total = total_of(ledger, epsilon=ledger.epsilon())
    runs = "In this run" if ledger.earlier is None else "In all these runs"
    words = attack_in_words(_trade_off(ledger), epsilon=total.epsilon, record=record_in_words(ledger), runs=runs)
    if ledger.earlier is None:
        return (
            words
            if len(ledger.spent_by_own_plans) < 2
            else f"{words} Of its plans only ε and δ are used, so this limit is loose."
        )
    own = percent(ledger.trade_off().true_positive_rate(0.01))
    return f"{words} Of the others only ε and δ are known, so this limit is loose; in this run alone it is {own}."


def _trade_off(ledger: PrivacyLedger) -> TradeOff:
    """Return bounds on the success of an attack on the weights. Only ε and δ are known of runs of other ledgers."""
    own, earlier = ledger.trade_off(), ledger.earlier
    if earlier is None:
        return own
    return own.beside(earlier.epsilon, delta=earlier.delta)


def _number(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:.4g}"


def record_in_words(ledger: PrivacyLedger) -> str:
    """Return "training record" or "user": what an attacker tries to recognise."""
    return "training record" if ledger.spent.unit == ONE_EXAMPLE else "user"


def unit_in_words(ledger: PrivacyLedger) -> str:
    """Return what the ε of the weights covers: one record, or one user and how users are told apart."""
    return _unit_in_words(ledger.spent.unit)


def _unit_in_words(unit: str) -> str:
    if unit == ONE_EXAMPLE:
        return "one record"
    return f"one user ({unit.replace('all examples', 'all records')})" if unit else "what an earlier version did not note"


def not_covered_in_words(ledger: PrivacyLedger) -> list[str]:
    """Return what ε does not cover; a ledger says "units" and "examples" in its file, whose format is fixed."""
    lines = (line.replace("number of units", f"number of {ledger.statement.noun}s") for line in ledger.not_covered)
    return [line.replace("training examples", "training records") for line in lines]


def attacks_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return bounds on the success of any membership attack, each with its label; none if the run was not private."""
    if why_not_private(ledger) is not None:
        return []
    best, own = _trade_off(ledger), ledger.trade_off()

    def limit(of: Callable[[TradeOff], float], what: str = "") -> str:
        alone = "" if ledger.earlier is None else f" (in this run alone {percent(of(own))})"
        return f"at most {percent(of(best))}{what}{alone}"

    return [
        ("any attack with 1 % false positives", limit(lambda each: each.true_positive_rate(0.01), " true positives")),
        ("any attack with 0.1 % false positives", limit(lambda each: each.true_positive_rate(0.001), " true positives")),
        ("any attack's advantage (TPR − FPR)", limit(lambda each: each.advantage)),
    ]


def account_in_words(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    """Return the terms, the ε spent, the steps and the software of a run, each with its label."""
    last = ledger.runs[-1]
    exact = "" if last.is_closed else " (the run had not ended; steps are counted in advance)"
    return [
        *terms_in_words(ledger),
        *total_rows(ledger),
        ("ε", f"{ledger.epsilon():.4g}, {HOW_COMPUTED}"),
        *attacks_in_words(ledger),
        ("steps", f"{ledger.steps_run:,} of {ledger.statement.steps_planned:,} planned{exact}"),
        ("software", ", ".join(f"{name} {version}" for name, version in last.versions.items())),
    ]
