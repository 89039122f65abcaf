"""`doppler-hf verify` believes a ledger as it was written, and nothing else."""

import argparse
import functools
import json
import operator
import re
from pathlib import Path

import pytest

from doppler_hf.cli import main, verify
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Releases, Spent, get_epsilon, get_total_epsilon
from doppler_hf.privacy.ledger.file import package_versions
from doppler_hf.privacy.ledger.ledger import set_aside
from doppler_hf.privacy.ledger.record import LedgerRecord
from doppler_hf.privacy.ledger.terms import HOW_COMPUTED
from doppler_hf.privacy.ledger.weights import hashes
from doppler_hf.run.saving.card_part import marked
from tests.support.ledgers import (
    MODEL,
    after,
    all_events,
    document_in,
    rehashed,
    said,
    statement,
    without_epsilon_of_begun_runs,
    write,
)
from tests.support.tiers import further


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a ledger of every event, and its text."""
    folder = tmp_path_factory.mktemp("out")
    all_events(train_loss="raw", target_epsilon=8.0).save(folder)
    return folder, (folder / LEDGER_NAME).read_text("utf-8")


def check(folder, *options):
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return verify.run(parser.parse_args([str(folder), *options]))


# --- what holds -----------------------------------------------------------------------------------------------------------


def test_a_ledger_as_it_was_written_is_verified(written, capsys):
    folder, text = written
    head = json.loads(text)["entries"][-1]["hash"]
    assert check(folder) == check(folder / LEDGER_NAME) == 0
    assert check(folder, "--head", head.upper()) == 0
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    output = said(capsys)
    # A run that was resumed begins a round of its own.
    epsilon = get_total_epsilon([Releases(1.0, 0.05, 7), Releases(1.0, 0.05, 4)], delta=1e-5)
    assert output.startswith(f"LEDGER ONLY: ({epsilon:.4g}, 1e-05)-differential privacy for one record after 10 steps.")
    assert "NOT VERIFIED" not in output
    assert "as this ledger states it" not in output, "all of this ledger was recomputed"
    for shown in (
        head, "an attack on the model with 1 % false positives", "at step 6", "add or remove one record",
        "1,000 (public, not protected)", "a test", "10 (the run ended)",
        "the training loss, which was logged without noise", "later as --head HASH", "steps planned 10", "target ε 8",
    ):  # fmt: skip
        assert shown in output, shown


@pytest.mark.parametrize("columns", [40, 120])
def test_a_phone_shows_whole_words_and_a_wide_screen_two_columns(written, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    folder, _ = written
    assert check(folder) == 0
    output = capsys.readouterr().out
    terms = output[output.index("mechanism") : output.index("Not covered by ε")].splitlines()
    assert max(map(len, terms)) <= columns
    assert ("│" in output) == (columns == 120)
    if columns == 40:
        assert "noise source:" in terms
        assert terms[terms.index("noise source:") + 1].rstrip() == "  a test"
        assert {line.strip() for line in terms if len(line.strip()) < 3 and not line.strip().isdigit()} <= {"δ:", "%."}


@pytest.mark.parametrize("target_delta", [1e-3, 0.1])
@pytest.mark.parametrize("private", [True, False])
def test_a_delta_that_protects_nobody_is_not_verified_as_private(tmp_path, capsys, target_delta, private):
    """Whether the run has said so of itself, or the file is from elsewhere and calls it private."""
    ledger = after(PrivacyLedger.open(statement(target_delta=target_delta, private=private)), 4)
    ledger.close()
    ledger.save(tmp_path)
    assert check(tmp_path) == 1
    output = said(capsys)
    assert "- NOT PRIVATE: δ ≥ 1/N, with which one of the 1,000 records could be published in full." in output
    assert not re.search(r"(?<!NOT )VERIFIED|LEDGER ONLY|differential privacy", output)


def test_a_run_that_did_not_end_is_verified_as_far_as_it_was_counted(tmp_path, capsys):
    ledger = after(PrivacyLedger.open(statement(steps_planned=1000)), 4)
    ledger.checkpoint(4)
    ledger.save(tmp_path)
    assert check(tmp_path) == 0
    output = said(capsys)
    assert "4 (the run had not ended, or was interrupted; at least 4 steps were run)" in output
    assert "after 4 steps" in output
    whole, beginning = (get_epsilon(noise_multiplier=1.0, sample_rate=0.05, steps=steps, delta=1e-5) for steps in (1000, 4))
    assert output.startswith(f"LEDGER ONLY: ({whole:.4g}, 1e-05)")
    assert f"ε would be {beginning:.4g} if the length of 4 steps had been fixed beforehand." in output


def test_a_run_that_was_killed_before_its_first_checkpoint_states_the_epsilon_of_its_plan(tmp_path, capsys):
    ledger = PrivacyLedger.open(statement(steps_planned=20))
    planned = get_epsilon(noise_multiplier=1.0, sample_rate=0.05, steps=20, delta=1e-5)
    for steps, epsilon in ((0, 0.0), (3, planned)):
        after(ledger, steps).save(tmp_path)
        assert ledger.stated_epsilon == planned, "whoever reads the file needs no accountant"
        assert check(tmp_path) == 0
        output = said(capsys)
        assert f"ε of the whole plan {planned:.6g}, " in output
        told = f"From the first step on, the run costs ε = {planned:.4g} at δ = 1e-05. Verify the ledger that the run has"
        assert (told in output) == (steps == 0)
        assert check(tmp_path, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["epsilon_of_run"], found["planned_epsilon_of_run"]) == (epsilon, planned)


def test_a_run_that_was_killed_after_its_target_was_raised_gets_no_false_explanation(tmp_path, capsys):
    terms = dict(steps_planned=20, target_epsilon=2.0)
    ledger = after(PrivacyLedger.open(statement(**terms)), 10)
    ledger.checkpoint(10)
    ledger = after(ledger.resume(statement(**terms | dict(target_epsilon=8.0)), from_step=10), 2)
    ledger.save(tmp_path)
    assert check(tmp_path) == 0
    assert "The ledger itself states" not in said(capsys)
    # Before format 12, an entry states the ε of the new plan at its first checkpoint only.
    write(tmp_path / "before", rehashed(without_epsilon_of_begun_runs(ledger.entries)))
    document = document_in(tmp_path / "before") | {"$schema": "urn:doppler-hf:privacy-ledger:11", "format_version": 11}
    (tmp_path / "before" / LEDGER_NAME).write_text(json.dumps(document))
    assert check(tmp_path / "before") == 0
    told = (
        f"The ledger itself states ε = {ledger.entries[-4]['planned_epsilon']:.4g}. Then the run was resumed, and before "
        "its next checkpoint the version that wrote the ledger did not state the ε of what the resumed run had planned. "
        f"With it, ε is {ledger.epsilon():.4g}."
    )
    assert told in said(capsys)


def test_checkpoints_are_earlier_states(tmp_path, capsys):
    ledger = after(PrivacyLedger.open(statement(private=True)), 2)
    ledger.checkpoint(2)
    ledger.save(tmp_path / "checkpoint-2")
    after(ledger, 1).save(tmp_path)
    assert check(tmp_path) == 0
    # A later training in the same folder, which has not come to checkpoint 2 yet.
    other = after(PrivacyLedger.open(statement()), 1)
    set_aside(tmp_path, unless=lambda there: False)
    other.save(tmp_path)
    (tmp_path / "privacy_ledger.damaged.json").write_text("{")
    assert check(tmp_path) == 0
    # … and one whose ledger lies nowhere.
    stranger = after(PrivacyLedger.open(statement()), 2)
    stranger.save(tmp_path / "checkpoint-400")
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / LEDGER_NAME).write_text("{}")
    capsys.readouterr()
    assert check(tmp_path) == 1
    output = said(capsys)
    assert f"{tmp_path / 'checkpoint-400' / LEDGER_NAME} is not an earlier state" in output
    assert f"{tmp_path / 'checkpoint-6' / LEDGER_NAME}: This is not a privacy ledger" in output
    assert "2 checks failed" in output
    assert "checkpoint-2" not in output


def test_a_folder_whose_only_ledger_was_set_aside_says_where_it_is(tmp_path, capsys):
    after(PrivacyLedger.open(statement()), 2).save(tmp_path)
    aside = set_aside(tmp_path, unless=lambda there: False)
    assert main(["verify", str(tmp_path)]) == 2
    mend = f"A ledger was set aside there, as {aside.name}, because it does not cover the weights that were saved later."
    assert mend in " ".join(capsys.readouterr().err.split())
    assert main(["verify", str(aside)]) == 0


def test_ledgers_that_were_set_aside_are_named(tmp_path, capsys):
    ledger = after(PrivacyLedger.open(statement()), 2)
    ledger.save(tmp_path)
    assert check(tmp_path) == 0
    assert "another training" not in said(capsys)
    for other in (after(PrivacyLedger.open(statement(target_delta=1e-6)), 3), PrivacyLedger.open(statement(private=False))):
        set_aside(tmp_path, unless=lambda there: False)
        other.save(tmp_path)
    after(ledger, 1)
    set_aside(tmp_path, unless=lambda there: False)
    ledger.save(tmp_path)
    names = {path.name for path in tmp_path.glob("privacy_ledger.*.json")}
    assert len(names) == 3
    assert check(tmp_path) == 0
    output = said(capsys)
    epsilon = get_epsilon(noise_multiplier=1.0, sample_rate=0.05, steps=60, delta=1e-6)
    for spent, delta in ((f"{epsilon:.4g}", "1e-06"), ("inf", "1e-05")):
        assert f".json is the ledger of another training run: ε = {spent} at δ = {delta}, {HOW_COMPUTED}." in output
    assert output.count("of another training") == 2  # the third is an earlier state of this one
    assert "If the runs used the same data, their ε add up, and so do their δ." in output


def test_programs_get_the_ledgers_that_were_set_aside_as_a_list(tmp_path, capsys):
    """With what they need to add up ε; a ledger that cannot be read is no reason to leave it out."""
    first = after(PrivacyLedger.open(statement(target_delta=1e-6)), 3)
    first.save(tmp_path)
    aside = set_aside(tmp_path, unless=lambda there: False)
    PrivacyLedger.open(statement()).save(tmp_path)
    assert check(tmp_path, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["other_ledgers"]
    assert found == {
        "file": aside.name, "ledger": first.name, "epsilon_of_run": first.epsilon(), "delta_of_run": 1e-6,
        "planned_epsilon_of_run": first.epsilon(), "unit_of_run": "record", "steps": 3, "head": first.head,
    }  # fmt: skip
    assert check(aside, "--json") == 0, "what was set aside has the other one as its neighbour"
    assert [each["file"] for each in json.loads(capsys.readouterr().out)["other_ledgers"]] == [LEDGER_NAME]
    aside.write_text("{")
    assert check(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other_ledgers"] == [{"file": aside.name, "ledger": None}]
    assert f"{aside.name} cannot be read, so the ε of its training run is unknown. To see why, run doppler-hf verify " in (
        " ".join(found["notes"])
    )
    assert main(["verify", str(aside)]) == 1  # the mend
    assert "not valid JSON" in said(capsys)


def leaves(value, path=()):
    """Yield the way to each value that is no list or object, and the value."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, (*path, key))


def replacements(value):
    """Other values in the place of a leaf."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value - 1, float(value)]
    if isinstance(value, float):
        return [value * (1 + 1e-15) + 1e-300]
    return [0.5] if value is None else [("1" if value.startswith("0") else "0") + value[1:]]


def test_every_edit_of_a_value_is_found(written, tmp_path, capsys):
    edits = 0
    for (*path, key), value in leaves(json.loads(written[1])):
        for replacement in replacements(value):
            if (key, replacement) == ("format_version", 12.0):
                continue  # The same number to JSON, and no hash is over it.
            document = json.loads(written[1])
            functools.reduce(operator.getitem, path, document)[key] = replacement
            assert json.dumps(document) != json.dumps(json.loads(written[1]))
            (tmp_path / LEDGER_NAME).write_text(json.dumps(document))
            assert check(tmp_path) == 1, (path, key, replacement)
            edits += 1
    assert edits > 200
    assert capsys.readouterr().out.count("NOT VERIFIED") == edits


# --- what a chain cannot show alone ---------------------------------------------------------------------------------------


def test_a_tail_that_was_cut_off_is_found_with_the_head(written, tmp_path, capsys):
    head = json.loads(written[1])["entries"][-1]["hash"]
    for length in range(1, 16):
        write(tmp_path, json.loads(written[1])["entries"][:length])
        assert check(tmp_path) == 0
        assert check(tmp_path, "--head", head) == 1
        assert "this is a different ledger, or entries at its end were cut off" in said(capsys)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda e: e[13].update(planned_epsilon=e[13]["planned_epsilon"] * (1 - 3e-6)), "Entry 13 (closed) states ε = "),
        (lambda e: e[13].update(planned_epsilon=None), "Entry 13 (closed) states ε = inf,"),
        (lambda e: e[7].update(planned_epsilon=0.0), "Entry 7 (checkpoint) states ε = 0,"),
        (lambda e: [entry["statement"].update(noise_multiplier=2.0) for entry in (e[0], e[9])], "Entry 7 (checkpoint)"),
        (
            lambda e: [entry["statement"].update(target_epsilon=0.5) for entry in (e[0], e[9])],
            "The target was ε = 0.5, but what was released costs",
        ),
        (lambda e: e[9]["statement"].update(target_epsilon=0.5), "Entry 9 of the ledger ('resumed'"),
        (lambda e: e[9]["statement"].update(private=False), "NOT PRIVATE: its noise and random batches"),
        (lambda e: e[0]["statement"].update(private=False), "NOT PRIVATE: its noise and random batches"),
        (
            lambda e: [entry["statement"].update(expected_batch_size=1000, sample_rate=1.0) for entry in (e[0], e[9])],
            "Entry 7 (checkpoint) states ε = ",
        ),
    ],
)
def test_a_forged_chain_is_found_where_its_numbers_disagree(written, tmp_path, capsys, edit, message):
    entries = json.loads(written[1])["entries"]
    write(tmp_path, rehashed(entries))
    assert check(tmp_path) == 0
    edit(entries)
    (tmp_path / LEDGER_NAME).unlink()
    write(tmp_path, rehashed(entries))
    capsys.readouterr()
    assert check(tmp_path) == 1
    assert message in said(capsys)


def test_another_version_may_bound_a_little_lower_or_be_looser(written, tmp_path):
    entries = json.loads(written[1])["entries"]
    entries[13]["planned_epsilon"] *= 1.005
    write(tmp_path, rehashed(entries))
    assert check(tmp_path) == 1
    for name in ("doppler_hf", "dp-accounting", "numpy"):
        for factor, code in ((1.005, 0), (1.3, 0), (0.98, 1)):
            entries = json.loads(written[1])["entries"]
            for entry in (entries[0], entries[9]):
                entry["versions"][name] = "0.0.1"
            entries[13]["planned_epsilon"] *= factor
            (tmp_path / LEDGER_NAME).unlink()
            write(tmp_path, rehashed(entries))
            assert check(tmp_path) == code, (name, factor)
    assert verify.tolerance(package_versions() | {"torch": "1.0"}) == 1e-6


OF_FORMAT_9 = sorted(Path(__file__).parent.glob("ledgers_of_format_9/*.json"))


@pytest.mark.parametrize(
    "path",
    further(OF_FORMAT_9, quick=[path for path in OF_FORMAT_9 if path.stem == "white-interrupted"]),
    ids=lambda path: path.stem,
)
def test_ledgers_of_the_format_before_are_verified(path, capsys):
    """Written by version 0.2, each by a run of 10 steps that was interrupted at the fifth, and by one that resumed it."""
    assert main(["verify", str(path)]) == 0
    output = said(capsys)
    assert ", 0.0303)-differential privacy for one record after " in output
    assert ("if the length of 4 steps had been fixed" in output) == ("interrupted" in path.stem)
    # A claim that is too small is found.
    document = json.loads(path.read_text("utf-8"))
    next(entry for entry in document["entries"] if entry["event"] == "checkpoint")["epsilon"] *= 0.8
    ledger = PrivacyLedger(LedgerRecord(rehashed(document["entries"])))
    assert len(verify.epsilon_mismatches(ledger)) == 1


OF_FORMAT_10 = sorted(Path(__file__).parent.glob("ledgers_of_format_10/*.json"))


@pytest.mark.parametrize(
    "path",
    further(OF_FORMAT_10, quick=[path for path in OF_FORMAT_10 if path.stem in ("white-repeated", "white-stopped")]),
    ids=lambda path: path.stem,
)
def test_ledgers_of_version_0_3_are_verified_by_the_rule_of_their_time(path, capsys):
    """Runs of 10 steps: a clean one, one that was interrupted, one stopped early, and one that was trained again twice."""
    assert main(["verify", str(path)]) == 0
    output = said(capsys)
    ledger = PrivacyLedger.load(path)
    assert output.startswith(f"LEDGER ONLY: ({ledger.epsilon():.4g}, ")
    lengths = [[each.steps for each in plan] for plan in ledger.plans]
    plans = {"clean": [[10]], "resumed": [[13]], "stopped": [[10]], "repeated": [[10], [5], [5]]}
    assert lengths == plans[path.stem.split("-")[1]]
    assert ("The ledger itself states ε = " in output) == ("repeated" in path.stem)
    if "repeated" in path.stem:
        assert ledger.stated_epsilon == ledger.entries[-3]["planned_epsilon"] < 0.7 * ledger.epsilon()
    document = json.loads(path.read_text("utf-8"))
    next(entry for entry in document["entries"] if entry["event"] == "closed")["planned_epsilon"] *= 0.8
    ledger = PrivacyLedger(LedgerRecord(rehashed(document["entries"])))
    assert len(verify.epsilon_mismatches(ledger)) == 1


def covered(folder, *names):
    """A ledger in a folder that has saved weights of these names, and checkpoints with weights of their own."""
    ledger = after(PrivacyLedger.open(statement()), 2)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for saved in (folder, *folder.glob("checkpoint-*")):
        ledger.speak_for(hashes(saved), model=MODEL)
    ledger.save(folder)
    return ledger


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("lost", [SHARDS[:1], SHARDS[2:], SHARDS[:2]])
def test_parts_of_a_sharded_model_that_are_missing_are_named(tmp_path, capsys, lost):
    covered(tmp_path, *SHARDS, "adapter_model.safetensors")
    assert check(tmp_path) == 0
    assert f"matches the weights in adapter_model.safetensors, {', '.join(SHARDS[:2])}." in said(capsys)
    for name in lost:
        (tmp_path / name).unlink()
    assert check(tmp_path) == 1
    assert f"are missing in {tmp_path}: {', '.join(lost)}. Put them back." in said(capsys)
    for name in lost:
        (tmp_path / name).write_text(name)
    assert check(tmp_path) == 0
    for name in SHARDS:  # all of one model, and the adapter beside it
        (tmp_path / name).unlink()
    assert check(tmp_path) == 0


def test_weights_of_checkpoints_are_checked_too(tmp_path, capsys):
    covered(tmp_path, "model.safetensors", "checkpoint-2/model.safetensors", "checkpoint-2/optimizer.pt")
    assert check(tmp_path) == 0
    (tmp_path / "checkpoint-2" / "model.safetensors").write_text("other weights")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_text("of another training")
    for number in (2, 4):
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text("{}")
    capsys.readouterr()
    assert check(tmp_path) == 1
    output = said(capsys)
    for number in (2, 4):
        assert f"did not save these weights: model.safetensors in {tmp_path / f'checkpoint-{number}'}." in output


@pytest.mark.parametrize("state", [None, '{"global_step": 4, "log_'])
def test_a_checkpoint_whose_writing_was_interrupted_is_ignored(tmp_path, capsys, state):
    """The ledger has no entry of it yet, and the trainer's state, which is written last, is missing or cut off."""
    ledger = covered(tmp_path, "model.safetensors")
    interrupted = tmp_path / "checkpoint-4"
    interrupted.mkdir()
    (interrupted / "model.safetensors").write_text("half")
    if state is not None:
        (interrupted / "trainer_state.json").write_text(state)
    assert check(tmp_path) == 0
    output = said(capsys)
    assert output.startswith(f"VERIFIED: ({ledger.epsilon():.4g}, ")
    assert "Incomplete, ignored: checkpoint-4. The run was probably stopped while it wrote there." in output
    assert check(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["incomplete_checkpoints"], found["unchecked"]) == (["checkpoint-4"], ["checkpoint-4/model.safetensors"])
    assert (found["epsilon"], found["weights"]) == (ledger.epsilon(), ["model.safetensors"])
    # Its weights are accepted nowhere.
    ledger.save(interrupted)
    assert check(interrupted) == 1
    (interrupted / LEDGER_NAME).unlink()
    (interrupted / "trainer_state.json").write_text("{}")
    assert check(tmp_path) == 1


def test_an_entry_of_the_ledger_keeps_a_checkpoint_from_passing_as_interrupted(tmp_path, capsys):
    """Otherwise whoever removes the trainer's state could exchange the weights."""
    ledger = after(PrivacyLedger.open(statement(steps_planned=20)), 4)
    (tmp_path / "checkpoint-4").mkdir()
    weights = tmp_path / "checkpoint-4" / "model.safetensors"
    weights.write_text("mine")
    ledger.checkpoint(4)
    ledger.speak_for(hashes(weights.parent), model=MODEL)
    ledger.save(tmp_path)
    assert check(tmp_path) == 0
    weights.write_text("exchanged")
    capsys.readouterr()
    assert check(tmp_path) == 1
    assert "did not save these weights" in said(capsys)
    # A run that is resumed from this checkpoint keeps it, and one from an earlier checkpoint replaces it.
    ledger = after(ledger.resume(statement(steps_planned=20), from_step=4), 2)
    ledger.save(tmp_path)
    assert check(tmp_path) == 1
    capsys.readouterr()
    after(ledger.resume(statement(steps_planned=20), from_step=2), 2).save(tmp_path)
    assert check(tmp_path) == 0
    assert "Incomplete, ignored: checkpoint-4." in said(capsys)


@pytest.mark.parametrize("names", [["model.safetensors"], ["adapter_model.safetensors"], SHARDS])
def test_copies_of_saved_weights_in_subfolders_are_recognised(tmp_path, capsys, names):
    """As those of the best checkpoint, which somebody has put beside the last weights."""
    covered(tmp_path, *names)
    copies = [f"{folder}/{name}" for folder in ("best", "for/release") for name in names]
    for copy in copies:
        (tmp_path / copy).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / copy).write_text(Path(copy).name)
    assert check(tmp_path) == 0
    output = said(capsys)
    assert f"Copies of weights that the run has saved: {', '.join(sorted(copies))}." in output
    assert "Not checked" not in output
    assert check(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["copies"], found["unchecked"], found["verdict"]) == (sorted(copies), [], "verified")
    assert [name for name in found["weights"] if "/" in name] == []
    # A copy that was changed is none, nor is a part of a model.
    (tmp_path / copies[-1]).write_text("changed")
    if len(names) > 1:
        (tmp_path / "best" / names[0]).unlink()
    else:
        (tmp_path / "best" / names[0]).write_text("changed")
    is_adapter = names == ["adapter_model.safetensors"]
    assert check(tmp_path, "--json") == is_adapter
    found = json.loads(capsys.readouterr().out)
    assert (found["copies"], bool(found["failures"])) == ([], is_adapter)
    assert len(found["unchecked"]) >= 1


def test_weights_that_no_ledger_covers_are_named(tmp_path, capsys):
    others = ["fp16/model.safetensors", "model.gguf", "onnx/model.onnx"]
    covered(tmp_path, "model.safetensors", "checkpoint-2/optimizer.pt", ".git/lfs/a.bin", "training_args.bin")
    assert check(tmp_path) == 0
    assert "Not checked" not in said(capsys)
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("weights")
    assert check(tmp_path) == 0
    assert f"Not checked: {', '.join(others)}." in said(capsys)


def test_a_pointer_of_git_lfs_is_no_changed_file(tmp_path, capsys):
    covered(tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    assert check(tmp_path) == 1
    assert "Git has not fetched these weights: model.safetensors" in said(capsys)


def test_a_card_of_another_state_or_changed_by_hand_is_named(tmp_path, capsys):
    ledger = covered(tmp_path, "model.safetensors")
    card, part = tmp_path / "README.md", "## Privacy\n\nTrained with (2, 1e-5).\n\n    {}\n"
    for text, expected in (
        (f"# Mine\n\n{marked(part.format(ledger.head))}\nMy words.\n", None),
        (marked(part.format(ledger.entries[0]["hash"])), "README.md is older than the ledger"),
        (marked(part.format(64 * "0")), "README.md is of another ledger"),
        (marked(part.format(ledger.head)).replace("(2,", "(1,"), "or of another run: Trained with (1, 1e-5)."),
    ):
        card.write_text(text, "utf-8")
        assert check(tmp_path) == 0
        output = said(capsys)
        assert "README.md" not in output if expected is None else expected in output


def test_programs_read_the_outcome(tmp_path, capsys):
    ledger = covered(tmp_path, "model.safetensors", "model.gguf")
    assert check(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["weights"], found["unchecked"]) == ("verified", ["model.safetensors"], ["model.gguf"])
    assert (found["epsilon"], found["delta"], found["head"]) == (ledger.epsilon(), 1e-5, ledger.head)
    assert (found["failures"], found["earlier"], found["ledger"]) == ([], {}, ledger.name)
    (tmp_path / "model.safetensors").unlink()
    assert check(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ledger only"
    assert check(tmp_path, "--json", "--head", 64 * "0") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not verified"
    assert "The head (last hash)" in found["failures"][0]
    (tmp_path / LEDGER_NAME).write_text("{}")
    assert check(tmp_path, "--json") == 1
    assert "ask its publisher" in json.loads(capsys.readouterr().out)["failures"][0]


def test_earlier_runs_are_named_by_their_ledgers(tmp_path, capsys):
    ledger = PrivacyLedger.open(statement(), earlier={"0123456789abcdef": Spent(2.0, 1e-5)})
    after(ledger, 2).save(tmp_path)
    assert check(tmp_path) == 0
    output = said(capsys)
    assert "they have the names 0123456789abcdef (ε = 2)." in output
    assert f"ledger {ledger.name}" in output
    assert check(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["earlier"] == {
        "0123456789abcdef": {"epsilon": 2.0, "delta": 1e-5, "unit": None}
    }


def test_terms_are_those_of_the_steps_that_a_target_allows(tmp_path, capsys):
    """What was made twice comes off the end, and who simulates the printed steps gets the ε that is stated."""
    target = get_epsilon(noise_multiplier=1.0, sample_rate=0.05, steps=20, delta=1e-5)
    terms = dict(steps_planned=20, target_epsilon=target)
    ledger = after(PrivacyLedger.open(statement(**terms)), 7)
    ledger.checkpoint(4)
    ledger = ledger.resume(statement(**terms), from_step=4)
    after(ledger, ledger.affordable_steps(16))
    ledger.close()
    ledger.save(tmp_path)
    assert check(tmp_path) == 0
    printed = [int(steps) for steps in re.findall(r"ε computed for (\d+) steps", said(capsys))]
    assert sum(printed) == ledger.steps_run
    assert get_total_epsilon([Releases(1.0, 0.05, steps) for steps in printed], delta=1e-5) <= target
    assert sum(each.steps for each in ledger.plans[0]) > ledger.steps_run


def test_what_cannot_be_asked_is_a_mistake_in_the_arguments(written, tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == main(["verify", str(tmp_path / "nowhere")]) == 2
    assert f"There is no privacy_ledger.json at {tmp_path}" in capsys.readouterr().err
    head = json.loads(written[1])["entries"][-1]["hash"]
    assert main(["verify", str(written[0]), "--head", head[:63]]) == 2
    assert "--head must be the complete last hash" in capsys.readouterr().err


def test_a_ledger_speaks_for_the_weights_that_were_saved(tmp_path, capsys):
    ledger = after(PrivacyLedger.open(statement()), 2)
    for text in ("first", "second"):
        (tmp_path / "model.safetensors").write_text(text)
        ledger.save(tmp_path)
        assert check(tmp_path) == 1
        assert f"did not save these weights: model.safetensors in {tmp_path}." in said(capsys)
        ledger.speak_for(hashes(tmp_path), model=MODEL)
        head = ledger.head
        ledger.speak_for(hashes(tmp_path), model=MODEL)
        assert ledger.head == head
    ledger.save(tmp_path)
    for text in ("first", "second"):  # those of a checkpoint that Transformers has copied, or the last ones
        (tmp_path / "model.safetensors").write_text(text)
        assert check(tmp_path) == 0
        words = r"VERIFIED: .* steps\. The ledger matches the weights in model\.safetensors\. The ε of the whole"
        assert re.match(words, said(capsys))
    (tmp_path / "model.safetensors").unlink()
    assert check(tmp_path) == 0
    words = (
        r"LEDGER ONLY: .* steps\. No weight files were found next to the ledger\. Copy them there .*\. The ε of the whole"
    )
    assert re.match(words, said(capsys))


@pytest.mark.parametrize("is_saved_between", [False, True])
def test_weights_of_an_earlier_checkpoint_are_told_with_their_step(tmp_path, capsys, is_saved_between):
    """As those of the best checkpoint."""
    ledger = PrivacyLedger.open(statement())

    def saved(text):
        (tmp_path / "model.safetensors").write_text(text)
        ledger.speak_for(hashes(tmp_path), model=MODEL)

    for step in (2, 4):
        after(ledger, 2)
        ledger.checkpoint(step)
        saved(f"after {step}")
        if is_saved_between:  # by a callback
            after(ledger, 1)
            saved(f"after {step + 1}")
    after(ledger, 1)
    ledger.close()
    saved("at the end")
    ledger.save(tmp_path)
    for text, told in (
        ("after 2", " They are those of step 2."),
        ("after 4", " They are those of step 4."),
        ("at the end", ""),
    ):
        told = "" if is_saved_between else told
        (tmp_path / "model.safetensors").write_text(text)
        assert check(tmp_path) == 0
        assert f"The ledger matches the weights in model.safetensors.{told} The ε" in said(capsys)
        assert check(tmp_path, "--json") == 0
        step = json.loads(capsys.readouterr().out)["step_of_weights"]
        assert step == (int(told.strip(" .").rpartition(" ")[2]) if told else None)


@pytest.mark.parametrize("name", ["model.safetensors", "README.md", "config.json"])
def test_a_file_that_is_no_ledger_raises_no_alarm(name, written, tmp_path, capsys):
    """What is said of a changed ledger would frighten whoever has named a file beside it."""
    ledger = tmp_path / LEDGER_NAME
    ledger.write_text(written[1], "utf-8")
    (tmp_path / name).write_bytes(b"{}" if name.endswith(".json") else b"\x00\xff# A model")
    assert main(["verify", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{tmp_path / name} is not a ledger. Give its folder, {tmp_path}, if {LEDGER_NAME} is in it." in captured.err
    (tmp_path / name).unlink()
    assert main(["verify", str(tmp_path)]) == 0  # the mend
    ledger.write_text("{}")
    assert main(["verify", str(ledger)]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out
