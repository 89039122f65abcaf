"""What the weights have cost in all runs that trained them comes first, wherever a run states its ε."""

import json
import math
import re

import pytest
from datasets import Dataset
from transformers import BertForSequenceClassification

from doppler_hf.cli import main
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Spent
from doppler_hf.privacy.ledger.terms import attacks_in_words
from doppler_hf.run.saving.card_sections import privacy_section
from tests.support.ledgers import after, statement
from tests.support.printed import flat
from tests.support.tiny import text_data
from tests.support.trainers import On, at, interrupt, trained, trainer_of

TERMS = dict(noise_multiplier=None, target_epsilon=2.0)
NUMBER = r"ε = ([\d.]+)"


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """No run of another test is known."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def loaded(trainer):
    trainer.save_model()
    return BertForSequenceClassification.from_pretrained(trainer.args.output_dir)


def runs_on_one_model(tmp_path, number, **options):
    """Train a model so many times, each time loaded from the folder before, and return the trainers."""
    trainers = []
    for place in range(number):
        model = loaded(trainers[-1]) if trainers else None
        trainers.append(trained(trainer_of(tmp_path / str(place), model=model, **(TERMS | options))))
    return trainers


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_surface_states_the_sum_first(tmp_path, capsys, number):
    trainers = runs_on_one_model(tmp_path, number)
    trainer = trainers[-1]
    own, total = trainer.privacy.epsilon(), sum(each.privacy.epsilon() for each in trainers)
    delta = number * 24**-1.1
    said = f"ε = {total:.4g}, δ = {delta:.3g} for one record"
    printed = capsys.readouterr().out
    start = re.findall("^privacy +(.*)$", printed, re.M)[-1]
    end = re.findall("^Privacy spent: (.*)$", printed, re.M)[-1]
    for line in (start, end):
        assert line.startswith(said)
        assert re.findall(NUMBER, line)[:1] == [f"{total:.4g}"]
        assert (f"this run (ε = {own:.4g})" in line) == (number > 1)
        assert ("earlier run" in line) == (number > 1)
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / str(number - 1) / "out/README.md").read_text("utf-8")
    assert f"Trained with ({total:.4g}, {delta:.3g})-differential privacy for one record" in card
    capsys.readouterr()
    assert main(["verify", trainer.args.output_dir]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"VERIFIED: ({total:.4g}, {delta:.3g})-differential privacy for one record")
    # What ε means for an attacker is said of the same sum.
    assert re.search(r"runs? \(ε = ([\d.]+)\), an attack", card)[1] == f"{total:.3g}"
    assert re.search(r"runs? \(ε = ([\d.]+)\), an attack", flat(re.sub("[│]", " ", shown)))[1] == f"{total:.3g}"
    logs = [log for log in trainer.state.log_history if "epsilon" in log]
    assert logs
    assert all(math.isclose(log["epsilon"], own) for log in logs)
    assert all(("epsilon_of_weights" in log) == (number > 1) for log in logs)
    assert all(math.isclose(log.get("epsilon_of_weights", total), total) for log in logs)


def test_an_interrupted_run_states_the_sum_too(tmp_path, capsys):
    (first,) = runs_on_one_model(tmp_path, 1)
    second = trainer_of(tmp_path / "second", model=loaded(first), callbacks=[On(step_begin=at(2, interrupt))], **TERMS)
    with pytest.raises(KeyboardInterrupt):
        second.train()
    total = first.privacy.epsilon() + second.privacy.epsilon()
    assert f"Interrupted. Privacy spent: ε = {total:.4g}, " in capsys.readouterr().out


def test_a_sum_above_what_protects_is_warned_of(tmp_path, capsys):
    """Of two runs each of which has an ε that is usual."""
    runs_on_one_model(tmp_path, 2, target_epsilon=6.0)
    first, second = re.split("^privacy ", capsys.readouterr().out, flags=re.M)[1:]
    assert "protects little" not in first
    assert "protects little" in second


@pytest.mark.parametrize(
    ("terms", "who"),
    [({}, "record"), (dict(unit_of_privacy="all examples with the same 'author'"), "user")],
)
def test_the_sum_is_of_records_or_users(terms, who):
    earlier = {"0" * 16: Spent(1.5, 1e-6, statement(**terms).unit_of_privacy)}
    ledger = after(PrivacyLedger.open(statement(**terms), earlier=earlier), 2)
    section = privacy_section(ledger)
    assert (
        f"Trained with ({ledger.epsilon() + 1.5:.4g}, {ledger.spent.delta:.3g})-differential privacy for one {who}"
        in section
    )
    assert f"For a {who} whose data only this run used, ε = {ledger.epsilon():.4g}" in section


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("one example", "ε = 1.5 for one record"),
        ("all examples with the same 'patient'", "ε = 1.5 for one user (all records with the same 'patient')"),
        ("", "ε = 1.5 for what an earlier version did not note"),
    ],
)
def test_the_sum_of_runs_that_protect_different_units_is_for_one_record(tmp_path, capsys, before, words):
    """What holds for all records of a user holds for each of them, and not the other way round."""
    of_user = statement(unit_of_privacy="all examples with the same 'author'")
    ledger = after(PrivacyLedger.open(of_user, earlier={"0" * 16: Spent(1.5, 1e-6, before)}), 2)
    ledger.save(tmp_path)
    own = f"this run (ε = {ledger.epsilon():.4g} for one user (all records with the same 'author'))"
    said = f"differential privacy for one record, the sum of {own} and an earlier run on the same weights ({words})"
    assert main(["verify", str(tmp_path)]) == 0
    assert said in flat(capsys.readouterr().out)
    section = privacy_section(PrivacyLedger.load(tmp_path))
    assert "differential privacy for one record (adding or removing it)" in section
    assert "training record" in section
    assert main(["verify", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unit"], found["unit_of_run"]) == ("record", "user")


def test_a_run_for_users_on_weights_of_a_run_for_records_states_its_sum_for_records(tmp_path, capsys):
    first = trained(trainer_of(tmp_path / "first", **TERMS))
    rows = Dataset.from_list([{**row, "author": place // 2} for place, row in enumerate(text_data())])
    second = trainer_of(tmp_path / "second", model=first.model, data=rows, privacy_unit_column="author", **TERMS)
    capsys.readouterr()
    second.train()
    start = re.findall("^privacy +(.*)$", capsys.readouterr().out, re.M)[-1]
    assert "for one record, the sum of this run" in start
    assert "and an earlier run on the same weights (ε = " in start
    assert start.endswith("for one record)")
    assert second.privacy.ledger.spent.unit == "one example"


def test_the_bound_on_attacks_is_of_all_runs():
    """It is at most what follows from ε and δ of the sum, and at least the one of this run alone."""
    alone = after(PrivacyLedger.open(statement()), 2)
    chain = after(PrivacyLedger.open(statement(), earlier={"0" * 16: Spent(1.5, 1e-6)}), 2)
    epsilon, delta, _ = chain.spent
    of_pair = min(math.exp(epsilon) * 0.01 + delta, 1.0)
    found = re.fullmatch(r"at most (.+) % true positives \(in this run alone (.+ %)\)", attacks_in_words(chain)[0][1])
    assert attacks_in_words(alone)[0][1] == f"at most {found[2]} true positives"
    assert float(found[2].removesuffix(" %")) < float(found[1]) <= 100 * of_pair


def test_weights_of_an_earlier_run_that_was_not_private_are_not_verified(tmp_path, capsys):
    first = trained(trainer_of(tmp_path / "first", noise_seed=1))
    second = trained(trainer_of(tmp_path / "second", model=loaded(first), **TERMS))
    start = re.findall("^privacy +(.*)$", capsys.readouterr().out, re.M)[-1]
    assert start == "ε = ∞ (NOT PRIVATE: an earlier run that trained these weights was not private)"
    second.save_model()
    second.create_model_card()
    assert "Trained with" not in (tmp_path / "second/out/README.md").read_text("utf-8")
    capsys.readouterr()
    assert main(["verify", second.args.output_dir]) == 1
    shown = flat(capsys.readouterr().out)
    assert shown.startswith("NOT VERIFIED: ")
    assert "an earlier run that trained these weights was not private" in shown
    assert f"For a record whose data only this run used, ε = {second.privacy.epsilon():.4g}" in shown
