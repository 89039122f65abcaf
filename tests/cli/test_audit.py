"""The command `doppler-hf audit`: from a recipe to a verdict and an exit code."""

import json

import pytest
from datasets import ClassLabel, Dataset

from doppler_hf import DopplerTrainer
from doppler_hf.audit import AuditTrainer, text_canaries
from doppler_hf.cli import main
from doppler_hf.privacy import GaussianMechanism
from scripts import synthesize
from tests.support.folders import WORDS, write_gpt2
from tests.support.printed import flat


def test_honest_run_ends_with_0_and_writes_one_file(recipe, tmp_path, monkeypatch, capsys):
    """Its options stand before the recipe and behind it, and fields of the recipe behind it."""
    audited, audit = [], AuditTrainer.audit
    monkeypatch.setattr(AuditTrainer, "audit", lambda self, **options: audited.append(self.args) or audit(self, **options))
    words = ["audit", "--canaries", "200", str(recipe), "--confidence", "0.999999"]  # wrong once in a million
    assert main([*words, "--per_device_train_batch_size=8", "--noise_multiplier", "3"]) == 0
    shown = flat(capsys.readouterr().out)
    assert "No defect found" in shown
    assert [(args.noise_multiplier, args.per_device_train_batch_size) for args in audited] == [(3.0, 8)]
    assert "canaries │ 200, " in shown
    written = json.loads((tmp_path / "out" / "privacy_audit.json").read_text())
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "privacy_audit.json"]
    assert (written["canaries"], written["confidence"]) == (200, 0.999999)
    assert len(written["scores"]) == len(written["included"]) == 200
    assert written["lower_bound"] == max(written["lower_bounds"].values())
    assert f"claimed ε │ {written['claimed_epsilon']:.4g}" in shown


def test_broken_run_ends_with_1(recipe, tmp_path, monkeypatch, capsys):
    def without_noise(self, sums, **kwargs):
        return {name: total / self.expected_batch_size for name, total in sums.items()}

    monkeypatch.setattr(GaussianMechanism, "privatize", without_noise)
    assert main(["audit", str(recipe), "--canaries=400"]) == 1
    shown = flat(capsys.readouterr().out)
    written = json.loads((tmp_path / "out" / "privacy_audit.json").read_text())
    assert written["contradicts_claim"]
    assert f"THE CLAIM IS WRONG: this run leaks at least ε = {written['lower_bound']:.4g}" in shown


SCRIPT = """
import sys
from pathlib import Path
from doppler_hf import DopplerTrainer
from tests.support.tiny import text_data
from tests.support.trainers import trainer_of


class Half(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return 0.5 * super().compute_per_sample_loss(model, inputs)


class Mine(Half):
    def __init__(self, *args, note=None, **options):
        super().__init__(*args, **options)


cls = {"Half": Half, "Mine": Mine}[sys.argv[2]]
trainer_of(Path(sys.argv[1]), cls=cls, evaluated=text_data(8), eval_strategy="steps", eval_steps=1, save_strategy="steps",
           save_steps=1, load_best_model_at_end=True, max_steps=2, learning_rate=1e-3).train()
"""


def test_the_training_of_a_script_is_audited_in_its_place(tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_train.py"
    path.write_text(SCRIPT)
    losses = []
    right = AuditTrainer.compute_per_sample_loss
    monkeypatch.setattr(
        AuditTrainer, "compute_per_sample_loss",
        lambda self, *args: losses.append(type(self).__mro__[2].__name__) or right(self, *args),
    )  # fmt: skip
    words = ["audit", "--canaries=100", "--confidence=0.999999", "--script", str(path), str(tmp_path / "mine")]
    assert main([*words, "Half"]) == 0
    shown = capsys.readouterr().out
    assert "canaries │ 100, " in flat(shown)
    assert shown.startswith("Audit: trains once with 100 canaries, in a temporary folder.")
    # The run would warn of its canaries, and name a folder that is gone.
    assert "warning  " not in shown
    assert "privacy_ledger.json" not in shown
    assert set(losses) == {"Half"}
    assert [each.name for each in (tmp_path / "mine" / "out").iterdir()] == ["privacy_audit.json"]
    assert main([*words, "Mine"]) == 2
    error = capsys.readouterr().err
    assert "error: Mine has its own __init__" in error
    assert "define class Audited(AuditTrainer, Mine)" in error  # which tests/audit does


@pytest.mark.parametrize("flag", ["--canaries", "--text-canaries"])
def test_an_audit_that_is_interrupted_does_not_advise_to_go_on_with_it(flag, text_recipe, monkeypatch, capsys):
    step = DopplerTrainer.training_step

    def interrupted(trainer, *args, **options):
        if trainer.state.global_step:
            raise KeyboardInterrupt
        return step(trainer, *args, **options)

    monkeypatch.setattr(DopplerTrainer, "training_step", interrupted)
    assert main(["audit", flag, "20", str(text_recipe), "--target_epsilon=2"]) == 130
    shown = capsys.readouterr().out
    assert "An audit that is interrupted cannot be continued: start it again." in flat(shown)
    assert "resume_from_checkpoint" not in shown


BASELINE = """
import sys
from pathlib import Path
from tests.support.trainers import trainer_of

out = Path(sys.argv[1])
trainer_of(out / "baseline", disable_dp=True, noise_multiplier=None, max_steps=2).train()
if "--private" in sys.argv:
    trainer_of(out / "private", max_steps=2).train()
"""


def test_a_script_that_trains_without_privacy_only_is_told_so(tmp_path, capsys):
    path = tmp_path / "my_train.py"
    path.write_text(BASELINE)
    words = ["audit", "--canaries=20", "--script", str(path), str(tmp_path)]
    for flag in (["--disable_dp"], ["--disable_dp", "True"], ["--disable-dp=yes", "--other"]):
        assert main([*words, *flag]) == 2
        assert f"error: {path} trains without privacy only" in capsys.readouterr().err
        assert [each.name for each in tmp_path.iterdir()] == ["my_train.py"]  # before anything was trained
    assert main(words) == 2
    said = capsys.readouterr()
    assert "This training has no privacy, so it is carried out." in said.out
    assert f"error: {path} trains without privacy only" in said.err
    assert main([*words, "--private", "--disable_dp", "false"]) == 0


SEARCH = """
import sys
from pathlib import Path
from tests.support.search import space, trainer_of_search

trainer_of_search(Path(sys.argv[1])).hyperparameter_search(space, n_trials=3)
"""


@pytest.mark.parametrize("command", ["audit", "check", "estimate"])
def test_a_script_that_searches_is_refused_and_leaves_nothing(command, tmp_path, capsys):
    path = tmp_path / "my_train.py"
    path.write_text(SEARCH)
    assert main([command, "--script", str(path), str(tmp_path / "mine")]) == 2
    assert f"error: {path} calls hyperparameter_search" in capsys.readouterr().err
    assert not [*(tmp_path / "mine" / "out").iterdir()]


@pytest.mark.parametrize("command", ["audit", "check"])
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (BASELINE + "sys.exit(0)", 2, "trains without privacy only"),
        ("import sys\nsys.exit()", 2, "ended without calling DopplerTrainer.train()"),
        ("import sys\nsys.exit(3)", 3, ""),
    ],
)
def test_a_script_that_ends_well_without_a_private_training_has_passed_nothing(
    command, script, code, said, tmp_path, capsys
):
    path = tmp_path / "my_train.py"
    path.write_text(script)
    try:
        ended = main([command, "--script", str(path), str(tmp_path)])
    except SystemExit as error:
        ended = error.code
    assert ended == code
    assert said in capsys.readouterr().err


@pytest.fixture
def text_recipe(tmp_path, own_caches, monkeypatch):
    """A recipe for a tiny language model and texts with labels, without its privacy."""
    monkeypatch.setattr(text_canaries, "CODES", 50)
    folder = tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "validation"):
        data = Dataset.from_dict({"text": [" ".join(WORDS[row % 5 :][:3]) for row in range(30)], "label": [0, 1] * 15})
        data.cast_column("label", ClassLabel(names=["bad", "good"])).to_parquet(folder / f"{split}.parquet")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"dataset_dir: {folder}\nmodel_name_or_path: {write_gpt2(tmp_path / 'gpt2')}\noutput_dir: {tmp_path / 'out'}\n"
        "text_column: text\nmax_seq_length: 40\nper_device_train_batch_size: 16\nmax_steps: 3\nsave_strategy: steps\n"
        "save_steps: 1\ndisable_tqdm: true\nuse_cpu: true\nlearning_rate: 1e-3\n"
    )
    return path


def written_in(folder):
    return json.loads((folder / "privacy_audit.json").read_text())


@pytest.mark.parametrize("privacy", ["--target_epsilon=2", "--disable_dp"])
def test_a_language_model_is_audited_with_texts(privacy, text_recipe, tmp_path, capsys):
    assert main(["audit", "--text-canaries", "40", str(text_recipe), privacy, "--confidence", "0.999999"]) == 0
    shown, written = flat(capsys.readouterr().out), written_in(tmp_path / "out")
    assert "Canaries in the texts, ranked among 50 codes" in shown
    rows = {each: [found for found in written["text_canaries"] if found["insertions"] == each] for each in (0, 1, 10, 100)}
    assert [len(rows[0]) + len(rows[1]), len(rows[10]), len(rows[100])] == [40, 4, 1]
    for insertions, found in rows.items():
        ranks, repeated = sorted(each["rank"] for each in found), sum(each["is_repeated"] for each in found)
        middle = (ranks[(len(ranks) - 1) // 2] + ranks[len(ranks) // 2]) / 2
        name = f"{insertions}" if insertions else "0 (left out)"
        assert f"│ {name} │ {len(ranks)} │ {middle:.0f} │ {ranks[0]} │ {repeated} │" in shown
    assert [*written["lower_bounds"]] == ["one run"]
    if privacy == "--disable_dp":
        assert "claimed ε │ ∞, no privacy" in shown
        assert "This run claims no privacy. The attack proves an ε of at least" in shown
        assert written["claimed_epsilon"] is None
    else:
        assert "No defect found" in shown
        assert f"claimed ε │ {written['claimed_epsilon']:.4g}" in shown
        assert written["claimed_epsilon"] <= 2
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["privacy_audit.json"]


@pytest.mark.parametrize("privacy", ["--target_epsilon=2", "--disable_dp"])
def test_the_writer_of_synthetic_texts_is_audited(privacy, text_recipe, tmp_path, capsys):
    words = ["audit", "--text-canaries", "20", "--script", synthesize.__file__, str(text_recipe), privacy]
    assert main(words) == 0
    assert "0 (left out)" in capsys.readouterr().out
    assert len(written_in(tmp_path / "out")["text_canaries"]) == 23
    assert not (tmp_path / "out" / "synthetic").exists()
    assert not [*(tmp_path / "out").glob("*.safetensors")]


def test_canaries_of_two_kinds_are_refused(text_recipe, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["audit", "--text-canaries", "20", "--canaries", "20", str(text_recipe)])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--confidence", "1"], "error: confidence must be in (0, 1); got 1.0. A usual value is 0.95."),
        (["--canaries", "0"], "error: num_canaries, the number of records that the audit attacks, must be from 20"),
        (["--text-canaries", "19"], "error: num_canaries, the number of records that the audit attacks, must be from 20"),
        (["--text-canaries", "20"], "error: Canaries made of text need a causal language model"),
        (["--leerning_rate", "1"], "error: Recipe and flags fit none of glue, causal_lm, image_classification"),
        (["--noise_multiplier", "0"], "error: This run claims no privacy"),
    ],
)
def test_mistakes_end_with_2_and_one_line(words, message, recipe, capsys):
    assert main(["audit", str(recipe), *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
