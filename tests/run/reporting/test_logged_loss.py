"""A raw training loss is shown here and kept nowhere; a private one says if it is clipped."""

import functools
import json
import math
import re
import sys
import types

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback
from transformers.trainer_callback import TrainerState

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.run.reporting.logged_loss import BoundWatch, noise_of_loss
from tests.support.ledgers import statement
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, interrupt, trained, trainer_of

# Whole trainings, which pass the same arrays again and again; the tests of the modules check shapes.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

FOUND = "0.76543"  # as the loss of every example is logged
RAW = dict(report_train_loss="raw")
WHOLE = dict(per_device_train_batch_size=24, gradient_accumulation_steps=1)  # every draw has every example


class Constant(DopplerTrainer):
    """Each example has one loss, whose digits can be looked for."""

    value = 0.7654321

    def compute_per_sample_loss(self, model, inputs):
        return 1e-12 * super().compute_per_sample_loss(model, inputs) + self.value


class Tracker(TrainerCallback):
    """Keeps all that a tracker gets: logs, and the history that some read at the end."""

    def __init__(self):
        self.got = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.got.append(dict(logs))

    def on_train_end(self, args, state, control, **kwargs):
        self.got += state.log_history


def names(logs):
    return set().union(*logs)


def has_raw(folder):
    """The files in a folder with the digits of the loss, or with TensorBoard's name for it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path.relative_to(folder)) for path in files if FOUND.encode() in path.read_bytes()]


def trained_constant(tmp_path, callbacks=(), **options):
    options = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, disable_tqdm=True) | options
    options = WHOLE | options
    trainer = trainer_of(tmp_path, cls=Constant, callbacks=list(callbacks), evaluated=text_data(8, seed=3), **options)
    output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    trainer.save_metrics("train", output.metrics)
    return trainer, output


def test_a_raw_loss_is_on_the_console_and_in_no_file(tmp_path, capsys):
    tracker = Tracker()
    trainer, output = trained_constant(tmp_path, [tracker], **RAW)
    shown = capsys.readouterr().out
    assert shown.count(f"'loss': '{FOUND[:6]}'") == 4  # as four digits of each step
    assert "'train_loss': '0.7654'" in shown
    assert output.training_loss == pytest.approx(Constant.value)  # which a script may look at
    assert not {"loss", "train_loss"} & names(tracker.got)
    assert {"grad_norm", "learning_rate", "epsilon", "eval_loss"} <= names(tracker.got)
    assert not {"loss", "train_loss"} & names([*trainer.state.log_history, output.metrics])
    # An evaluation has the loss of other data, which is the same here.
    folder = tmp_path / "out"
    for state in (*folder.glob("checkpoint-*/trainer_state.json"), folder / "trainer_state.json"):
        assert not {"loss", "train_loss"} & names(json.loads(state.read_text())["log_history"])
    assert "train_loss" not in json.loads((folder / "all_results.json").read_text())
    assert "- **loss**: " in (folder / "README.md").read_text()  # of the evaluation


class Own:
    """A `log` of the user's own, which keeps what it gets and, if `passes`, calls that of `Trainer`."""

    def __init__(self, passes):
        self.passes, self.got = passes, []

    def take(self, trainer, logs, *times):
        self.got.append(dict(logs))
        if self.passes:
            DopplerTrainer.log(trainer, logs, *times)

    def install(self, how, monkeypatch):
        if how in ("on the trainer", "partial"):
            take = functools.partial if how == "partial" else (lambda take, trainer: lambda *logs: take(trainer, *logs))
            return Constant, lambda trainer: setattr(trainer, "log", take(self.take, trainer))
        cls = type("Mine", (Constant,), {"log": lambda trainer, logs, start_time=None: self.take(trainer, logs, start_time)})
        if how == "on the class":
            cls = Constant
            monkeypatch.setattr(cls, "log", lambda trainer, *logs: self.take(trainer, *logs), raising=False)
        return cls, lambda trainer: None


@pytest.mark.parametrize("how", ["on the trainer", "partial", "on the class", "in a subclass"])
@pytest.mark.parametrize("passes", [True, False])
def test_a_log_of_ones_own_gets_no_raw_loss(tmp_path, monkeypatch, capsys, how, passes):
    """Nor does it stay in the metrics that scripts save, though the method may not pass on what it gets."""
    own = Own(passes)
    cls, install = own.install(how, monkeypatch)
    trainer = trainer_of(tmp_path, cls=cls, **WHOLE, **RAW, save_strategy="steps", save_steps=2)
    install(trainer)
    before = dict(vars(trainer))
    output = trainer.train()
    shown = capsys.readouterr().out
    assert shown.count(f"'loss': '{FOUND[:6]}'") == 4  # which this machine alone shows
    assert len(own.got) == 5  # the method is used
    assert "grad_norm" in names(own.got)
    assert not {"loss", "train_loss"} & names([*own.got, *trainer.state.log_history, output.metrics])
    assert ("log" in vars(trainer), vars(trainer).get("log")) == ("log" in before, before.get("log"))
    trainer.save_metrics("train", output.metrics)
    assert has_raw(tmp_path / "out") == []


@pytest.mark.parametrize("how", ["on the trainer", "in a subclass"])
def test_a_log_of_ones_own_gets_the_private_loss(tmp_path, monkeypatch, how):
    own = Own(passes=False)
    cls, install = own.install(how, monkeypatch)
    trainer = trainer_of(tmp_path, cls=cls)
    install(trainer)
    trainer.train()
    assert len([logs for logs in own.got if "loss" in logs]) == 4


def test_no_file_of_a_raw_run_has_its_digits(tmp_path):
    trained_constant(tmp_path, [Tracker()], **RAW, eval_strategy="no")
    assert has_raw(tmp_path / "out") == []


def test_without_an_evaluation_of_a_private_loss_its_digits_are_found(tmp_path):
    """Otherwise the test above would hold nothing."""
    options = dict(report_train_loss="private", noise_multiplier=0.0, noise_seed=1, eval_strategy="no", logging_steps=4)
    _, output = trained_constant(tmp_path, **options)
    number = f"{output.metrics['train_loss']:.5f}"
    files = [path for path in (tmp_path / "out").rglob("*.json") if number in path.read_text()]
    assert {path.name for path in files} >= {"trainer_state.json", "all_results.json"}


def test_the_loss_is_private_by_default_and_goes_everywhere(tmp_path, capsys):
    tracker = Tracker()
    trainer, output = trained_constant(tmp_path, [tracker])
    assert trainer.args.report_train_loss == "private"
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    assert len(losses) == 4
    assert all(abs(loss - Constant.value) > 1e-6 for loss in losses)
    assert [logs["loss"] for logs in tracker.got if "loss" in logs] == losses * 2
    assert "train_loss" in output.metrics
    assert FOUND[:6] not in re.sub(r"'eval_\w+': '[^']*'", "", capsys.readouterr().out)


def test_a_raw_run_is_resumed_and_shows_what_follows(tmp_path, capsys):
    trained_constant(tmp_path, **RAW)
    capsys.readouterr()
    again = trainer_of(tmp_path, cls=Constant, max_steps=6, save_strategy="steps", save_steps=2, **RAW, **WHOLE)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert capsys.readouterr().out.count("'loss': '0.7654'") == 2
    assert not {"loss", "train_loss"} & names(again.state.log_history)
    again.save_model()
    assert main(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("now", ["raw", "none"])
def test_losses_in_a_checkpoint_of_an_earlier_version_are_not_saved_again(tmp_path, now):
    trained_constant(tmp_path, **RAW)
    path = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    for logs in state["log_history"]:
        logs |= {"loss": Constant.value} if "grad_norm" in logs else {}
    path.write_text(json.dumps(state))
    options = dict(report_train_loss=now, save_strategy="steps", save_steps=4, **WHOLE)
    again = trainer_of(tmp_path, cls=Constant, **options)
    again.train(resume_from_checkpoint=str(path.parent))
    again.create_model_card()
    assert not {"loss", "train_loss"} & names(again.state.log_history)
    assert {logs["step"] for logs in again.state.log_history} >= {1, 2, 3, 4}
    saved = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert not {"loss", "train_loss"} & names(saved["log_history"])


def test_a_run_that_was_raw_cannot_turn_private_within_its_budget_and_says_why(tmp_path):
    budget = dict(noise_multiplier=None, target_epsilon=8.0, save_strategy="steps", save_steps=2)
    trained(trainer_of(tmp_path, **RAW, **budget))
    resumed = trainer_of(tmp_path, **budget)
    with refused("budget-spent", match="report_train_loss changed from 'raw' to 'private'"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    as_before = trainer_of(tmp_path, **RAW, **budget)
    as_before.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert PrivacyLedger.load(tmp_path / "out").epsilon() <= 8.0


# --- trackers ---------------------------------------------------------------------------------------------------------


class Writer:
    """As TensorBoard's: it writes what it gets into a file of its folder."""

    def __init__(self, log_dir):
        self.log_dir, self.scalars = log_dir, {}
        writers.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append(value)

    def add_text(self, *names):
        pass

    flush = close = lambda self: None


writers = []


@pytest.fixture
def tensorboard(monkeypatch):
    """A callback as `report_to="tensorboard"` makes it."""
    writers.clear()
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    return "tensorboard"


def test_tensorboard_gets_a_raw_loss_beside_the_folder_of_the_model(tmp_path, tensorboard, capsys):
    trained_constant(tmp_path, report_to=tensorboard, **RAW)
    (writer,) = writers
    assert writer.scalars["train/loss"] == pytest.approx([Constant.value] * 4)
    assert str(writer.log_dir).startswith(f"{tmp_path / 'out'}-raw-loss/")
    assert f"TensorBoard's files in {writer.log_dir} hold the raw training loss" in capsys.readouterr().out


def test_tensorboard_stays_where_it_is_with_a_private_loss(tmp_path, tensorboard, capsys):
    trained_constant(tmp_path, report_to=tensorboard)
    (writer,) = writers
    assert len(writer.scalars["train/loss"]) == 4
    assert str(writer.log_dir).startswith(f"{tmp_path / 'out' / 'runs'}/")
    assert "TensorBoard" not in capsys.readouterr().out


@pytest.mark.parametrize("inside", ["out/logs", "../{}/out", "gs://bucket/logs"])
def test_tensorboard_gets_no_raw_loss_within_the_folder_of_the_model_or_far_away(
    tmp_path, tensorboard, capsys, monkeypatch, inside
):
    folder = inside if "://" in inside else str(tmp_path / inside.format(tmp_path.name))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", folder)
    trained_constant(tmp_path, report_to=tensorboard, **RAW)
    (writer,) = writers
    assert not {"train/loss", "train/train_loss"} & writer.scalars.keys()
    assert "train/grad_norm" in writer.scalars
    shown = capsys.readouterr().out
    words = "TensorBoard does not get the raw training loss, because its files are in output_dir or on another machine"
    assert f"{words} ({folder})" in shown
    assert shown.count("'loss': '0.7654'") == 4


def test_where_a_writer_of_ones_own_writes_counts(tmp_path, tensorboard):
    writer = Writer(str(tmp_path / "out" / "mine"))
    trained_constant(tmp_path, [TensorBoardCallback(writer)], **RAW)
    assert "train/loss" not in writer.scalars
    writer = Writer(str(tmp_path / "elsewhere"))
    trained_constant(tmp_path / "again", [TensorBoardCallback(writer)], **RAW)
    assert len(writer.scalars["train/loss"]) == 4


class Wandb(WandbCallback, Tracker):
    """The class of the real one, with no server; it uploads what is printed."""

    def __init__(self):
        Tracker.__init__(self)

    def _nothing(self, *args, **kwargs):
        pass

    on_log, on_train_end = Tracker.on_log, Tracker.on_train_end
    setup = on_train_begin = on_save = on_predict = _nothing


def test_a_raw_loss_is_not_printed_if_a_tracker_uploads_the_console(tmp_path, capsys):
    tracker = Wandb()
    trained_constant(tmp_path, [tracker], **RAW)
    shown = capsys.readouterr().out
    assert "the raw training loss is not printed, because Wandb would upload what is printed" in shown
    assert "'loss'" not in shown
    assert "'grad_norm'" in shown
    assert not {"loss", "train_loss"} & names(tracker.got)


def test_no_integration_of_transformers_but_tensorboard_gets_a_raw_loss():
    """By their classes, also those that come with a later version."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from doppler_hf.run.reporting.logged_loss import local_callbacks

    # Made without their packages, so that they have nothing to close.
    kinds = {name: type(name, (kind,), {"__del__": lambda self: None}) for name, kind in INTEGRATION_TO_CALLBACK.items()}
    made = {name: object.__new__(kind) for name, kind in kinds.items()}
    made["tensorboard"].tb_writer, made["tensorboard"].logging_dir = None, "elsewhere"
    own = On(log=lambda **_: None)
    assert local_callbacks([*made.values(), own], output_dir="out") == [made["tensorboard"]]
    assert local_callbacks([made["mlflow"], own, console := PrinterCallback()], output_dir="out") == [console]


def test_a_notebook_shows_a_raw_loss_beside_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=None))
    display = types.SimpleNamespace(display=lambda *a, **_: types.SimpleNamespace(update=lambda *a: None), HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(sys.modules["IPython"], "display", display)
    from transformers.utils import notebook

    monkeypatch.setattr(notebook, "disp", display, raising=False)
    lines = []
    monkeypatch.setattr(notebook.NotebookTrainingTracker, "write_line", lambda self, values: lines.append(dict(values)))
    shown = notebook.NotebookProgressCallback()
    trainer, _ = trained_constant(tmp_path, [shown], **RAW)
    assert [line["Training Loss"] for line in lines] == pytest.approx([Constant.value] * 2)
    assert "on_evaluate" not in vars(shown)
    assert not {"loss"} & names(trainer.state.log_history)


# --- the bound --------------------------------------------------------------------------------------------------------


def test_a_loss_above_its_bound_is_told_of_once(tmp_path, capsys):
    class High(Constant):
        value = 8.0

    words = "is close to 5, at which the loss of each record is clipped for logging, so the true loss may be"
    options = dict(data=text_data(400), per_device_train_batch_size=100, per_sample_max_loss=5.0, max_steps=8)
    trained(trainer_of(tmp_path / "1", cls=High, **options))
    shown = capsys.readouterr().out
    assert shown.count(words) == 1
    assert "set per_sample_max_loss=10 or higher" in shown
    trained(trainer_of(tmp_path / "2", cls=High, **options | {"per_sample_max_loss": 20.0}))
    trained(trainer_of(tmp_path / "3", cls=Constant, **options))
    # Nothing but the mean at the end is logged.
    trained(trainer_of(tmp_path / "4", cls=High, logging_steps=500, **options | {"per_sample_max_loss": 20.0}))
    assert "is close to" not in capsys.readouterr().out
    trained(trainer_of(tmp_path / "5", cls=High, logging_steps=500, **options))
    assert capsys.readouterr().out.count(words) == 1


def watched(values, *, batch=64, sigma=7.0, steps=1000, every=1):
    """What is said about private losses, each a mean over some steps."""
    run = statement(
        train_loss="private", per_sample_max_loss=2.0, loss_noise_multiplier=sigma, expected_batch_size=batch,
        sample_rate=batch / statement().num_units, steps_planned=steps,
    )  # fmt: skip
    watch = BoundWatch(run, step=0)
    return [bool(watch.words_on({"loss": value}, step=every * number)) for number, value in enumerate(values, 1)]


@pytest.mark.parametrize(("batch", "sigma"), [(8, 7.0), (8, 0.0), (32, 0.0), (64, 7.0), (1024, 7.0)])
def test_noise_and_batches_of_random_size_do_not_look_like_a_clipped_loss(batch, sigma):
    """A loss at half of the bound, as of an untrained model: 100,000 values, also of batches so small that noise is all."""
    run = statement(train_loss="private", per_sample_max_loss=2.0, loss_noise_multiplier=sigma, expected_batch_size=batch)
    noise = noise_of_loss(run, steps=1)
    assert noise == pytest.approx(sigma * 2.0 / batch)
    generator = np.random.default_rng(0)
    values = 1.0 * generator.poisson(batch, 100_000) / batch + noise * generator.standard_normal(100_000)
    assert not any(watched(values.tolist(), batch=batch, sigma=sigma, steps=10**6))
    for start in range(0, 10_000, 10):  # short runs
        assert not any(watched(values[start : start + 10].tolist(), batch=batch, sigma=sigma, steps=10))


@pytest.mark.parametrize(("batch", "after"), [(1024, 1), (64, 9), (16, 91)])
def test_a_clipped_loss_is_noticed_once_its_noise_is_small(batch, after):
    values = watched([1.98] * 200, batch=batch)
    assert values.index(True) + 1 == after
    assert sum(values) == 1
    assert not any(watched([1.2] * 200, batch=batch))


def test_a_loss_of_training_on_what_comes_later_is_noticed():
    assert watched([0.7] * 100 + [1.9] * 10, batch=1024).index(True) == 100
    assert watched([1.9], batch=64, every=100) == [True]


NOISY = "each value of the logged training loss has noise of ± "


@pytest.mark.parametrize(
    "changed",
    [
        dict(logging_steps=1),
        *thorough(dict(logging_steps=0.01), dict(logging_strategy="epoch", num_train_epochs=60, max_steps=-1)),
    ],
)
def test_the_start_says_how_often_to_log_where_one_value_says_little(tmp_path, capsys, changed):
    terms = dict(max_steps=120, data=text_data(40), per_device_train_batch_size=20, gradient_accumulation_steps=1)
    start = said_at_start(tmp_path / "1", capsys, **terms | changed)
    each = 2 if "num_train_epochs" in changed else 1 if changed["logging_steps"] == 1 else 2
    of_step = math.sqrt(99) * 2 * math.log(2) / 20
    assert f"{NOISY}{of_step / math.sqrt(each):.2g}, while losses are between 0 and 1.39: set logging_str" in start
    # The mend: with so many steps, or more, one value says enough; with fewer it does not.
    enough = int(re.search(r"logging_steps=(\d+) for noise of ± ([\d.]+)", start)[1])
    assert enough == math.ceil((of_step / (0.25 * math.log(2))) ** 2)
    assert NOISY not in said_at_start(tmp_path / "2", capsys, **terms | dict(logging_steps=enough))
    assert NOISY in said_at_start(tmp_path / "3", capsys, **terms | dict(logging_steps=enough - 1))


@pytest.mark.parametrize("steps", [1, 500])
def test_the_start_of_a_small_run_says_that_no_value_is_enough(tmp_path, capsys, steps):
    """20 steps of 8 records: to log less often, as it was told to, is no help if all steps are in one value already."""
    start = said_at_start(tmp_path / "1", capsys, max_steps=20, logging_steps=steps)
    noise = math.sqrt(99) * 2 * math.log(2) / 8 / math.sqrt(20)
    assert f"even its mean over all 20 steps has noise of ± {noise:.2g}: look at evaluations instead" in start
    assert "logging_steps" not in start
    changed = dict(report_train_loss="none", eval_strategy="epoch")
    assert "training loss" not in said_at_start(tmp_path / "2", capsys, max_steps=20, logging_steps=steps, **changed)
    assert "training loss" not in said_at_start(tmp_path / "3", capsys, max_steps=20, logging_strategy="no")


def test_the_start_of_a_loss_of_unknown_size_says_how_large_its_noise_is_and_which_argument_lowers_it(tmp_path, capsys):
    amounts = Dataset.from_list([row | {"labels": row["labels"] / 2} for row in text_data(64)])
    terms = dict(model=tiny_bert(num_labels=1), data=amounts, per_device_train_batch_size=32, max_steps=60)
    terms |= dict(logging_steps=60, gradient_accumulation_steps=1)
    start = said_at_start(tmp_path / "1", capsys, **terms)
    noise = math.sqrt(99) * 5 / 32 / math.sqrt(60)
    assert f"{NOISY}{noise:.2g}, because losses are clipped to 5, which is a guess. " in start
    assert "training loss" not in said_at_start(tmp_path / "2", capsys, per_sample_max_loss=1.0, **terms)


def said_at_start(tmp_path, capsys, **options):
    """Return the lines that are printed before the first step, and make none."""
    # Other tests may have set a level at which the start prints more.
    trainer = trainer_of(tmp_path, callbacks=[On(step_begin=interrupt)], log_level="warning", **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return capsys.readouterr().out


def test_defaults():
    args = DopplerTrainingArguments(output_dir="out", target_epsilon=3.0)
    assert (args.report_train_loss, args.per_sample_max_loss, args.train_loss_budget) == ("private", None, 0.01)
    assert TrainerState().log_history == []


class Kept(DopplerTrainer):
    """Keeps the share of each piece."""

    def training_step(self, *args, **kwargs):
        share = super().training_step(*args, **kwargs)
        self.shares = [*getattr(self, "shares", []), float(share)]
        return share


@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_a_raw_loss_is_the_mean_over_the_batch_however_it_is_cut(tmp_path, pieces):
    """One long row makes the budget of tokens so large that most pieces are empty."""
    rows = text_data(64).to_list()
    rows[5] = {"input_ids": [7] * 16, "attention_mask": [1] * 16, "labels": 1}
    options = dict(
        per_device_train_batch_size=64 // pieces, gradient_accumulation_steps=pieces, max_steps=1, learning_rate=0.0,
        allow_any_learning_rate=True,
        rehearse=False, **RAW,
    )  # fmt: skip
    model = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = trained(trainer_of(tmp_path, cls=Kept, model=model, data=Dataset.from_list(rows), **options))
    with torch.no_grad():
        model.eval()
        losses = [float(model(**pad([row])).loss) for row in rows]
    assert pieces < 16 or trainer.shares.count(0.0) > 2
    assert sum(trainer.shares) == pytest.approx(np.mean(losses), rel=1e-4)
