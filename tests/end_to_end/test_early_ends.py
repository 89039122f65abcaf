"""What is said of a run that ends before its plan: ε of the plan, everywhere; and a round goes on where it was left."""

import contextlib
import re
import shutil
import stat
import warnings

import pytest
from datasets import Dataset
from transformers import EarlyStoppingCallback

from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, get_epsilon
from doppler_hf.privacy.accounting.accounting import get_epsilon_of_plans
from doppler_hf.run.planning.plan import noise_of_average
from doppler_hf.run.resuming.earlier_ledgers import Previous
from doppler_hf.run.resuming.round_secrets import RoundSecret
from tests.support.ledgers import said
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import Rows, text_data, tiny_bert
from tests.support.trainers import On, at, interrupt, interrupted, trained, trainer_of

PLANNED = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=9)


def stop(control, **_):
    control.should_training_stop = True


def fail(**_):
    raise ValueError("mine")


@pytest.mark.parametrize(
    "options", [dict(metric_for_best_model="loss"), dict(eval_strategy="steps", eval_steps=1)], ids=["evaluation", "metric"]
)
def test_early_stopping_without_what_it_compares_is_refused_before_the_first_step(tmp_path, options):
    made = dict(callbacks=[EarlyStoppingCallback()], evaluated=text_data(8, seed=1), max_steps=1)
    trainer = trainer_of(tmp_path, **made, **options)
    with refused("early-stopping-alone", match="Set eval_strategy='steps' and metric_for_best_model='loss'"):
        trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    trained(trainer_of(tmp_path, **made, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss"))  # the mend


# At this learning rate no evaluation is better than the first.
STOPPING_EARLY = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e3)


@pytest.mark.parametrize(
    ("callback", "error", "steps"),
    [
        (STOPPING_EARLY, None, 2),
        (On(step_begin=at(2, interrupt)), KeyboardInterrupt, 2),
        *thorough((On(step_end=at(4, stop)), None, 4), (On(step_begin=at(2, fail)), ValueError, 2)),
    ],
    ids=["early stopping", "Ctrl-C", "a callback", "an error"],
)
def test_a_run_that_anything_ends_states_the_planned_epsilon_everywhere(tmp_path, capsys, callback, error, steps):
    evaluations = dict(eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="loss")
    saves = dict(save_strategy="steps", save_steps=1)
    trainer = trainer_of(tmp_path, callbacks=[callback], **PLANNED, **evaluations, **saves)
    with pytest.raises(error) if error else contextlib.nullcontext():
        trainer.train()
    ledger = PrivacyLedger.load(tmp_path / "out")
    terms = dict(noise_multiplier=ledger.statement.effective_noise_multiplier, sample_rate=1 / 3, delta=24**-1.1)
    planned, fixed = (get_epsilon(**terms, steps=count) for count in (9, steps))
    assert ledger.steps_run == steps
    assert 2.97 < planned <= 3.0
    assert fixed < 0.9 * planned
    assert ledger.epsilon() == trainer.privacy.epsilon() == planned
    assert {log["epsilon"] for log in trainer.state.log_history if "epsilon" in log} == {planned}
    beside = f"ε would be {fixed:.4g} if the length of {steps} steps had been fixed beforehand."
    printed = said(capsys)
    assert len(re.findall(rf"ε = {planned:.4g}, δ", printed)) == 2  # at the start and at the end
    assert printed.count(beside) == (error is None)
    # Whoever stops early is told so before it, where a shorter plan would still help.
    before = printed.partition("Privacy spent")[0]
    assert ("EarlyStoppingCallback saves time, but no ε" in before) == (callback is STOPPING_EARLY)
    trainer.save_model()
    trainer.create_model_card()
    assert main(["verify", str(tmp_path / "out")]) == 0
    verified = said(capsys)
    assert f"VERIFIED: ({planned:.4g}, " in verified
    for shown in (verified, (tmp_path / "out" / "README.md").read_text("utf-8")):
        assert beside in shown
        assert f"({planned:.4g}, " in shown
    assert [claim.epsilon for claim in ledger.claims] == [planned] * len(ledger.claims)


def test_a_run_to_its_end_says_nothing_of_other_lengths(tmp_path, capsys):
    trained(trainer_of(tmp_path, **PLANNED))
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert "had been fixed" not in said(capsys)


def test_a_plan_that_results_may_have_chosen_adds_its_epsilon(tmp_path, capsys):
    """Another σ, target or length: each at half of δ, to its own end."""
    first = trained(
        trainer_of(tmp_path, callbacks=[On(step_end=at(4, stop))], save_strategy="steps", save_steps=2, **PLANNED)
    )
    again = trainer_of(tmp_path, **PLANNED | dict(target_epsilon=7.0, save_strategy="steps"))
    again.train(resume_from_checkpoint=True)
    plans = again.privacy.ledger.plans
    assert [[each.steps for each in plan] for plan in plans] == [[9], [5]]
    assert again.privacy.epsilon() == pytest.approx(get_epsilon_of_plans(plans, delta=24**-1.1), rel=1e-12)
    assert again.privacy.epsilon() <= 7.0
    # The first costs more at half of δ.
    assert again.privacy.epsilon() > 6.9
    assert first.privacy.epsilon() < get_epsilon_of_plans(plans[:1], delta=24**-1.1 / 2)
    assert "been fixed beforehand" in said(capsys)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_another_length_within_the_same_target_is_refused_with_what_to_do(tmp_path):
    trained(trainer_of(tmp_path, callbacks=[On(step_end=at(4, stop))], save_strategy="steps", save_steps=2, **PLANNED))
    options = PLANNED | dict(max_steps=6, save_strategy="steps")
    with refused("budget-spent", match="To finish the earlier run, resume with its arguments"):
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=True)
    # Both mends.
    trainer_of(tmp_path, **PLANNED).train(resume_from_checkpoint=True)
    trainer_of(tmp_path, **options | dict(max_steps=11, target_epsilon=8.0)).train(resume_from_checkpoint=True)


# --- steps that are made again --------------------------------------------------------------------------------------------


def test_a_finished_run_that_is_trained_again_from_a_checkpoint_adds_its_epsilon_each_time(tmp_path, capsys):
    """Results may have chosen whether, and how often."""
    options = dict(noise_multiplier=1.5, max_steps=6, save_strategy="steps", save_steps=3, report_train_loss="none")
    trained(trainer_of(tmp_path, **options))
    assert "may depend on its results" not in said(capsys)
    for times in (1, 2):
        again = trainer_of(tmp_path, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
        assert "The earlier run was complete, and this run may depend on its results, so it counts as a plan" in said(capsys)
        terms = dict(noise_multiplier=1.5, sample_rate=1 / 3, delta=24**-1.1 / (1 + times))
        assert again.privacy.epsilon() == get_epsilon(**terms, steps=6) + times * get_epsilon(**terms, steps=3)
        assert main(["verify", str(tmp_path / "out")]) == 0
        assert f"LEDGER ONLY: ({again.privacy.epsilon():.4g}, " in said(capsys)


@pytest.mark.parametrize("callback", [stop, *thorough(interrupt)])
def test_who_resumes_from_an_earlier_checkpoint_pays_or_ends_earlier(tmp_path, callback):
    """What chance has lost is made again, within the plan. After a clean end only a target allows it, at the plan's end."""
    for terms, plans, ends_at in (
        (dict(noise_multiplier=1.5), [[6], [4]] if callback is stop else [[8]], 6),
        (dict(noise_multiplier=None, target_epsilon=6.0), [[6]] if callback is stop else [[8]], 4),
    ):
        options = dict(max_steps=6, save_strategy="steps", save_steps=2, data=text_data(48)) | terms
        folder = tmp_path / str(ends_at)
        first = trainer_of(folder, callbacks=[On(step_end=at(4, callback))], **options)
        with pytest.raises(KeyboardInterrupt) if callback is interrupt else contextlib.nullcontext():
            first.train()
        again = trainer_of(folder, **options)
        again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
        ledger = again.privacy.ledger
        assert [[each.steps for each in plan] for plan in ledger.plans] == plans
        assert again.state.global_step == ends_at
        assert ledger.epsilon() <= (terms.get("target_epsilon") or 99)
        assert ledger.epsilon() >= first.privacy.epsilon()
        assert main(["verify", str(folder / "out")]) == 0


@pytest.mark.parametrize("callback", [stop, interrupt, *thorough(None)])
def test_a_checkpoint_without_the_ledger_of_its_run_counts_all_that_was_planned(tmp_path, callback, capsys):
    """It cannot know whether the run ended, nor how many steps were made after it."""
    options = dict(max_steps=6, save_strategy="steps", save_steps=2, noise_multiplier=1.5, data=text_data(48))
    with pytest.raises(KeyboardInterrupt) if callback is interrupt else contextlib.nullcontext():
        trainer_of(tmp_path, callbacks=[] if callback is None else [On(step_end=at(4, callback))], **options).train()
    copy = tmp_path / "copied" / "out" / "best"
    shutil.copytree(tmp_path / "out" / "checkpoint-2", copy)
    said(capsys)
    alone = trainer_of(tmp_path / "copied", **options)
    alone.train(resume_from_checkpoint=str(copy))
    assert "nobody knows how the run went on" in said(capsys)
    assert [[each.steps for each in plan] for plan in alone.privacy.ledger.plans] == [[6], [4]]
    assert main(["verify", str(tmp_path / "copied" / "out")]) == 0
    # The mend: with the ledger it counts what it counts in its own place.
    beside = tmp_path / "beside" / "checkpoint-2"
    shutil.copytree(copy, beside)
    shutil.copy(tmp_path / "out" / LEDGER_NAME, beside.parent)
    said(capsys)
    in_its_place, with_ledger = trainer_of(tmp_path, **options), trainer_of(tmp_path / "other", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the secret of the round is gone: both begin a new one
        with_ledger.train(resume_from_checkpoint=str(beside))
        assert "nobody knows" not in said(capsys)
        in_its_place.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert with_ledger.privacy.epsilon() == in_its_place.privacy.epsilon() <= alone.privacy.epsilon()


# --- one model, several trainers ----------------------------------------------------------------------------------------


def test_a_cell_that_is_run_again_adds_up_what_its_model_has_cost(tmp_path, capsys):
    """Another folder each time, the model the same object."""
    model, costs = tiny_bert(), []
    for number in range(3):
        trainer = trained(trainer_of(tmp_path / str(number), model=model, **PLANNED))
        trainer.save_model()
        costs.append(trainer.privacy.epsilon())
        printed = said(capsys)
        words = f"on the same weights (ε = {' + '.join(f'{cost:.4g}' for cost in costs[:-1])})"
        assert (words in printed) == (number > 0)
        assert main(["verify", str(tmp_path / str(number) / "out")]) == 0
        assert (words in said(capsys)) == (number > 0)
        trainer.create_model_card()
        assert (words in (tmp_path / str(number) / "out" / "README.md").read_text("utf-8")) == (number > 0)
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(sum(costs))
    assert trainer.privacy.ledger.spent.delta == pytest.approx(3 * 24**-1.1)


def test_a_model_of_its_own_has_cost_nothing_before(tmp_path, capsys):
    trained(trainer_of(tmp_path / "first"))
    trained(trainer_of(tmp_path / "second"))
    assert "before, under another ledger" not in said(capsys)


# --- rounds that go on ----------------------------------------------------------------------------------------------------


def secrets_of(trainer):
    ledger = trainer.privacy.ledger
    return RoundSecret(ledger.run_id, 0, 1, trainer.privacy._rounds.digest_of_data)


@pytest.mark.parametrize(("within", "ends_at", "planned"), [("step_begin", 6, 6), *thorough(("optimizer_step", 5, 7))])
def test_a_round_goes_on_where_it_was_interrupted(tmp_path, capsys, within, ends_at, planned):
    """All 6 steps are made, each record takes part once at most, and one ε is stated from the first to the last.

    A step after the checkpoint counts, and is not made again: the next ones of the round follow.
    """
    first, second = interrupted(tmp_path, within=within)
    secret = secrets_of(first)
    assert secret.path.exists()
    assert stat.S_IMODE(secret.path.stat().st_mode) == 0o600
    assert not list((tmp_path / "out").rglob(f"*{secret.run_id}*"))
    before = first.privacy.sampler.secret
    assert not any(before in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == ends_at
    seen = first.seen + second.seen
    assert len(set(seen)) == len(seen) == 48
    ledger = second.privacy.ledger
    assert ledger.steps_run == 6
    assert ledger.runs[-1].continues_rounds
    assert [[each.steps for each in plan] for plan in ledger.plans] == [[planned]]
    assert first.privacy.epsilon() == ledger.epsilon_of_fixed_length()
    # Seven steps would cost more than the target, at which the guard ends a run.
    assert second.privacy.epsilon() == (first.privacy.epsilon() if planned == 6 else 8.0)
    assert second.privacy.sampler.secret == before
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert f"LEDGER ONLY: ({second.privacy.epsilon():.4g}, " in said(capsys)
    # Done: nobody can go on with them.
    assert not secret.path.exists()
    assert not secrets_of(second).path.exists()


def test_without_the_secret_a_new_round_is_begun_and_counted(tmp_path):
    """As on another machine: a record may take part again, for which the budget does not allow all steps."""
    first, second = interrupted(tmp_path)
    secrets_of(first).forget()
    with pytest.warns(match="the secret of the earlier run's round is not in"), refused("budget-spent"):
        second.train(resume_from_checkpoint=True)
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 4


def proposed(told):
    return float(re.search(r"set target_epsilon=([\d.]+)", str(told))[1])


def test_a_run_whose_budget_ended_it_names_what_was_spent_and_a_target_with_which_it_goes_on(tmp_path, recwarn):
    """The round's secret is lost, so a new round began, and the target ended it early. Each refusal names what works."""
    options = dict(data=text_data(48), noise_multiplier=None, target_epsilon=8.0, save_strategy="steps", save_steps=1)
    options |= dict(max_steps=12, report_train_loss="none", noise_shape="white")
    first = trainer_of(tmp_path, callbacks=[On(step_begin=at(3, interrupt))], **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    secrets_of(first).forget()
    second = trainer_of(tmp_path, **options)
    second.train(resume_from_checkpoint=True)
    assert 3 < second.state.global_step < 12
    wanted = r"ε = 8 of target_epsilon = 8\.0\. Nothing is left for the new round"
    with refused("budget-spent", match=wanted) as told:
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=True)
    assert "resume with its arguments" not in str(told.value)
    wanted_target, left = proposed(told.value), 12 - second.state.global_step
    cost = get_epsilon_of_plans([*second.privacy.ledger.plans, []], delta=48**-1.1)
    further = second.privacy.statement.releases(left)
    cost_of_both = get_epsilon_of_plans([*second.privacy.ledger.plans, [further]], delta=48**-1.1)
    assert max(cost_of_both, cost / 0.99) <= wanted_target <= 1.02 * cost_of_both
    for target in (8.5, cost):
        wanted = rf"ε = {cost:.4g} of target_epsilon = {target}.*target_epsilon changed from 8\.0 to"
        with refused("budget-spent", match=wanted) as told:
            trainer_of(tmp_path, **options | dict(target_epsilon=target)).train(resume_from_checkpoint=True)
        assert "resume with its arguments" not in str(told.value)
        assert proposed(told.value) == wanted_target
    third = trainer_of(tmp_path, **options | dict(target_epsilon=wanted_target))
    third.train(resume_from_checkpoint=True)
    assert third.state.global_step > second.state.global_step
    assert third.privacy.epsilon() <= wanted_target


@pytest.mark.parametrize("options", [dict(), dict(max_steps=12, noise_shape="auto")], ids=["as before", "longer"])
def test_the_target_that_a_spent_budget_proposes_keeps_the_noise_alike(tmp_path, options):
    """The smallest possible target would leave noise in which the model forgets what it has learnt."""
    terms = dict(data=text_data(48), report_train_loss="private", noise_shape="white", **PLANNED) | options
    trainer = trained(trainer_of(tmp_path, **terms))
    before = trainer.privacy
    with refused("budget-spent") as told:
        trainer.train()
    trainer.args.target_epsilon = proposed(told.value)
    trainer.train()
    after = trainer.privacy
    assert after.ledger.steps_run == 2 * before.ledger.steps_run
    assert after.epsilon() <= trainer.args.target_epsilon <= 1.01 * after.epsilon()
    of_average = [noise_of_average(each.statement, steps=after.ledger.statement.steps_planned) for each in (before, after)]
    assert 0.95 * of_average[0] < of_average[1] <= 1.02 * of_average[0]


def test_far_more_noise_than_the_earlier_run_had_is_told_with_the_target_that_keeps_it_alike(tmp_path, capsys):
    """A run that is stopped then, before its first step, costs nothing."""
    options = dict(data=text_data(48), noise_shape="white", **PLANNED)
    trainer = trained(trainer_of(tmp_path, **options))
    sigma = trainer.privacy.statement.noise_multiplier
    trainer.args.target_epsilon = 3.6
    capsys.readouterr()
    trainer.add_callback(stopping := On(step_begin=interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.privacy.statement.noise_multiplier > 4 * sigma
    printed = said(capsys)
    assert re.search(
        r"will probably make the model worse, because it has [\d.]+ times the noise of the earlier run", printed
    )
    assert "may learn little" not in printed
    trainer.remove_callback(stopping)
    trainer.args.target_epsilon = proposed(printed)
    trainer.train()
    assert "make the model worse" not in said(capsys)
    assert 0.95 * sigma < trainer.privacy.statement.noise_multiplier <= 1.02 * sigma
    assert len(trainer.privacy.ledger.plans) == 2


def test_a_changed_number_of_records_is_told_of_before_the_budget(tmp_path):
    """A larger target, as the refusal of the budget proposes it, would not help."""
    options = dict(noise_multiplier=None, target_epsilon=8.0, save_strategy="steps", save_steps=2)
    trained(trainer_of(tmp_path, max_steps=2, **options))
    for target in (8.0, 20.0):
        fewer = trainer_of(tmp_path, data=text_data(20), max_steps=4, **options | dict(target_epsilon=target))
        with refused("other-terms-than-resumed", match="from 24 in the earlier run to 20"):
            fewer.train(resume_from_checkpoint=True)
    trained(trainer_of(tmp_path / "another", data=text_data(20), max_steps=4, **options))  # the mend


@pytest.mark.parametrize(
    "data", [text_data(48).shuffle(seed=1), *thorough(text_data(48, seed=1))], ids=["another order", "other rows"]
)
def test_other_rows_or_another_order_begin_a_new_round_and_are_told_of(tmp_path, data):
    """A record that had its turn under one number would have another under the next."""
    first, second = interrupted(tmp_path)
    second.train_dataset = data
    told = pytest.warns(UserWarning, match=r"train_dataset changed .*\(rows or order\).* new round and spends additional ε")
    with told, refused("budget-spent"):
        second.train(resume_from_checkpoint=True)
    again = trainer_of(tmp_path, data=text_data(48), noise_multiplier=None, target_epsilon=8.0, max_steps=6)
    again.train(resume_from_checkpoint=True)  # with the same rows, as the message has it
    assert again.state.global_step == 6
    assert not [*secrets_of(first).path.parent.glob(f"{secrets_of(first).run_id}*")]


def test_rows_of_one_length_with_other_labels_than_classes_are_known_by_their_content(tmp_path):
    """As blocks of a language model: nothing but the content says that their order is another one."""
    rows = [{"input_ids": [5 + i % 45, 7, 9], "attention_mask": [1] * 3, "labels": i / 7} for i in range(48)]
    options = dict(noise_multiplier=1.5, max_steps=6, save_strategy="steps", save_steps=2)
    for number, kind in enumerate((Dataset.from_list, Rows, list)):
        folder = tmp_path / str(number)
        stopped = dict(callbacks=[On(step_begin=at(4, interrupt))])
        with pytest.raises(KeyboardInterrupt):
            trainer_of(folder, model=tiny_bert(num_labels=1), data=kind(rows), **options, **stopped).train()
        for data, is_the_same in ((kind(rows[1:] + rows[:1]), False), (kind(rows), True)):
            again = trainer_of(folder, model=tiny_bert(num_labels=1), data=data, **options)
            with contextlib.nullcontext() if is_the_same else pytest.warns(match=r"changed .* \(rows or order\)"):
                run = again._new_run(previous=Previous(str(folder), 4, PrivacyLedger.load(folder / "out")))
            assert run._continues_rounds == is_the_same


@pytest.mark.parametrize("change", [dict(target_epsilon=20.0), *thorough(dict(max_steps=8, target_epsilon=20.0))])
def test_a_changed_plan_draws_its_own_round(tmp_path, change):
    first, second = interrupted(tmp_path)
    for name, value in change.items():
        setattr(second.args, name, value)
    second.train(resume_from_checkpoint=True)
    assert not second.privacy.ledger.runs[-1].continues_rounds
    assert second.privacy.sampler.secret != first.privacy.sampler.secret
    assert second.privacy.epsilon() <= 20.0


def test_an_evaluation_that_fails_loses_no_step(tmp_path, capsys):
    def of_few(prediction):  # which no rehearsal has called
        return {"accuracy": 0.5} if len(prediction.label_ids) < 65 else {}["too many"]

    options = dict(**PLANNED, eval_strategy="steps", eval_steps=3, evaluated=text_data(70), rehearse=False)
    with pytest.raises(KeyError, match="too many"):
        trainer_of(tmp_path, compute_metrics=of_few, **options).train()
    assert f"To continue from {tmp_path / 'out' / 'checkpoint-3'}, call trainer.train(" in said(capsys)
    again = trainer_of(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert again.state.global_step == ledger.steps_run == 9
    assert 2.97 < ledger.epsilon() <= 3.0


@pytest.mark.parametrize(("event", "is_saved"), [("step_begin", True), ("optimizer_step", False)])
def test_ctrl_c_saves_what_was_trained_but_not_in_the_middle_of_an_update(tmp_path, event, is_saved):
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[On(**{event: at(2, interrupt)})], **PLANNED).train()
    assert (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").exists() == is_saved
