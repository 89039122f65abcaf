"""The rehearsal: what would fail after the first steps is refused before them, and nothing else is changed."""

import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import nn
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback

from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer, DopplerSFTConfig, DopplerSFTTrainer, DopplerTrainer
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.run import rehearsal
from doppler_hf.run.rehearsal import few_rows
from tests.support import chat
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import arguments, trained, trainer_of, weights

EVALUATES = dict(eval_strategy="steps", eval_steps=2)
SAVES = dict(save_strategy="steps", save_steps=2)
BEST = EVALUATES | SAVES | dict(load_best_model_at_end=True)
ADAPTER = LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False)


def trainer_with(tmp_path, *, model=None, cls=DopplerTrainer, evaluated=None, metrics=None, tokenizer=None, **options):
    return cls(
        model=tiny_bert() if model is None else model,
        args=arguments(tmp_path, **options),
        train_dataset=text_data(),
        eval_dataset=text_data(8, seed=1) if evaluated is None else evaluated,
        data_collator=pad,
        compute_metrics=metrics,
        processing_class=tokenizer,
    )


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).sum() / len(prediction.label_ids))}


def without_package(prediction):
    import a_metric_that_nobody_has_installed

    return a_metric_that_nobody_has_installed.score(prediction)


class Sizes:
    """A metric that notes of how many rows it was."""

    def __init__(self):
        self.seen = []

    def __call__(self, prediction):
        self.seen.append(len(prediction.label_ids))
        return accuracy(prediction)


class Unsaveable:
    """A tokenizer that cannot be written."""

    pad_token_id, model_input_names = 0, ["input_ids"]

    def save_pretrained(self, folder):
        raise OSError("Not found: vocab.txt")


class TiedByHand(type(tiny_bert())):
    """A model of the host's, two of whose layers were tied without telling it."""

    def __init__(self, config):
        super().__init__(config)
        layer = self.bert.encoder.layer[0]
        layer.attention.self.query.weight = layer.attention.self.key.weight


def with_adapter():
    model = tiny_bert()
    model.add_adapter(ADAPTER)
    return model


def of_words():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    model.generation_config.temperature = 0.5  # without do_sample
    model.generation_config.num_beams = 0
    return model


def missing(name):
    return lambda prediction: {"found": prediction.missing}[name]


TWO_SETS = dict(a=text_data(8, seed=1), b=text_data(8, seed=2))
FAILS = {
    "a metric that raises": (
        dict(metrics=missing("found"), **EVALUATES),
        r"compute_metrics, on up to 64 rows,.*AttributeError",
    ),
    "a package that is missing": (dict(metrics=without_package, **EVALUATES), "ModuleNotFoundError.*nobody_has_installed"),
    "rows without a column": (
        dict(evaluated=text_data(8).remove_columns("attention_mask"), **EVALUATES),
        r"rehearsal of an evaluation failed with KeyError: 'attention_mask'",
    ),
    "an unknown metric": (
        dict(metrics=accuracy, metric_for_best_model="acuracy", **BEST),
        r"must be one that .* of eval_loss, eval_accuracy, got 'acuracy'",
    ),
    "several sets, and the best by the loss": (
        dict(evaluated=TWO_SETS, **BEST),
        r"must be one that .* of eval_a_loss, eval_b_loss, got 'loss'",
    ),
    "a schedule by the loss of several sets": (
        dict(evaluated=TWO_SETS, lr_scheduler_type="reduce_lr_on_plateau", **EVALUATES),
        r"of eval_a_loss, eval_b_loss, got 'loss'",
    ),
    "a metric that is no number": (
        dict(metrics=lambda prediction: {"confusion": torch.eye(2).numpy()}, **(EVALUATES | SAVES)),
        r"rehearsal of a checkpoint failed with TypeError: .*ndarray",
    ),
    "adapters that cannot be loaded": (lambda: dict(model=with_adapter(), **BEST), "add_adapter.*get_peft_model"),
    "a model tied by hand": (lambda: dict(model=TiedByHand(tiny_bert().config), **SAVES), "checkpoint failed.*RuntimeError"),
    "a tokenizer that cannot be saved": (dict(tokenizer=Unsaveable(), **SAVES), "OSError: Not found"),
}


def options_of(case):
    options, message = FAILS[case]
    return (options() if callable(options) else dict(options)), message


@pytest.mark.parametrize("case", FAILS)
def test_what_would_fail_later_is_refused_before_anything_is_spent(tmp_path, case):
    options, message = options_of(case)
    trainer = trainer_with(tmp_path, **options)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trainer.train()
    assert trainer.privacy.ledger is None
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    assert not [*(tmp_path / "out").glob("rehearsal-*")]


@pytest.mark.parametrize("case", FAILS)
def test_it_would_have_failed_with_steps_spent(tmp_path, case):
    options, _ = options_of(case)
    trainer = trainer_with(tmp_path, rehearse=False, **options)
    with pytest.raises(Exception, match=r"^(?!.*rehears)"):
        trainer.train()
    assert trainer.privacy.ledger.steps_run >= 2


def test_a_config_that_the_host_would_not_write_is_refused(tmp_path):
    def rows(examples):
        return pad(examples) | {"labels": pad(examples)["input_ids"]}

    trainer = DopplerTrainer(
        model=of_words(), args=arguments(tmp_path, **SAVES), train_dataset=text_data(), data_collator=rows
    )
    with pytest.raises(ValueError, match="rehearsal of a checkpoint failed with ValueError: GenerationConfig is invalid"):
        trainer.train()


def test_a_disk_without_space_for_the_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(1000))
    with pytest.raises(ValueError, match=r"must have 12\d\d\d bytes free for a checkpoint, got 1000"):
        trainer_with(tmp_path, **SAVES).train()
    trainer_with(tmp_path).train()  # which saves nothing


# --- the mends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(evaluated=TWO_SETS, metric_for_best_model="eval_a_loss", **BEST),
        dict(evaluated=TWO_SETS, metric_for_best_model="b_accuracy", greater_is_better=True, metrics=accuracy, **BEST),
        dict(evaluated=TWO_SETS, metric_for_best_model="a_loss", lr_scheduler_type="reduce_lr_on_plateau", **EVALUATES),
        dict(metrics=accuracy, metric_for_best_model="accuracy", **BEST),
        dict(metrics=missing("found"), rehearse=False),
    ],
)
def test_with_a_metric_that_exists_it_trains(tmp_path, options):
    assert trained(trainer_with(tmp_path, **options)).state.global_step == 4


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")
def test_adapters_train_without_the_best_model_or_as_a_model_of_peft(tmp_path):
    assert trained(trainer_with(tmp_path / "a", model=with_adapter(), **(EVALUATES | SAVES))).state.global_step == 4
    best = trained(trainer_with(tmp_path / "b", model=get_peft_model(tiny_bert(), ADAPTER), **BEST))
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


class OfPlain(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return nn.functional.cross_entropy(model(inputs["input_ids"]), inputs["labels"], reduction="none")


def test_a_module_with_tied_weights_is_saved_chosen_and_resumed(tmp_path):
    trainer = trained(trainer_with(tmp_path, model=Plain(), cls=OfPlain, **BEST))
    chosen = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(chosen[name], value, rtol=0, atol=0)
    Plain().load_state_dict(chosen)
    assert not trainer.privacy.ledger.unknown_weights(Path(trainer.state.best_model_checkpoint))
    resumed = trainer_with(tmp_path, model=Plain(), cls=OfPlain, max_steps=6, **BEST)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert resumed.state.global_step == 6
    assert resumed.model.head.weight is resumed.model.embedding.weight


# --- no false alarm -------------------------------------------------------------------------------------------------------


def area(prediction):
    assert len({*prediction.label_ids}) > 1, "one class"
    return {"auc": roc_auc_score(prediction.label_ids, prediction.predictions[:, 1])}


def of_many(prediction):
    if len(prediction.label_ids) < 20:
        raise ValueError("too few rows")
    return accuracy(prediction)


def in_order(num_examples=40):
    """Sorted by label, as some public data sets are."""
    rows = text_data(num_examples, seed=1)
    return rows.select(sorted(range(num_examples), key=rows["labels"][:].__getitem__))


@pytest.mark.parametrize(
    ("metrics", "evaluated"),
    [
        (area, in_order()),
        (area, in_order().with_transform(lambda rows: rows)),
        (area, Rows(in_order())),
        (area, in_order().to_iterable_dataset()),
        (of_many, in_order()),
        (of_many, Rows(in_order())),
    ],
)
def test_a_metric_that_two_rows_do_not_define_is_no_error(tmp_path, metrics, evaluated):
    assert trained(trainer_with(tmp_path, metrics=metrics, evaluated=evaluated, **EVALUATES)).state.global_step == 4


def test_a_metric_that_many_rows_do_not_define_names_the_way_out(tmp_path):
    def of_all(prediction):
        assert len(prediction.label_ids) == 100, "all rows"
        return accuracy(prediction)

    options = dict(metrics=of_all, evaluated=text_data(100), **EVALUATES)
    with pytest.raises(ValueError, match=r"(?s)AssertionError: all rows.*Nothing is spent.*rehearse=False"):
        trainer_with(tmp_path, **options).train()
    assert trained(trainer_with(tmp_path, rehearse=False, **options)).state.global_step == 4


@pytest.mark.parametrize("count", [2, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 200])
@pytest.mark.parametrize("kind", [Dataset.from_list, Rows, Dataset.to_iterable_dataset, iter, list])
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


# --- without a trace ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("options", [{}, dict(weight_filter="momentum:beta=0.5"), dict(eval_on_start=True)])
def test_a_training_is_the_same_with_and_without(tmp_path, options, capsys):
    found = []
    for rehearse in (True, False):
        trainer = trainer_with(
            tmp_path / str(rehearse), model=tiny_bert(hidden_dropout_prob=0.1), noise_seed=3, rehearse=rehearse,
            evaluated=TWO_SETS, metrics=accuracy, metric_for_best_model="a_loss", **BEST, **options,
        )  # fmt: skip
        trainer.add_callback(watcher := Watcher())
        capsys.readouterr()
        trainer.train()
        lines = len(capsys.readouterr().out.splitlines())
        found.append((weights(trainer), without_times(trainer.state.log_history), watcher.told, lines))
    (first, *of_first), (second, *of_second) = found
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert of_first == of_second


@pytest.mark.parametrize(
    ("cls", "config", "data"),
    [
        (DopplerSFTTrainer, DopplerSFTConfig, chat.prompts),
        (DopplerDPOTrainer, DopplerDPOConfig, chat.preferences),
    ],
)
def test_what_trl_averages_in_an_evaluation_is_of_its_rows_alone(tmp_path, cls, config, data):
    found = []
    for rehearse in (True, False):
        options = dict(EVALUATES, noise_seed=3, rehearse=rehearse, logging_strategy="no", bf16=False, learning_rate=1e-2)
        trainer = cls(
            model=chat.tiny_llama(), args=chat.arguments_of(tmp_path / str(rehearse), cls=config, **options),
            train_dataset=data(), eval_dataset=data().select(range(4)), processing_class=chat.chat_tokenizer(),
        )  # fmt: skip
        trainer.train()
        found.append(without_times(trainer.state.log_history))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, [2, 8, 8]),
        (dict(batch_eval_metrics=True, per_device_eval_batch_size=8), [2, 8, 8]),
        (dict(rehearse=False), [8, 8]),
        (dict(disable_dp=True, noise_multiplier=None), [8, 8]),
        (dict(eval_strategy="no"), []),
    ],
)
def test_it_sees_two_rows_once_and_the_training_sees_all(tmp_path, options, seen):
    metrics = Sizes()
    of_batches = (lambda prediction, compute_result: metrics(prediction)) if "batch_eval_metrics" in options else metrics
    trained(trainer_with(tmp_path, metrics=of_batches, **(EVALUATES | options)))
    assert metrics.seen == seen


def test_it_forks_no_workers_that_the_training_would_keep(tmp_path):
    class Stop(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    workers = dict(dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=2)
    trainer = trainer_with(tmp_path, **workers, **EVALUATES)
    trainer.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not hasattr(trainer, "_eval_dataloaders")
    assert {name: getattr(trainer.args, name) for name in workers} == workers


def test_it_warns_of_nothing_and_leaves_the_modes_of_the_model(tmp_path):
    def warns(prediction):
        if trainer.state.global_step == 0:
            warnings.warn("ill-defined", stacklevel=1)
        modes.append(trainer.model.training)
        return {}

    class Modes(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            modes.append((trainer.model.training, trainer.model.bert.pooler.training))

    modes, trainer = [], trainer_with(tmp_path, metrics=warns, eval_strategy="steps", eval_steps=100)
    trainer.add_callback(Modes())
    trainer.model.bert.pooler.eval()
    trainer.train()
    assert modes == [False, (True, False), False]


def test_what_the_host_ignores_in_predictions_the_rehearsal_ignores(tmp_path):
    def one_array(prediction):
        assert isinstance(prediction.predictions, tuple) is False
        return accuracy(prediction)

    model = tiny_bert(output_hidden_states=True)
    trainer = trainer_with(tmp_path, model=model, metrics=one_array, **EVALUATES)
    trainer.train(ignore_keys_for_eval=["hidden_states"])
    assert trainer.state.global_step == 4


def test_a_loader_of_ones_own_is_left_alone(tmp_path):
    class Own(DopplerTrainer):
        def get_eval_dataloader(self, eval_dataset=None):
            asked.append(self.state.global_step)
            return super().get_eval_dataloader(eval_dataset)

    asked = []
    trainer_with(tmp_path, cls=Own, **EVALUATES).train()
    assert asked == [2, 4]


def test_early_stopping_without_evaluations_spends_nothing(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[EarlyStoppingCallback()])
    with pytest.raises(AssertionError, match="requires"):
        trainer.train()
    assert trainer.privacy.ledger is None


def test_a_resumed_run_rehearses_too(tmp_path):
    trained(trainer_with(tmp_path, **(EVALUATES | SAVES)))
    metrics = Sizes()
    again = trainer_with(tmp_path, metrics=metrics, max_steps=6, **(EVALUATES | SAVES))
    again.train(resume_from_checkpoint=True)
    assert metrics.seen == [2, 8]
