"""Synthetic texts from end to end: a folder with card and ledger, labels as asked for, and nothing lost or written twice."""

import functools
import json
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pytest
import scipy.stats
from datasets import ClassLabel, Dataset, Value, load_dataset
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import Trainer

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main as doppler_hf
from doppler_hf.privacy import PrivacyLedger
from scripts import synthesize
from scripts.training import finished_model, label_histogram, samples
from scripts.training.labelled_texts import label_names, label_reader, numbers_of_samples, parse_proportions
from scripts.training.samples import Samples
from tests.support import processes
from tests.support.folders import WORDS, write_gpt2
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("own_caches")
LABELS = ["bad", "good"]


def unfinished_files(folder):
    return [path for path in folder.rglob("*") if re.search(r"\.(tmp|[0-9a-f]{8})$", path.name)]


def write_labelled(folder, *, label=None, rows=24):
    """Random sentences with class names, or with the label given."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for split in ("train", "validation"):
        texts = [" ".join(generator.choice(WORDS, 6)) for _ in range(rows)]
        labels = [row % 2 for row in range(rows)] if label is None else [label] * rows
        data = Dataset.from_dict({"text": texts, "label": labels})
        data = data.cast_column("label", ClassLabel(names=LABELS)) if label is None else data
        data.to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture
def flags(tmp_path):
    write_labelled(tmp_path / "texts")
    write_gpt2(tmp_path / "gpt2")
    return flags_for(tmp_path)


def flags_for(folder):
    return [
        *(f"--dataset_dir={folder / 'texts'}", f"--model_name_or_path={folder / 'gpt2'}", f"--output_dir={folder / 'out'}"),
        *("--max_seq_length=40", "--num_samples=12", "--sampling_batch_size=4", "--min_words=2"),
        *("--noise_multiplier=1.0", "--per_sample_max_grad_norm=1.0", "--per_device_train_batch_size=8"),
        *("--use_cpu", "--report_to=none", "--max_steps=2", "--save_steps=1", "--do_eval=false"),
    ]


def rows_of(folder):
    return Dataset.from_parquet(str(folder / "train.parquet"), keep_in_memory=True).to_list()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_a_folder_with_card_and_ledger(flags, tmp_path, capsys):
    out, folder = tmp_path / "out", tmp_path / "out" / "synthetic"
    synthesize.main([*flags, "--proportions=bad=1,good=3", "--lora_r=2"])
    assert (out / "adapter_model.safetensors").is_file()

    loaded = load_dataset(str(folder), split="train")
    assert loaded.features["label"].names == LABELS
    assert Counter(loaded["label"]) == {0: 3, 1: 9}
    assert len(set(loaded["text"])) == 12
    assert all(len(text.split()) >= 2 for text in loaded["text"])

    assert (folder / "privacy_ledger.json").read_bytes() == (out / "privacy_ledger.json").read_bytes()
    ledger, card = PrivacyLedger.load(folder), (folder / "README.md").read_text()
    assert f"({ledger.epsilon():.4g}, {ledger.statement.target_delta:.3g})-differential privacy for one record" in card
    assert "NOT PRIVATE" not in card
    assert "The model `gpt2` was" in card
    assert str(tmp_path) not in card
    assert "| good | 9 |" in card
    capsys.readouterr()
    assert doppler_hf(["verify", str(folder)]) == 0
    assert not unfinished_files(tmp_path / "out")


def test_an_interrupted_sampling_continues_where_it_was(flags, tmp_path):
    folder, whole = tmp_path / "out" / "synthetic", tmp_path / "whole"
    write, written = samples.write_whole, []

    def interrupted(path, text):
        if path.parent.name == "batches" and path.name != "settings.json":
            if len(written) == 2:
                path.with_name(path.name + ".0123abcd").write_text(text[: len(text) // 2])  # killed while it writes
                raise KeyboardInterrupt
            written.append(path)
        write(path, text)

    with mock.patch.object(samples, "write_whole", interrupted), pytest.raises(KeyboardInterrupt):
        synthesize.main(flags)
    assert not (folder / "train.parquet").exists()
    before = {path: path.stat().st_mtime_ns for path in written}
    ledger = (tmp_path / "out" / "privacy_ledger.json").read_bytes()

    with mock.patch.object(DopplerTrainer, "train", side_effect=AssertionError("trained again")):
        synthesize.main(flags)
        synthesize.main([*flags, f"--synthetic_dir={whole}"])
        assert {path: path.stat().st_mtime_ns for path in written} == before  # these batches were not sampled again
        assert rows_of(folder) == rows_of(whole)
        assert (folder / "README.md").read_text() == (whole / "README.md").read_text()
        first = {row["text"] for row in rows_of(folder)}
        assert len(first) == 12

        # More texts: those that are there, and further ones, for the same ε.
        synthesize.main([*flags, "--num_samples=20"])
        more = {row["text"] for row in rows_of(folder)}
        assert first < more
        assert len(more) == 20
        assert (tmp_path / "out" / "privacy_ledger.json").read_bytes() == ledger
        with pytest.raises(SystemExit, match="--synthetic_dir"):
            synthesize.main([*flags, "--temperature=2"])
        with pytest.raises(SystemExit, match="max_steps"):
            synthesize.main([*flags, "--max_steps=3"])


def test_an_interrupted_training_continues_from_its_checkpoint(flags, tmp_path):
    save = DopplerTrainer.save_model

    def interrupted(trainer, output_dir=None, **options):
        if output_dir is None:
            raise KeyboardInterrupt
        save(trainer, output_dir, **options)

    with mock.patch.object(DopplerTrainer, "save_model", interrupted), pytest.raises(KeyboardInterrupt):
        synthesize.main(flags)
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 2
    with pytest.raises(SystemExit, match=r"interrupted run.*learning_rate was None and is now 0\.5"):
        synthesize.main([*flags, "--learning_rate=0.5"])
    synthesize.main(flags)
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 2
    assert len(rows_of(tmp_path / "out" / "synthetic")) == 12


def test_a_model_without_privacy_is_called_that_in_the_card(flags, tmp_path):
    not_private = [flag for flag in flags if not flag.startswith(("--noise", "--per_sample"))]
    synthesize.main([*not_private, "--disable_dp", "--num_samples=2"])
    assert "**NOT PRIVATE:**" in (tmp_path / "out" / "synthetic" / "README.md").read_text()
    assert not (tmp_path / "out" / "synthetic" / "privacy_ledger.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--proportions=bad=1,godo=1"], "'godo'.*bad, good"),
        (["--proportions=bad=-1"], "'bad=-1'"),
        (["--num_samples=0"], "--num_samples"),
        (["--labels=bad,fine"], "bad,good"),
        (["--max_seq_length=8"], "--max_seq_length"),
        (["--temperature=0"], "--temperature"),
        (["--top_p=0"], "--top_p"),
        (["--do_train=false"], "no finished model"),
        (["--label_column=stars"], "'stars'"),
        (["--histogram_epsilon=0"], "--histogram_epsilon"),
        (["--histogram_epsilon=1", "--proportions=bad=1"], "proportions"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(flags, tmp_path, more, message):
    with pytest.raises(SystemExit, match=message):
        synthesize.main([*flags, *more])
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()


def test_arguments_can_be_mended_if_training_was_refused(flags, tmp_path):
    with pytest.raises(ValueError, match="target_delta"):
        synthesize.main([*flags, "--target_delta=0.9"])
    synthesize.main(flags)
    assert len(rows_of(tmp_path / "out" / "synthetic")) == 12


@pytest.mark.parametrize(
    ("label", "more", "message"),
    [
        ("good", [], "--labels"),
        ("secret", ["--labels=bad,good"], "bad, good"),
        ("good", ["--labels=bad,good,bad"], "'bad'"),
    ],
)
def test_labels_that_are_not_public_are_refused_and_not_shown(flags, tmp_path, label, more, message):
    folder = write_labelled(tmp_path / "strings", label=label)
    with pytest.raises(SystemExit, match=message) as refusal:
        synthesize.main([*flags, f"--dataset_dir={folder}", *more])
    assert "secret" not in str(refusal.value)
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()


def test_a_row_without_a_text_is_refused(flags, tmp_path):
    data = Dataset.from_dict({"text": ["a film", None], "label": ["bad", "good"]})
    (tmp_path / "missing").mkdir()
    for split in ("train", "validation"):
        data.to_parquet(tmp_path / "missing" / f"{split}.parquet")
    with pytest.raises(SystemExit, match="NoneType"):
        synthesize.main([*flags, f"--dataset_dir={tmp_path / 'missing'}", "--labels=bad,good"])


def test_empty_data_is_refused(flags, tmp_path):
    folder = write_labelled(tmp_path / "empty", rows=0)
    with pytest.raises(SystemExit, match=r"^error: The split 'train' .* has no rows"):
        synthesize.main([*flags, f"--dataset_dir={folder}"])
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()


def test_the_filter_compares_generated_texts_only():
    found = Samples()
    texts = ["One good film", "one  good\nfilm", "too short", "a\nlabel: good\ntext: b c", "one bad film"]
    assert found.add("good", texts, at_most=9, min_words=3) == 2
    assert found.add("bad", ["One Good film", "a new one", "another new one"], at_most=1, min_words=3) == 1
    assert found.texts == [("good", "One good film"), ("good", "one bad film"), ("bad", "a new one")]
    assert found.left_out == {"duplicate": 2, "too short": 1, "contains a prompt": 1}


def test_a_model_that_writes_nothing_new_ends_with_a_sentence_whose_advice_helps(flags, tmp_path):
    with pytest.raises(SystemExit, match=r"^error: The model wrote no new text.*--synthetic_dir"):
        synthesize.main([*flags, "--min_words=1000"])
    synthesize.main([*flags, f"--synthetic_dir={tmp_path / 'shorter'}"])
    assert len(rows_of(tmp_path / "shorter")) == 12


@pytest.fixture
def finished(flags):
    synthesize.main([*flags, "--num_samples=1"])
    return flags


OTHER_SETTINGS = [
    "--learning_rate=0.5", "--per_device_train_batch_size=4", "--gradient_accumulation_steps=2", "--seed=1",
    "--per_sample_max_grad_norm=0.5", "--noise_multiplier=2", "--clipping=vanilla", "--low_pass_filter=none",
    "--weight_decay=0.1", "--lora_r=2", "--max_seq_length=39", "--warmup_steps=1", "--label_column=other",
]  # fmt: skip


def test_a_finished_model_is_not_used_for_other_settings(finished, tmp_path):
    for flag in OTHER_SETTINGS:
        name, _, value = flag.removeprefix("--").partition("=")
        with pytest.raises(SystemExit, match=f"{name} was .* and is now .*{value}.*--output_dir"):
            synthesize.main([*finished, flag])
    # Nothing of the model depends on these.
    with mock.patch.object(DopplerTrainer, "train", side_effect=AssertionError("trained again")):
        synthesize.main([*finished, "--save_steps=7", "--logging_steps=3", "--per_device_eval_batch_size=2"])
    with mock.patch.object(DopplerTrainer, "train", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        synthesize.main([*finished, OTHER_SETTINGS[0], f"--output_dir={tmp_path / 'another'}"])


def test_a_folder_is_the_same_from_wherever_the_script_is_started(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthesize.main([*finished, "--dataset_dir=texts", "--model_name_or_path=gpt2"])


def change_weights(out):
    weights = load_file(out / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, out / "model.safetensors", {"format": "pt"})


def change_ledger(out):
    path = out / "privacy_ledger.json"
    path.write_text(path.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'))


def remove_ledger(out):
    (out / "privacy_ledger.json").unlink()


def remove_weights(out):
    (out / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [change_weights, change_ledger, remove_ledger, remove_weights])
def test_a_finished_model_that_does_not_match_its_ledger_is_not_used(finished, tmp_path, damage):
    out = tmp_path / "out"
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    damage(out)
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} != before
    with pytest.raises(SystemExit, match="no longer passes doppler-hf verify"):
        synthesize.main([*finished, "--num_samples=2"])
    for path, content in before.items():
        path.write_bytes(content)
    synthesize.main([*finished, "--num_samples=2"])  # the advice, followed


def test_whole_numbers_are_labels_in_the_order_of_the_names_unless_these_are_numbers():
    whole, words = Value("int64"), Value("string")
    assert [label_reader(whole, LABELS)(value) for value in (0, 1)] == LABELS
    assert label_reader(whole, ["1", "5"])(5) == "5"
    assert label_reader(words, LABELS)("good") == "good"
    for feature, names, value in ((whole, LABELS, 2), (whole, LABELS, -1), (whole, ["1", "5"], 0), (words, LABELS, "0")):
        with refused("unknown-label"):
            label_reader(feature, names)(value)


@pytest.mark.parametrize("total", [1, 7, 100])
def test_numbers_of_samples_add_up_and_follow_the_proportions(total):
    parts = {"a": 1.0, "b": 2.5, "c": 0.0}
    numbers = numbers_of_samples(total, parse_proportions(["a", "b", "c"], "a=1,b=2.5,c=0"))
    assert sum(numbers.values()) == total
    assert all(abs(numbers[name] - total * part / 3.5) < 1 for name, part in parts.items())
    assert numbers["c"] == 0


@pytest.mark.parametrize(("column", "sizes"), [(None, {"bad": 4, "good": 20}), ("user", {"bad": 2, "good": 10})])
@pytest.mark.filterwarnings("ignore:.*few:UserWarning")
def test_texts_follow_a_noisy_histogram_whose_epsilon_is_added(flags, tmp_path, capsys, column, sizes):
    own = ["bad"] * 4 + ["good"] * 20
    rows = {"text": [" ".join(WORDS)] * 24, "label": own, "user": [0, 0, 1, 1, *range(2, 12), *range(2, 12)]}
    write_rows(tmp_path / "rows", rows)
    unit = [] if column is None else [f"--privacy_unit_column={column}"]
    asked = [*flags, f"--dataset_dir={tmp_path / 'rows'}", "--labels=bad,good", *unit, "--histogram_epsilon=30"]
    synthesize.main(asked)
    out, folder = tmp_path / "out", tmp_path / "out" / "synthetic"
    kept = (out / label_histogram.HISTOGRAM).read_bytes()
    assert json.loads(kept)["counts"] == sizes  # at ε = 30 there is practically no noise
    assert Counter(LABELS[row["label"]] for row in rows_of(folder)) == numbers_of_samples(12, sizes)
    card, ledger = (folder / "README.md").read_text(), PrivacyLedger.load(folder)
    assert f"ε = {ledger.epsilon() + 30:.4g}, δ = {ledger.statement.target_delta:.3g} for one" in card
    assert "chose these numbers" not in card

    # Noise is drawn once, and the histogram of another ε would be a second one.
    with mock.patch.object(label_histogram, "two_sided_geometric", side_effect=AssertionError("drawn again")):
        synthesize.main([*asked, "--num_samples=16"])
        with pytest.raises(SystemExit, match="--histogram_epsilon 30"):
            synthesize.main([*asked, "--histogram_epsilon=1"])
    assert (out / label_histogram.HISTOGRAM).read_bytes() == kept
    # Its ε is spent. Without the flag, whoever gives the numbers may have read them in the histogram.
    without = [flag for flag in asked if "histogram" not in flag]
    for more in ([], [f"--synthetic_dir={tmp_path / 'copied'}", "--proportions=bad=4,good=20"]):
        synthesize.main([*without, *more])
    for own in (folder, tmp_path / "copied"):
        card = (own / "README.md").read_text()
        assert f"ε = {ledger.epsilon() + 30:.4g}, δ = {ledger.statement.target_delta:.3g} for one" in card
        assert "counted with noise" in card
        assert "not counted in the private data" not in card
    # A copy of the folder, such as from the hub, lacks the counts but not their ε.
    (out / label_histogram.HISTOGRAM).unlink()
    with pytest.raises(SystemExit, match="ε = 30 was drawn for the model"):
        synthesize.main(asked)
    synthesize.main([*without, f"--synthetic_dir={tmp_path / 'moved'}"])
    assert f"ε = {ledger.epsilon() + 30:.4g}, " in (tmp_path / "moved" / "README.md").read_text()


def test_a_histogram_whose_drawing_is_interrupted_counts(tmp_path):
    finished_model.write_record(tmp_path, {}, labels=LABELS)
    draw = functools.partial(
        label_histogram.noisy_histogram, tmp_path, LABELS, epsilon=0.1, read=lambda: (["bad"] * 500, None)
    )
    with mock.patch.object(label_histogram, "write_whole", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        draw()
    assert finished_model.noted_histogram(tmp_path) == 0.1
    with refused("histogram-missing"):
        draw()


def test_the_hub_does_not_get_the_histogram(monkeypatch):
    """The model's card and ledger state the ε of training only."""
    hub, trainer = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    Trainer.push_to_hub(trainer)
    left_out = hub.upload_folder.call_args.kwargs["ignore_patterns"]
    files = ["config.json", label_histogram.HISTOGRAM, f"{label_histogram.HISTOGRAM}.0123abcd"]
    assert [*filter_repo_objects(files, ignore_patterns=left_out)] == ["config.json"]


def write_rows(folder, rows):
    folder.mkdir()
    for split in ("train", "validation"):
        Dataset.from_dict(rows).to_parquet(folder / f"{split}.parquet")


def test_a_histogram_of_noise_is_told(tmp_path):
    finished_model.write_record(tmp_path, {}, labels=LABELS)
    with mock.patch.object(label_histogram, "two_sided_geometric", return_value=-9), refused("histogram-of-noise"):
        label_histogram.noisy_histogram(tmp_path, LABELS, epsilon=0.1, read=lambda: (["bad"] * 5, None))


def test_one_record_or_user_changes_one_count_by_one():
    generator = np.random.default_rng(0)
    for _ in range(100):
        users, labels = generator.integers(0, 6, 30), generator.choice(["a", "b", "c"], 30)
        for left_out, own in ((users == users[0], users), (np.arange(30) == 0, None)):
            counts = [
                label_histogram.exact_counts(labels[kept], None if own is None else own[kept], ["a", "b", "c"])
                for kept in (np.full(30, True), ~left_out)
            ]
            assert sum(abs(counts[0][name] - counts[1][name]) for name in "abc") == 1


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0])
def test_noise_has_the_probabilities_of_its_epsilon(epsilon):
    drawn = Counter(label_histogram.two_sided_geometric(epsilon) for _ in range(20_000))
    ends = int(4 / epsilon)
    within = np.arange(-ends, ends + 1)
    probabilities = np.tanh(epsilon / 2) * np.exp(-epsilon * np.abs(within))  # (1 − p)/(1 + p) · p^|k|, p = e^(−ε)
    found = [*(drawn[int(k)] for k in within), 20_000 - sum(drawn[int(k)] for k in within)]
    expected = 20_000 * np.append(probabilities, 1 - probabilities.sum())
    assert scipy.stats.chisquare(found, expected).pvalue > 1e-6


def test_a_label_with_a_line_break_is_refused():
    with refused("bad-label-name"):
        label_names(ClassLabel(names=["good", "a\ntext: b"]), None)


def test_the_record_of_a_finished_model_names_its_labels(flags, tmp_path):
    synthesize.main([*flags, "--num_samples=1"])
    assert json.loads((tmp_path / "out" / "synthesis.json").read_text())["labels"] == LABELS


def in_all_processes(folder, world):
    """What every process does: it trains, samples, and then only samples."""
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    for number in (12, 20):
        synthesize.main([*flags_for(Path(folder)), f"--num_samples={number}"])


@pytest.mark.thorough
@pytest.mark.usefixtures("flags")
def test_two_processes_train_one_model_and_write_each_text_once(tmp_path):
    processes.launch(__file__, tmp_path, 2, "in_all_processes")
    assert PrivacyLedger.load(tmp_path / "out").statement.expected_batch_size == 16
    assert len({row["text"] for row in rows_of(tmp_path / "out" / "synthetic")}) == 20
    batches = len([*(tmp_path / "out" / "synthetic" / "batches").glob("0*.json")])
    synthesize.main([*flags_for(tmp_path), "--num_samples=20"])  # one process later uses the model of two
    assert len([*(tmp_path / "out" / "synthetic" / "batches").glob("0*.json")]) == batches
    assert not unfinished_files(tmp_path / "out")


if __name__ == "__main__":
    processes.main({"in_all_processes": in_all_processes})
