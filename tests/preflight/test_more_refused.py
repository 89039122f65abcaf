"""Models and losses that the stock trainer takes or ends raw, each refused before a step with what trains."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import On, at, checked_trainer_of, refused_training, trained, trainer_of

LORA = dict(task_type="SEQ_CLS", target_modules=["query"], r=2)


def test_an_adapter_that_is_loaded_for_inference_is_told_apart_and_trains_as_told(tmp_path):
    get_peft_model(tiny_bert(), LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path / "adapter")
    message = refused_training(tmp_path, "nothing-trained", model=loaded, max_steps=1)
    assert "is_trainable=True" in message
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path / "adapter", is_trainable=True)
    trained(checked_trainer_of(tmp_path / "b", model=loaded, max_steps=1))


def test_an_adapter_for_inference_or_switched_off_is_told(tmp_path):
    model = get_peft_model(tiny_bert(), LoraConfig(**LORA, inference_mode=True))
    assert "inference_mode" in refused_training(tmp_path, "nothing-trained", model=model, max_steps=1)
    model = get_peft_model(tiny_bert(), LoraConfig(**LORA))
    model.base_model.disable_adapter_layers()
    assert "model.enable_adapter_layers()" in refused_training(tmp_path, "nothing-trained", model=model, max_steps=1)
    model.base_model.enable_adapter_layers()
    trained(checked_trainer_of(tmp_path / "b", model=model, max_steps=1))


@pytest.mark.parametrize("options", [LORA, *thorough(LORA | {"use_dora": True})])
def test_merged_adapters_are_told_and_train_when_they_are_unmerged(tmp_path, options):
    model = get_peft_model(tiny_bert(), LoraConfig(**options))
    model.merge_adapter()
    assert "model.unmerge_adapter()" in refused_training(tmp_path, "adapters-merged", model=model, max_steps=1)
    model.unmerge_adapter()
    trained(checked_trainer_of(tmp_path / "b", model=model, max_steps=1))


def test_a_sparse_table_is_refused_and_the_line_mends_it(tmp_path):
    model = tiny_bert()
    model.bert.embeddings.word_embeddings.sparse = True
    message = refused_training(tmp_path, "sparse-embedding", model=model, max_steps=1)
    line = message[message.index("for module in model.modules()") : -1]
    exec(line, {"model": model})
    trained(checked_trainer_of(tmp_path / "b", model=model, max_steps=1))
    frozen = tiny_bert()
    frozen.bert.embeddings.word_embeddings.sparse = True
    frozen.bert.embeddings.word_embeddings.requires_grad_(False)
    trained(checked_trainer_of(tmp_path / "c", model=frozen, max_steps=1))


def clamping(module, inputs, outputs):
    return (inputs[0].clamp(-1e-3, 1e-3),)


def test_a_hook_that_changes_gradients_of_the_batch_is_named_and_one_that_scales_trains(tmp_path):
    model = tiny_bert()
    hook = model.classifier.register_full_backward_hook(clamping)
    message = refused_training(tmp_path, "gradient-hook", model=model, max_steps=1)
    assert "'classifier'" in message
    hook.remove()
    model.classifier.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    trained(checked_trainer_of(tmp_path / "b", model=model, max_steps=1))


def with_loss(function):
    class Mine(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            return function(model(**inputs).logits, labels)

    return Mine


def squeezed(logits, labels):
    return F.binary_cross_entropy_with_logits(logits.squeeze(), labels.float(), reduction="none")


def squeezed_at_the_end(logits, labels):
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels.float(), reduction="none")


def classes_squeezed(logits, labels):
    return F.cross_entropy(logits.squeeze(), labels, reduction="none")


@pytest.mark.parametrize(
    ("loss", "labels", "mended"),
    [(squeezed, 1, squeezed_at_the_end), (classes_squeezed, 2, lambda z, y: F.cross_entropy(z, y, reduction="none"))],
)
def test_a_loss_that_fails_on_a_batch_of_one_row_is_told_and_trains_mended(tmp_path, loss, labels, mended):
    options = dict(model=tiny_bert(num_labels=labels), max_steps=1)
    message = refused_training(tmp_path, "fails-on-one-row", cls=with_loss(loss), **options)
    assert "squeeze(-1)" in message
    trained(checked_trainer_of(tmp_path / "b", cls=with_loss(mended), **options))


def test_a_loss_that_fails_on_any_batch_fails_as_it_does(tmp_path):
    def fails(logits, labels):
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        checked_trainer_of(tmp_path, cls=with_loss(fails), max_steps=1).train()


class Backward(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        losses.sum().backward(retain_graph=True)
        return losses


class BackwardOfTorch(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        torch.autograd.backward(losses.sum(), retain_graph=True)
        return losses


@pytest.mark.parametrize("cls", [Backward, BackwardOfTorch])
def test_a_loss_that_calls_backward_is_told(tmp_path, cls):
    assert "backward()" in refused_training(tmp_path, "gradient-in-the-loss", cls=cls, max_steps=1)


@pytest.mark.parametrize("event", ["step_begin", *thorough("step_end")])
def test_a_table_that_is_resized_during_the_run_is_told_before_the_step(tmp_path, event):
    resize = On(**{event: at(1, lambda model, **_: model.resize_token_embeddings(60))})
    trainer = trainer_of(tmp_path, callbacks=[resize])
    with refused("parameter-resized"):
        trainer.train()
    assert trainer.state.global_step == trainer.privacy.ledger.steps_run == 1
    model = tiny_bert()
    model.resize_token_embeddings(60)
    trained(trainer_of(tmp_path / "b", model=model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_converted_during_the_run_is_told_before_the_step(tmp_path, dtype):
    def convert(model, **_):
        copied.append(copy.deepcopy(model).to(dtype))  # the fix
        model.to(dtype)

    copied = []
    trainer = trainer_of(tmp_path, callbacks=[On(step_end=at(1, convert))])
    with refused("parameter-converted", match=f"from torch.float32 to {dtype}"):
        trainer.train()
    assert trainer.state.global_step == trainer.privacy.ledger.steps_run == 1
    assert {each.dtype for each in copied[0].parameters()} == {dtype}


def test_a_layer_of_another_shape_that_was_trained_before_is_fine(tmp_path):
    model = tiny_bert()
    trained(trainer_of(tmp_path, model=model, data=text_data()))
    model.classifier = nn.Linear(16, 3)
    model.config.num_labels = model.num_labels = 3
    trained(trainer_of(tmp_path / "b", model=model, data=text_data(labels=3)))
