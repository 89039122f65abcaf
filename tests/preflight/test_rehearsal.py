"""The rehearsal: what would fail after the first steps is refused before them, and nothing else is changed."""

import itertools
import math
import multiprocessing
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState

from doppler_hf import DopplerTrainer
from doppler_hf.errors import Refusal
from doppler_hf.preflight import rehearsal
from doppler_hf.preflight.rehearsal import few_rows, refuse_undispatched
from doppler_hf.privacy import LEDGER_NAME
from scripts.training.metrics import accuracy_from_logits
from tests.support.adapters import add_adapter
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import OfLogits, On, on_cpu, trained, trainer_of, weights

EVALUATES = dict(eval_strategy="steps", eval_steps=2)
SAVES = dict(save_strategy="steps", save_steps=2)
BEST = EVALUATES | SAVES | dict(load_best_model_at_end=True)
NO_TOKENS = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
ADAPTER = LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False)


class Unsaveable:
    """A tokenizer that cannot be written."""

    pad_token_id, model_input_names = 0, ["input_ids"]

    def save_pretrained(self, folder):
        raise OSError("Not found: vocab.txt")


def with_adapter():
    return add_adapter(tiny_bert(), ADAPTER)


def generating(**options):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16, **NO_TOKENS))
    model.generation_config.update(**options)
    return model


class OfGenerating(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return super().compute_per_sample_loss(model, inputs | {"labels": inputs["input_ids"]})


class Counting(ExportableState, TrainerCallback):
    """Has something to say to a checkpoint."""

    def __init__(self, count):
        self.count = count

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


class OddSchedule(DopplerTrainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        schedule = super().create_scheduler(num_training_steps, optimizer)
        schedule.rule = lambda step: 1.0
        return schedule


def missing(name):
    return lambda prediction: {"found": prediction.missing}[name]


TWO_SETS = dict(a=text_data(8, seed=1), b=text_data(8, seed=2))
FAILS = {
    "a metric that raises": (
        dict(compute_metrics=missing("found"), **EVALUATES),
        ("rehearsal-failed", "compute_metrics.*AttributeError"),
    ),
    "a metric that raises in an evaluation after the training": (
        dict(compute_metrics=missing("found")),
        ("rehearsal-failed", "compute_metrics.*AttributeError"),
    ),
    "a metric that returns nothing": (
        dict(compute_metrics=lambda prediction: None, **EVALUATES),
        ("rehearsal-failed", "compute_metrics.*'NoneType'"),
    ),
    "an unknown metric": (
        dict(compute_metrics=accuracy_from_logits, metric_for_best_model="acuracy", **BEST),
        ("no-such-metric", "'acuracy'.* eval_loss, eval_accuracy, eval_majority_class_accuracy"),
    ),
    "a best metric that is None": (
        dict(compute_metrics=lambda prediction: {"f1": None}, metric_for_best_model="f1", **BEST),
        ("metric-not-a-number", "'f1' .*NoneType"),
    ),
    "a best metric of each class": (
        dict(compute_metrics=lambda prediction: {"f1": {"name": 0.1}}, metric_for_best_model="eval_f1", **BEST),
        ("metric-not-a-number", "'eval_f1' .*dict"),
    ),
    "several sets, and the best by the loss": (
        dict(evaluated=TWO_SETS, **BEST),
        ("no-such-metric", "'loss'.* eval_a_loss, eval_b_loss"),
    ),
    "a schedule by the loss of several sets": (
        dict(evaluated=TWO_SETS, lr_scheduler_type="reduce_lr_on_plateau", **EVALUATES),
        ("no-such-metric", "'loss'.* eval_a_loss, eval_b_loss"),
    ),
    "a metric that is no number": (
        dict(compute_metrics=lambda prediction: {"confusion": torch.eye(2).numpy()}, **(EVALUATES | SAVES)),
        ("rehearsal-failed", "compute_metrics .*TypeError: .*ndarray"),
    ),
    "adapters that cannot be loaded": (
        lambda: dict(model=with_adapter(), **BEST),
        ("adapters-not-loadable", "get_peft_model"),
    ),
    "a tokenizer that cannot be saved": (
        dict(processing_class=Unsaveable(), **SAVES),
        ("rehearsal-failed", "OSError: Not found"),
    ),
    "a state of a callback that is no JSON": (
        lambda: dict(callbacks=[Counting({("a", "b"): 1})], **SAVES),
        ("rehearsal-failed", "a checkpoint failed with TypeError: keys must be str"),
    ),
    "a schedule that cannot be saved": (
        dict(cls=OddSchedule, **SAVES),
        ("rehearsal-failed", "a checkpoint failed with .*pickle"),
    ),
    "a tokenizer that save_model() cannot save": (
        dict(processing_class=Unsaveable()),
        ("rehearsal-failed", r"save_model\(\) .*OSError: Not"),
    ),
    "a generation config that cannot be saved": (
        lambda: dict(model=generating(temperature=0.5), cls=OfGenerating),
        ("rehearsal-failed", r"save_model\(\) .*GenerationConfig is invalid"),
    ),
}


def options_of(case):
    options, refusal = FAILS[case]
    return (options() if callable(options) else dict(options)), refusal


@pytest.mark.parametrize("case", FAILS)
def test_what_would_fail_later_is_refused_before_anything_is_spent(tmp_path, case):
    options, (code, said) = options_of(case)
    trainer = trainer_of(tmp_path, **options)
    with refused(code, match=f"(?s){said}"):
        trainer.train()
    assert trainer.privacy.ledger is None
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    assert not [*(tmp_path / "out").glob("rehearsal-*")]


def test_a_disk_without_space_for_the_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(1000))
    with refused("disk-full", match=r"12,\d\d\d bytes.* 1,000"):
        trainer_of(tmp_path, **SAVES).train()
    trainer_of(tmp_path).train()  # which saves nothing


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")
def test_adapters_train_without_the_best_model_or_as_a_model_of_peft(tmp_path):
    assert trained(trainer_of(tmp_path / "a", model=with_adapter(), **(EVALUATES | SAVES))).state.global_step == 4
    best = trained(trainer_of(tmp_path / "b", model=get_peft_model(tiny_bert(), ADAPTER), **BEST))
    assert best.state.best_model_checkpoint is not None


class Plain(nn.Module):
    """A module of one's own whose input and output embeddings are tied, and one of whose weights is not in one piece."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.middle = nn.Linear(16, 16)
        self.middle.weight = nn.Parameter(torch.randn(16, 16).t() / 4)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.head(self.middle(self.embedding(input_ids).mean(dim=1)))


def test_a_module_with_tied_weights_is_saved_chosen_and_resumed(tmp_path):
    trainer = trained(trainer_of(tmp_path, model=Plain(), cls=OfLogits, **BEST))
    chosen = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(chosen[name], value.cpu(), rtol=0, atol=0)
    Plain().load_state_dict(chosen)
    assert not trainer.privacy.ledger.unknown_weights(Path(trainer.state.best_model_checkpoint))
    resumed = trainer_of(tmp_path, model=Plain(), cls=OfLogits, max_steps=6, **BEST)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert resumed.state.global_step == 6
    assert resumed.model.head.weight is resumed.model.embedding.weight


def area(prediction):
    assert len({*prediction.label_ids}) > 1, "one class"
    return {"auc": roc_auc_score(prediction.label_ids, prediction.predictions[:, 1])}


def of_many(prediction):
    if len(prediction.label_ids) < 20:
        raise ValueError("too few rows")
    return accuracy_from_logits(prediction)


def in_order(num_examples=40):
    """Sorted by label, as some public data sets are."""
    rows = text_data(num_examples, seed=1)
    return rows.select(sorted(range(num_examples), key=rows["labels"][:].__getitem__))


@pytest.mark.parametrize(("metrics", "evaluated"), [(area, in_order()), (of_many, Rows(in_order()))])
def test_a_metric_that_two_rows_do_not_define_is_no_error(tmp_path, metrics, evaluated):
    assert trained(trainer_of(tmp_path, compute_metrics=metrics, evaluated=evaluated, **EVALUATES)).state.global_step == 4


class Summed:
    """Adds up over batches, and returns something from the last one alone."""

    right = rows = 0

    def __call__(self, prediction, compute_result):
        self.right += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        self.rows += len(prediction.label_ids)
        if compute_result:
            return {"accuracy": self.right / self.rows}


def test_metrics_that_are_added_up_over_batches_are_no_error(tmp_path):
    options = dict(batch_eval_metrics=True, per_device_eval_batch_size=1)
    trainer = trained(trainer_of(tmp_path, compute_metrics=Summed(), **EVALUATES, **options))
    assert "eval_accuracy" in trainer.state.log_history[-2]


class Adding:
    """Adds up over batches, and begins anew after the last one, as most such metrics do."""

    def __init__(self):
        self.rows, self.counts = 0, []

    def __call__(self, prediction, compute_result):
        self.rows += len(prediction.label_ids)
        if compute_result:
            self.counts.append(self.rows)
            self.rows = 0
            return {"rows": self.counts[-1]}


def test_the_first_batch_of_an_own_loader_does_not_count_in_the_next_evaluation(tmp_path):
    class OwnLoader(DopplerTrainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return super().get_eval_dataloader(eval_dataset)

    adding = Adding()
    options = dict(batch_eval_metrics=True, per_device_eval_batch_size=3, max_steps=2, eval_strategy="steps", eval_steps=1)
    evaluated = text_data(8, seed=1)
    trained(trainer_of(tmp_path, cls=OwnLoader, compute_metrics=adding, evaluated=evaluated, **EVALUATES | options))
    assert adding.counts == [3, 8, 8]


@pytest.mark.parametrize(("size", "count"), [(1, 2), (200, 64)])
@pytest.mark.parametrize("kind", [Dataset.from_list, Rows, Dataset.to_iterable_dataset])
def test_few_rows_are_few_and_no_more_than_there_are(kind, size, count):
    rows = [dict(input_ids=[index], labels=int(index > 150)) for index in range(size)]
    given = kind(Dataset.from_list(rows)) if kind is Dataset.to_iterable_dataset else kind(rows)
    found = [*few_rows(given, count)]
    assert len(found) == min(size, count)
    assert all(row in rows for row in found)
    assert all(found.count(row) == 1 for row in found)


def test_two_rows_have_two_labels():
    found = few_rows(in_order(500), 2)
    assert sorted(found["labels"]) == [0, 1]


class Words:
    def __repr__(self):
        return "words"


def test_metrics_that_are_no_json_lose_no_run(tmp_path):
    """Without checkpoints, as the stock trainer."""
    found = {
        "confusion": np.eye(2),
        "best": np.float32(0.5),
        "of_classes": {("a", "b"): 1, "c": torch.ones(1)},
        "own": Words(),
    }
    trainer = trained(trainer_of(tmp_path, compute_metrics=lambda prediction: dict(found), **EVALUATES))
    assert trainer.state.log_history[-2]["eval_best"] == 0.5


class Watcher(TrainerCallback):
    """Notes what it is told of, and the numbers that it gets."""

    def __init__(self):
        self.told = []

    def note(self, event):
        return lambda args, state, control, **kwargs: self.told.append((event, state.global_step))

    def __getattribute__(self, name):
        return self.note(name) if name.startswith("on_") else super().__getattribute__(name)


def without_times(history):
    return [
        {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))} for entry in history
    ]


@on_cpu
@pytest.mark.parametrize(
    "options",
    [dict(metric_for_best_model="a_loss"), *thorough(dict(eval_on_start=True, metric_for_best_model="eval_b_accuracy"))],
)
def test_a_training_is_the_same_with_and_without(tmp_path, options, capsys):
    found = []
    for rehearse in (True, False):
        trainer = trainer_of(
            tmp_path / str(rehearse), model=tiny_bert(hidden_dropout_prob=0.1), noise_seed=3, rehearse=rehearse,
            evaluated=TWO_SETS, compute_metrics=accuracy_from_logits, **BEST, **options,
        )  # fmt: skip
        trainer.add_callback(watcher := Watcher())
        capsys.readouterr()
        trainer.train()
        lines = len(capsys.readouterr().out.splitlines())
        found.append((weights(trainer), without_times(trainer.state.log_history), watcher.told, lines))
    (first, *of_first), (second, *of_second) = found
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert of_first == of_second


@pytest.mark.parametrize("values", [[math.nan], [math.nan, math.nan, 0.5]], ids=["never", "only at first"])
def test_the_end_of_a_run_says_that_no_best_model_was_loaded(tmp_path, capsys, values):
    """The first of the values goes to the check before the first step, and the last one stays."""
    options = dict(metric_for_best_model="f1", max_steps=2, **(BEST | dict(eval_steps=1, save_steps=1)))
    f1 = itertools.chain(values, itertools.repeat(values[-1]))
    with pytest.warns(UserWarning, match="is NaN on the first rows"):
        trainer = trained(trainer_of(tmp_path, compute_metrics=lambda _: {"f1": next(f1)}, **options))
    is_never = trainer.state.best_global_step is None
    assert is_never == (len(values) == 1)
    words = "load_best_model_at_end has loaded nothing, because metric_for_best_model='f1' was NaN in every evaluation."
    assert capsys.readouterr().out.count(words) == is_never


def test_a_best_metric_without_a_value_is_told_of(tmp_path):
    options = dict(metric_for_best_model="f1", max_steps=1, **(BEST | dict(eval_steps=1, save_steps=1)))
    with pytest.warns(UserWarning, match="metric_for_best_model='f1' is NaN on the first rows.* never chosen as the best"):
        trainer_of(tmp_path, compute_metrics=lambda _: {"f1": float("nan")}, **options).train()


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def test_the_evaluation_leaves_each_layer_in_its_mode(tmp_path):
    """A layer may be in evaluation mode by the user's choice, and the others must have dropout again."""
    found = []
    trainer = trainer_of(
        tmp_path, callbacks=[On(train_begin=lambda model, **_: found.append(modes(model)))], max_steps=1, **EVALUATES
    )
    trainer.model.train()
    trainer.model.bert.embeddings.eval()
    before = modes(trainer.model)
    trainer.train()
    assert found == [before]
    assert len({*before.values()}) == 2


# --- what the loop does with arguments, processes and whole evaluation sets -----------------------------------------------


def refused_unspent(trainer, code):
    with pytest.raises(Refusal) as refusal:
        trainer.train()
    assert refusal.value.code == code
    assert trainer.privacy.ledger is None
    assert not (Path(trainer.args.output_dir) / LEDGER_NAME).exists()
    return str(refusal.value)


def test_evaluations_that_are_asked_for_later_need_a_delay(tmp_path):
    trainer = trainer_of(tmp_path, evaluated=text_data(8, seed=1))
    trainer.args.set_evaluate("steps", 3)
    assert "Set args.eval_delay = 0" in refused_unspent(trainer, "no-eval-delay")
    trainer.args.eval_delay = 0
    assert any("eval_loss" in log for log in trained(trainer).state.log_history)


def test_evaluations_need_a_set(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.args.set_evaluate("steps", 3, delay=0)
    refused_unspent(trainer, "nothing-to-evaluate")


def test_a_set_that_only_a_later_evaluation_uses_is_tried_before_the_training(tmp_path):
    raw = text_data(8, seed=1).rename_column("input_ids", "words")
    assert "rename" in refused_unspent(trainer_of(tmp_path, evaluated=raw), "no-inputs")
    trainer = trained(trainer_of(tmp_path, evaluated=raw.rename_column("words", "input_ids")))
    assert trainer.evaluate()["eval_loss"] > 0.0


class Locked(Rows):
    """What a process takes along when it starts, and no file can hold."""

    def __init__(self, rows=None):
        super().__init__(rows)
        self.lock = multiprocessing.get_context("spawn").Lock()


class WithLambda(Rows):
    def __init__(self, rows=None):
        super().__init__(rows)
        self.change = lambda row: row


NOT_SENT = {
    "a transform": dict(evaluated=text_data(8, seed=1).with_transform(lambda rows: rows)),
    "an attribute": dict(evaluated=WithLambda(text_data(8, seed=1))),
    "one of two sets": dict(evaluated=dict(a=text_data(8, seed=1), b=WithLambda(text_data(8, seed=2)))),
    "a collator": dict(collator=lambda rows: pad(rows)),
}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("case", NOT_SENT)
def test_what_a_worker_of_evaluations_cannot_get_is_refused(tmp_path, case, method):
    workers = dict(dataloader_num_workers=1, dataloader_multiprocessing_context=method)
    said = refused_unspent(trainer_of(tmp_path, **NOT_SENT[case], **EVALUATES, **workers), "not-for-workers")
    assert ("data_collator" in said) == (case == "a collator")
    assert ("eval_dataset['b']" in said) == (case == "one of two sets")


def test_the_start_method_of_the_process_counts(tmp_path, monkeypatch):
    """As the default of Python 3.14."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "forkserver")
    refused_unspent(
        trainer_of(tmp_path, **NOT_SENT["a transform"], **EVALUATES, dataloader_num_workers=1), "not-for-workers"
    )


def test_what_a_worker_can_get_is_not_refused(tmp_path):
    trainer = trainer_of(tmp_path, evaluated=Locked(text_data(8, seed=1)), **EVALUATES, dataloader_num_workers=1)
    rehearsal._try_workers(trainer, trainer.eval_dataset, pad)
    trainer.args.dataloader_multiprocessing_context = "spawn"
    rehearsal._try_workers(trainer, trainer.eval_dataset, pad)
    trainer.args.dataloader_multiprocessing_context = "fork"
    rehearsal._try_workers(trainer, NOT_SENT["an attribute"]["evaluated"], pad)


def with_a_rare_class(size=200):
    """One row of class 2, which is none of the 2 or 64 rows that are evaluated."""
    rows = [row | {"labels": 2 if place == 1 else place % 2} for place, row in enumerate(text_data(size, seed=1))]
    assert not {1}.intersection(rehearsal.spread_row_numbers(size, 64))
    return Dataset.from_list(rows)


def of_known_classes(prediction):
    names = {0: "no", 1: "yes"}
    return {"share_of_yes": np.mean([names[label] == "yes" for label in prediction.label_ids.tolist()])}


@pytest.mark.parametrize("kind", [lambda rows: rows, Rows, lambda rows: {"a": text_data(8), "b": rows}])
def test_a_metric_that_fails_on_the_whole_set_alone_is_refused(tmp_path, kind):
    options = dict(model=tiny_bert(num_labels=3), evaluated=kind(with_a_rare_class()), compute_metrics=of_known_classes)
    said = refused_unspent(trainer_of(tmp_path, **options, **EVALUATES), "metric-fails")
    assert "KeyError on the labels of the whole evaluation set: 2" in said


def test_a_score_that_a_single_class_leaves_undefined_is_refused(tmp_path):
    evaluated = text_data(100, seed=1).map(lambda row: {"labels": 1})
    with pytest.raises(ValueError, match=r"compute_metrics, on up to 64 rows, failed with AssertionError: one class"):
        trainer_of(tmp_path, evaluated=evaluated, compute_metrics=area, **EVALUATES).train()


def test_a_metric_of_tokens_meets_all_labels(tmp_path):
    config = tiny_bert(num_labels=4).config
    evaluated = [
        row | {"labels": [3 if place == 1 else place % 2] * len(row["input_ids"])}
        for place, row in enumerate(text_data(150, seed=1))
    ]

    def of_tokens(prediction):
        assert prediction.predictions.shape[:2] == prediction.label_ids.shape
        assert 3 not in prediction.label_ids, "an unknown tag"
        return {"accuracy": 0.5}

    options = dict(data=Dataset.from_list(evaluated[:24]), evaluated=Dataset.from_list(evaluated), collator=pad_tokens)
    trainer = trainer_of(
        tmp_path, model=BertForTokenClassification(config), compute_metrics=of_tokens, **options, **EVALUATES
    )
    assert "AssertionError on the labels of the whole evaluation set: an unknown tag" in refused_unspent(
        trainer, "metric-fails"
    )


def pad_tokens(rows):
    batch = pad([row | {"labels": 0} for row in rows])
    length = batch["input_ids"].shape[1]
    return batch | {"labels": torch.tensor([row["labels"] + [-100] * (length - len(row["labels"])) for row in rows])}


def test_a_metric_of_groups_that_needs_the_whole_set_is_no_error(tmp_path):
    groups = np.arange(100) % 5

    def of_groups(prediction):
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"worst": min(right[groups == group].mean() for group in range(5))}

    options = dict(evaluated=text_data(100, seed=1), compute_metrics=of_groups, metric_for_best_model="worst")
    assert trained(trainer_of(tmp_path, **options, **BEST)).state.best_metric is not None


# --- evaluation loaders of the user's own ---


def with_loader(make, *, on_object=False):
    """Return options of a trainer with its own evaluation loader, set in a class or on the trainer."""

    class OwnLoader(DopplerTrainer):
        def __init__(self, **options):
            super().__init__(**options)
            if on_object:
                self.get_eval_dataloader = lambda eval_dataset=None: make(self.eval_dataset)

    if not on_object:
        OwnLoader.get_eval_dataloader = lambda self, eval_dataset=None: make(self.eval_dataset)
    return dict(cls=OwnLoader, **EVALUATES)


def batches(rows):
    return DataLoader(list(rows), batch_size=4, shuffle=True, collate_fn=pad)


def odd_batches(rows):
    return DataLoader(list(rows), batch_size=4, collate_fn=lambda rows: {"tokens": pad(rows)["input_ids"]})


def failing(rows):
    raise FileNotFoundError("dev.csv")


OWN_LOADERS = {
    "batches that the model cannot take": (odd_batches, {}),
    "a loader that cannot be made": (failing, {}),
    "a metric with a mistake": (batches, dict(compute_metrics=missing("found"))),
}


@pytest.mark.parametrize("on_object", [False, True])
@pytest.mark.parametrize("name", OWN_LOADERS)
def test_the_first_batch_of_an_own_loader_is_tried(tmp_path, name, on_object):
    make, options = OWN_LOADERS[name]
    trainer = trainer_of(tmp_path, **with_loader(make, on_object=on_object), **options)
    with refused("rehearsal-failed", match="first batch of your get_eval_dataloader"):
        trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()


def test_the_best_metric_is_looked_for_in_evaluations_of_an_own_loader(tmp_path):
    options = with_loader(batches) | BEST | dict(metric_for_best_model="f2")
    with refused("no-such-metric", match="f2"):
        trainer_of(tmp_path, compute_metrics=accuracy_from_logits, **options).train()


class Counted(list):
    """Rows that count how often one of them is read."""

    read = 0

    def __getitem__(self, index):
        Counted.read += 1
        return super().__getitem__(index)


def test_only_one_batch_of_an_own_loader_is_read_and_no_number_of_the_run_changes(tmp_path):
    rows, seen = Counted(text_data(64, seed=1)), []

    def make(_):
        return DataLoader(rows, batch_size=4, shuffle=True, collate_fn=pad)

    def at_first_step(**_):
        seen.append(Counted.read)

    Counted.read = 0
    options = with_loader(make) | dict(noise_seed=1, max_steps=2)
    trained(trainer_of(tmp_path / "1", callbacks=[On(step_begin=at_first_step)], **options))
    assert seen[0] == 4
    assert Counted.read == 68
    first, second = (
        trained(trainer_of(tmp_path / str(tried), rehearse=tried, **options)).model.state_dict() for tried in (True, False)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_metric_that_the_first_batch_of_an_own_loader_leaves_undefined_is_a_note(tmp_path, capsys):
    rows = sorted(text_data(64, seed=1), key=lambda row: row["labels"])
    make = lambda _: DataLoader(rows, batch_size=4, collate_fn=pad)  # noqa: E731
    both = lambda prediction: {"auc": roc_auc_score_of(prediction)}  # noqa: E731
    trainer = trained(trainer_of(tmp_path, compute_metrics=both, **with_loader(make)))
    assert (
        "compute_metrics failed with a ValueError on the first batch of your get_eval_dataloader" in capsys.readouterr().out
    )
    assert [log for log in trainer.state.log_history if "eval_auc" in log]


def roc_auc_score_of(prediction):
    if len({*prediction.label_ids.tolist()}) < 2:
        raise ValueError("Only one class")
    return roc_auc_score(prediction.label_ids, prediction.predictions[:, 1])


# --- batches that one process sends to the others ---


def test_batches_of_several_lengths_are_not_sent_from_one_process_to_others(tmp_path):
    """On one process the settings are those of several, of which the real ones are in tests of processes."""
    by_length = Rows(sorted(text_data(16), key=lambda row: len(row["input_ids"])))
    with refused("batches-not-dispatched", match="dispatch_batches"):
        refuse_undispatched(by_length, collate=pad, batch_size=4, processes=2)
    padded = lambda rows: {name: nn.functional.pad(each, (0, 9 - each.shape[1])) if each.ndim > 1 else each  # noqa: E731
                           for name, each in pad(rows).items()}  # fmt: skip
    refuse_undispatched(text_data(16), collate=padded, batch_size=4, processes=2)
    refuse_undispatched(Rows(list(text_data(16))), collate=padded, batch_size=4, processes=2)
    refuse_undispatched(text_data(4), collate=pad, batch_size=4, processes=2)
    images = Rows([dict(pixel_values=torch.zeros(3, 4, 4), labels=0)] * 16)
    refuse_undispatched(images, collate=default_data_collator, batch_size=4, processes=2)
    with refused("batches-not-dispatched"):
        wide = [dict(pixel_values=torch.zeros(3, 4, 4 + row // 4), labels=0) for row in range(16)]
        refuse_undispatched(Rows(wide), collate=default_data_collator, batch_size=4, processes=2)
    own = dict(accelerator_config={"dispatch_batches": True}, **EVALUATES)
    assert trained(trainer_of(tmp_path, **own)).state.global_step == 4  # in a single process there is nothing to send
