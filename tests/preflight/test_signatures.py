"""Overrides and callbacks of an older Transformers are refused before a step, and the printed line works."""

import ast
import functools
import inspect
import re
import types

import pytest
import torch
from transformers import Trainer, TrainerCallback, trainer_callback

from doppler_hf import DopplerTrainer
from doppler_hf.preflight import signatures
from tests.support.tiers import thorough
from tests.support.tiny import text_data
from tests.support.trainers import arguments, trained, trainer_of
from tests.support.unspent import refusal_unspent

ALL = dict(max_steps=1, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)


def overriding(name, parameters, body="pass"):
    """Return a trainer with a method of these parameters."""
    source = f"def {name}(self, {parameters}):\n    {body}"
    exec(source, space := {"__name__": "script"})
    return type("Mine", (DopplerTrainer,), {name: space[name], "__module__": "script"})


# Method → its parameters in an older Transformers, or others that cannot be called.
OLD = {
    "log": "logs",
    "training_step": "model, inputs",
    "save_model": "output_dir=None",
    "floating_point_ops": "",
    "compute_loss": "model, inputs, return_outputs=False",
    "prediction_step": "model, inputs, prediction_loss_only",
    "evaluate": "eval_dataset=None",
    "create_scheduler": "optimizer=None",
    "get_batch_samples": "epoch_iterator, num_batches",
    "_maybe_log_save_evaluate": "tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval",
    "_save_checkpoint": "model, trial, metrics",
    "_determine_best_metric": "metrics",
    "evaluation_loop": "dataloader, description",
    "get_eval_dataloader": "",
    "create_optimizer": "model",
    "get_decay_parameter_names": "",
    "num_examples": "",
    "_prepare_inputs": "",
    "compute_per_sample_loss": "inputs",
    "_load_best_model": "folder",
}


@pytest.mark.parametrize("name", [*[*OLD][:6], *thorough(*[*OLD][6:])])
def test_an_override_that_transformers_cannot_call_is_refused_and_the_printed_line_works(tmp_path, name):
    own_loss = {"compute_per_sample_loss": DopplerTrainer.compute_per_sample_loss} if name == "compute_loss" else {}
    cls = type("Mine", (overriding(name, OLD[name]),), own_loss | {"__module__": "script"})
    message = refusal_unspent(trainer_of(tmp_path, cls=cls, **ALL), "old-signature")
    assert re.match(rf"(Mine\.)?{name}|Mine\.{name} ", message)
    line = re.search(r"Write `def \w+\(self(?:, )?(.*)\):`\.", message)[1]
    names = [part.partition("=")[0] for part in line.split(", ")] if line else []
    body = f"return DopplerTrainer.{name}(self, {', '.join(names)})"
    exec(f"def {name}(self, {line}):\n    {body}", space := {"__name__": "script", "DopplerTrainer": DopplerTrainer})
    mended = type("Mine", (DopplerTrainer,), own_loss | {name: space[name], "__module__": "script"})
    assert trained(trainer_of(tmp_path, cls=mended, **ALL)).state.global_step == 1


class SavesMetrics(DopplerTrainer):
    def _save_checkpoint(self, model, trial, metrics=None):
        super()._save_checkpoint(model, trial, metrics=metrics)


class StepsWithoutCount(DopplerTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch, True)


class LogsMore(DopplerTrainer):
    def log(self, logs, start_time=None):
        super().log(logs, start=start_time)


@pytest.mark.parametrize("cls", [SavesMetrics, StepsWithoutCount, LogsMore])
def test_an_override_that_calls_the_method_of_an_older_transformers_is_refused(tmp_path, cls):
    assert "calls super()." in refusal_unspent(trainer_of(tmp_path, cls=cls, **ALL), "old-signature")


@pytest.mark.parametrize("how", ["on the trainer", "bound to it", "on the class", "wrapped"])
def test_a_method_that_was_set_later_is_looked_at_too(tmp_path, monkeypatch, how):
    trainer = trainer_of(tmp_path, max_steps=1)
    if how == "on the trainer":
        trainer.log = lambda logs: None
    if how == "bound to it":
        trainer.log = types.MethodType(lambda self, logs: None, trainer)
    if how == "on the class":
        monkeypatch.setattr(DopplerTrainer, "log", lambda self, logs: None)
    if how == "wrapped":
        decorated = torch.no_grad()(lambda self, logs: None)
        trainer.log = types.MethodType(decorated, trainer)
    assert "does not take start_time" in refusal_unspent(trainer, "old-signature")


def through(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Fine(DopplerTrainer):
    """Signatures that Transformers can call, of which some take less than its own methods."""

    def create_optimizer(self):  # of Transformers 4
        return super().create_optimizer()

    def save_model(self, output_dir=None, **kwargs):
        super().save_model(output_dir, **kwargs)

    @through
    def log(self, logs, *times):
        super().log(logs, *times)

    def get_train_dataloader(self):
        return super().get_train_dataloader()

    def evaluate(self, dataset=None, ignore_keys=None, **others):
        return super().evaluate(dataset, ignore_keys, **others)

    def training_step(self, *args, more=None, **kwargs):
        return super().training_step(*args, **kwargs)

    def num_examples(self, loader):
        return super().num_examples(loader)


def test_what_transformers_can_call_trains(tmp_path):
    assert trained(trainer_of(tmp_path, cls=Fine, **ALL)).state.global_step == 1


def test_what_the_training_does_not_call_may_be_of_any_signature(tmp_path):
    class Saves(DopplerTrainer):
        def save_model(self, folder):
            super().save_model(folder)

        def evaluate(self):
            return super().evaluate(self.eval_dataset)

    trainer = DopplerTrainer.__new__(Saves)
    trainer.__init__(model=trainer_of(tmp_path).model, args=arguments(tmp_path, max_steps=1), train_dataset=text_data(),
                     data_collator=trainer_of(tmp_path).data_collator)  # fmt: skip
    assert trained(trainer).state.global_step == 1


def event(name, parameters):
    exec(f"def {name}(self, {parameters}): pass", space := {})
    return type("Own", (TrainerCallback,), {name: space[name]})()


@pytest.mark.parametrize("name", signatures._events())
def test_a_callback_without_keywords_is_refused_and_the_printed_line_works(tmp_path, name):
    own = "".join(f", {each}=None" for each in signatures._OF_EVENTS.get(name, ()))
    message = refusal_unspent(
        trainer_of(tmp_path, callbacks=[event(name, f"args, state, control{own}")], **ALL), "callback-signature"
    )
    assert message.startswith(f"Own.{name} does not take model, ")
    parameters = re.search(rf"`def {name}\(self, (.*)\):`", message)[1]
    assert trained(trainer_of(tmp_path, callbacks=[event(name, parameters)], **ALL)).state.global_step == 1


def test_other_callbacks_that_transformers_cannot_call_are_refused(tmp_path):
    class OnlyEnds:
        def on_step_end(self, args, state, control, **kwargs): ...

    cases = [
        (OnlyEnds(), "OnlyEnds has no "),
        (event("on_step_end", "args, state, **kwargs"), "Own.on_step_end "),
        (event("on_step_end", "args, state, control, optimizer, scheduler, **kwargs"), "scheduler"),
    ]
    for callback, words in cases:
        trainer = trainer_of(tmp_path, max_steps=1)
        trainer.callback_handler.callbacks.append(callback)
        assert words in refusal_unspent(trainer, "callback-signature")


def test_the_table_of_events_is_what_transformers_passes():
    tree = ast.parse(inspect.getsource(trainer_callback.CallbackHandler))
    [call] = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("getattr(cal")
    ]
    assert tuple(each.arg for each in call.keywords if each.arg) == signatures._OF_EVERY_EVENT
    of_events = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.call_event":
            keywords = tuple(each.arg for each in node.keywords if each.arg)
            of_events |= {node.args[0].value: keywords} if keywords else {}
    assert of_events == signatures._OF_EVENTS


def test_the_calls_of_a_training_are_read_from_the_source_of_transformers(tmp_path):
    calls = signatures._calls_in_a_run(trainer_of(tmp_path, **ALL))
    assert signatures.Call(3) in calls["training_step"]
    assert signatures.Call(2) in calls["log"]
    assert signatures.Call(1, ("_internal_call",)) in calls["save_model"]
    assert calls["create_optimizer"] == {signatures.Call(0)}  # its other call is of FSDP's first version
    without = signatures._calls_in_a_run(trainer_of(tmp_path, max_steps=1))
    assert "save_model" not in without
    assert "predict" not in calls
    assert inspect.isfunction(Trainer.log)


def ours():
    classes = [cls for cls in DopplerTrainer.__mro__ if cls.__module__.startswith("doppler_hf.")]
    names = {name for cls in classes for name, value in vars(cls).items() if inspect.isfunction(value)}
    return sorted(name for name in names if hasattr(Trainer, name) and name not in ("__init__", "_inner_training_loop"))


@pytest.mark.parametrize("name", ours())
def test_a_method_of_ours_takes_what_that_of_transformers_takes_by_place_and_by_name(name):
    """An override calls `super()` as Transformers documents it."""
    theirs = [*inspect.signature(getattr(Trainer, name)).parameters.values()]
    named = [each.name for each in theirs if each.kind == each.POSITIONAL_OR_KEYWORD]
    signature = inspect.signature(getattr(DopplerTrainer, name))
    signature.bind(*named)
    signature.bind(named[0], **dict.fromkeys(named[1:]))
    # What ours names itself it would otherwise pass on twice.
    own = signature.parameters
    assert [each for each in named if each in own and own[each].kind == own[each].KEYWORD_ONLY] == []


class ReadsTokenizer(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        kwargs["tokenizer"].save_pretrained(args.output_dir)


class TakesTokenizer(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        more.pop("tokenizer")


class ReadsMetrics(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        print(kwargs["metrics"])


@pytest.mark.parametrize("callback", [ReadsTokenizer, TakesTokenizer, ReadsMetrics])
def test_a_callback_that_reads_what_transformers_does_not_pass_is_refused(tmp_path, callback):
    trainer = trainer_of(tmp_path, callbacks=[callback()], save_strategy="steps", save_steps=2)
    message = refusal_unspent(trainer, "callback-signature")
    assert ("kwargs['processing_class']" if "okenizer" in callback.__name__ else "kwargs.get('metrics')") in message


class UsesTokenizer(TrainerCallback):
    def on_train_end(self, args, state, control, tokenizer=None, **kwargs):
        tokenizer.save_pretrained(args.output_dir)


class UsesProcessor(TrainerCallback):
    def on_step_end(self, args, state, control, *, image_processor=None, model=None, **kwargs):
        return image_processor(model)


class UsesMetrics(TrainerCallback):
    def on_log(self, args, state, control, logs=None, metrics=None, **kwargs):
        print(metrics["eval_loss"], logs["loss"])


@pytest.mark.parametrize("callback", [UsesTokenizer, UsesProcessor, UsesMetrics])
def test_a_callback_that_uses_an_argument_that_is_always_none_is_refused(tmp_path, callback):
    trainer = trainer_of(tmp_path, callbacks=[callback()], save_strategy="steps", save_steps=2)
    message = refusal_unspent(trainer, "callback-signature")
    assert ("Call it processing_class" if callback is not UsesMetrics else "whether metrics is None") in message


class Uses(TrainerCallback):
    def on_train_end(self, args, state, control, tokenizer=None, processing_class=None, **kwargs):
        found = tokenizer or processing_class
        assert found is None

    def on_log(self, args, state, control, logs=None, metrics=None, **kwargs):
        assert logs["epoch"] is not None
        if metrics:
            raise AssertionError(metrics["eval_loss"])

    def on_save(self, args, state, control, tokenizer=None, model=None, **kwargs):
        if tokenizer is not None:
            tokenizer.save_pretrained(args.output_dir)
        assert model.config

    def on_step_end(self, args, state, control, tokenizer=None, train_dataloader=None, **kwargs):
        tokenizer = kwargs["processing_class"]
        assert tokenizer is None
        assert train_dataloader.dataset is not None


def test_a_callback_that_asks_before_it_uses_an_argument_trains(tmp_path):
    terms = dict(save_strategy="steps", save_steps=2, callbacks=[Uses()])
    assert trained(trainer_of(tmp_path, **terms)).state.global_step == 4


class Reads(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        assert kwargs["processing_class"] is None

    def on_evaluate(self, args, state, control, **kwargs):
        assert kwargs["metrics"]

    def on_log(self, args, state, control, **kwargs):
        if "metrics" in kwargs:
            raise AssertionError(kwargs["metrics"])

    def on_step_end(self, args, state, control, **kwargs):
        try:
            found = kwargs["tokenizer"]
        except KeyError:
            found = None
        assert found is None

    def on_epoch_end(self, args, state, control, **kwargs):
        kwargs["tokenizer"] = kwargs.get("tokenizer")


def test_a_callback_that_reads_what_is_passed_or_asks_trains(tmp_path):
    terms = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    assert trained(trainer_of(tmp_path, callbacks=[Reads()], **terms)).state.global_step == 4
