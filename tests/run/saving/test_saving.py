"""Whatever a trainer saves, the ledger beside it speaks for those weights, or is set aside."""

import copy
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    BertForSequenceClassification,
    BertModel,
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    default_data_collator,
)

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.weights import hashes
from tests.support.adapters import prefixed
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import ON_CPU, On, arguments, at, interrupt, trained, trainer_of, weights

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-loss.md"
CHECKPOINTS = dict(max_steps=4, save_strategy="steps", save_steps=2)
PUBLIC = dict(disable_dp=True, noise_multiplier=None)


def saved(trainer):
    """Train, save the model, and return the trainer."""
    trained(trainer).save_model()
    return trainer


def adapted(name="default"):
    return get_peft_model(tiny_bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]), adapter_name=name)


def test_an_adapter_that_is_called_when_it_is_saved_is_saved_during_training(tmp_path):
    """PEFT reads a prefix by a call of its layer."""
    model = prefixed(tiny_bert(), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
    trainer_of(tmp_path, model=model, **CHECKPOINTS).train()
    assert "prompt_embeddings" in load_file(tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors")


def test_an_adapter_within_a_module_of_ones_own_is_published_as_the_guide_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = torch.arange(5, 25).repeat(60).view(300, 2, 2).tolist()
    names = {
        "encoder": BertModel(tiny_bert().config, add_pooling_layer=False),
        "args": arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1),
        "scored_pairs": Dataset.from_dict(
            {"input_ids": pairs, "attention_mask": [[[1, 1], [1, 1]]] * 300, "labels": [row % 5 / 4 for row in range(300)]}
        ),
    }
    untrained, base = copy.deepcopy(names["encoder"]).eval(), copy.deepcopy(names["encoder"])
    section = GUIDE.read_text("utf-8").split("## LoRA inside a module of your own\n")[1].split("\n## ")[0]
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)
    *commands, verify = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()
    subprocess.run(["sh", "-ec", "\n".join(commands)], check=True)
    assert main(verify.split()[1:]) == main(["verify", "out"]) == 0
    encoder, inputs = names["trainer"].model.encoder.cpu().eval(), torch.arange(5, 11)[None]
    loaded = PeftModel.from_pretrained(base, "adapter").eval()
    torch.testing.assert_close(loaded(inputs)[0], encoder(inputs)[0])
    assert not torch.allclose(loaded(inputs)[0], untrained(inputs)[0])
    # The whole module is in the checkpoint, too.
    model = names["BiEncoder"](copy.deepcopy(untrained))
    again = type(names["trainer"])(
        model=model, args=names["args"], train_dataset=names["scored_pairs"], data_collator=default_data_collator
    )
    again.train(resume_from_checkpoint="out/checkpoint-1")
    # An adapter that the trainer has not saved is not in the ledger.
    with torch.no_grad():
        next(each for each in encoder.parameters() if each.requires_grad).add_(1.0)
    encoder.save_pretrained("adapter")
    assert main(["verify", "adapter"]) == 1


def test_a_callback_that_is_added_at_a_resume_is_saved(tmp_path):
    """Transformers looks for it in the state of the checkpoint, which ended the run with a KeyError."""
    evaluating = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, **CHECKPOINTS)
    trainer_of(tmp_path, **evaluating).train()
    resumed = trainer_of(tmp_path, callbacks=[EarlyStoppingCallback(2)], **evaluating | {"max_steps": 6})
    resumed.train(resume_from_checkpoint=True)
    assert "EarlyStoppingCallback" in (tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text()


def verified(folder):
    return main(["verify", str(folder)]) == 0


def double(path):
    save_file({name: 2.0 * value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("change", ["merged", *thorough("merged once more after the end")])
def test_an_adapter_that_is_merged_and_taken_out_again_keeps_its_ledger(tmp_path, change):
    """As to generate text, or to send weights to a server. It moves the last bits of the base, which no file holds."""

    def merge_and_take_out(model, **_):
        model.merge_adapter()
        model.unmerge_adapter()

    model = adapted()
    frozen = {name: value.clone() for name, value in model.named_parameters() if "base_layer" in name}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.add_(0.1)  # so that there is something to merge
    trainer = trained(trainer_of(tmp_path, model=model, callbacks=[On(step_end=at(1, merge_and_take_out))], **CHECKPOINTS))
    if change != "merged":
        merge_and_take_out(trainer.model)
    assert not all(torch.equal(value, model.get_parameter(name)) for name, value in frozen.items())
    trainer.save_model()
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2", tmp_path / "out" / "checkpoint-4"):
        assert verified(folder)
    resumed = trainer_of(tmp_path, model=adapted(), **CHECKPOINTS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.privacy.ledger.restarts == [2]


def asides(folder):
    return sorted(folder.glob("privacy_ledger.*.json"))


@pytest.mark.parametrize(
    ("options", "file"),
    [({}, "model.safetensors"), *thorough((dict(model=lambda: adapted("second")), "second/adapter_model.safetensors"))],
)
def test_model_and_checkpoints_are_bound_to_their_ledgers(tmp_path, options, file):
    model = options.pop("model", tiny_bert)()
    saved(trainer_of(tmp_path, model=model, **CHECKPOINTS | options))
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2", tmp_path / "out" / "checkpoint-4"):
        assert file in hashes(folder)
        assert verified(folder)
        copy = shutil.copytree(folder, tmp_path / "copies" / folder.name)
        assert verified(copy)
        double(copy / file)
        assert not verified(copy)


@pytest.mark.parametrize("name", ["default", *thorough("second")])
def test_the_card_of_an_adapter_has_the_ledgers_section(tmp_path, name):
    """PEFT writes it, and keeps what is in one that is there."""
    trainer = saved(trainer_of(tmp_path, model=adapted(name), **CHECKPOINTS))
    out = tmp_path / "out"

    def is_said(folder):
        card = (folder / "README.md").read_text()
        assert "library_name: peft" in card
        assert card.count("## Differential privacy\n") == card.count("Trained with (") <= 1
        return "Trained with (" in card and f"\n    {PrivacyLedger.load(folder).head}" in card

    assert is_said(out)
    assert is_said(out / "checkpoint-2")
    trainer.model.save_pretrained(out)
    assert is_said(out)
    trainer.create_model_card()
    assert is_said(out)
    trainer.save_model()
    assert is_said(out)
    trainer_of(tmp_path, model=trainer.model).save_model()  # it has not trained it
    assert is_said(out)
    trained_otherwise(trainer, tmp_path / "public")
    for write in (trainer.save_model, trainer.create_model_card):
        write()
        assert not is_said(out)


def test_a_public_run_into_the_folder_sets_the_ledgers_aside(tmp_path, capsys):
    saved(trainer_of(tmp_path, **CHECKPOINTS))
    head = PrivacyLedger.load(tmp_path / "out").head
    saved(trainer_of(tmp_path, **PUBLIC, **CHECKPOINTS))
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2", tmp_path / "out" / "checkpoint-4"):
        assert not (folder / LEDGER_NAME).exists()
        assert len(asides(folder)) == 1
        assert not verified(folder)
        assert not verified(asides(folder)[0])
    assert PrivacyLedger.load(asides(tmp_path / "out")[0]).head == head
    assert "it does not cover these weights" in capsys.readouterr().out
    # Its checkpoints are its own now: they can be resumed without privacy, and not with it.
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    trainer_of(tmp_path, **PUBLIC, **CHECKPOINTS).train(resume_from_checkpoint=checkpoint)
    with refused("checkpoint-without-ledger"):
        trainer_of(tmp_path, **CHECKPOINTS).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("options", [{}, PUBLIC])
def test_a_trainer_that_has_not_trained_keeps_a_ledger_that_is_true(tmp_path, options):
    saved(trainer_of(tmp_path))
    model = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    idle = trainer_of(tmp_path, model=model, **options)
    idle.save_model()
    assert verified(tmp_path / "out")
    model.classifier.weight.data.add_(1.0)
    idle.save_model()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    assert len(asides(tmp_path / "out")) == 1


def test_a_run_into_the_folder_does_not_take_over_its_weights(tmp_path):
    saved(trainer_of(tmp_path))
    second = trained(trainer_of(tmp_path))
    assert not verified(tmp_path / "out")  # the weights there are still the first one's
    second.save_model()
    assert verified(tmp_path / "out")


def trained_otherwise(trainer, folder):
    """Train the trainer's model on its data without privacy."""
    options = dict(max_steps=1, learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=ON_CPU)
    args = TrainingArguments(output_dir=str(folder), **options)
    Trainer(trainer.model, args, pad, trainer.train_dataset).train()


def converted(trainer, folder):
    trainer.model.half()


@pytest.mark.parametrize(("model", "change"), [(adapted, trained_otherwise), (tiny_bert, converted)])
def test_a_model_that_was_changed_after_its_training_is_not_vouched_for(tmp_path, capsys, model, change):
    trainer = saved(trainer_of(tmp_path, model=model(), **CHECKPOINTS))
    head = trainer.privacy.ledger.head
    kept = shutil.copytree(tmp_path / "out", tmp_path / "kept")
    capsys.readouterr()
    change(trainer, tmp_path / "public")
    trainer.save_model(str(tmp_path / "changed"))
    assert "so its ledger does not cover them" in capsys.readouterr().out
    assert not list((tmp_path / "changed").glob("privacy_ledger*"))
    trainer.save_model()
    assert trainer.privacy.ledger.head == head
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    assert PrivacyLedger.load(asides(tmp_path / "out")[0]).head == head
    assert verified(kept)


class WithPrototypes(BertForSequenceClassification):
    """Has a buffer for the mean of each class, which something other than the training fills."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("class_means", torch.zeros(2, 16))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def with_prototypes():
    model = WithPrototypes(tiny_bert().config)
    model.bert.embeddings.position_embeddings.requires_grad_(False)
    return model


FILLED = {
    "buffer": lambda model: model.class_means.add_(1.0),
    "new buffer": lambda model: model.register_buffer("feature_means", torch.ones(2)),
    "frozen parameter": lambda model: model.bert.embeddings.position_embeddings.weight.data.mul_(2.0),
}


@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("step_end", "buffer"),
        *thorough(("train_end", "new buffer")),
        ("afterwards", "frozen parameter"),
        *thorough(("prediction_step", "buffer")),
    ],
)
def test_what_is_filled_besides_the_training_is_not_vouched_for(tmp_path, capsys, what, when):
    callbacks = [] if when == "afterwards" else [On(**{when: lambda model, **_: FILLED[what](model)})]
    options = dict(model=with_prototypes(), callbacks=callbacks, evaluated=text_data(8, seed=1))
    trainer = trained(trainer_of(tmp_path, **options))
    if when == "afterwards":
        FILLED[what](trainer.model)
    assert "epsilon" not in trainer.evaluate()
    trainer.save_model()
    assert "were changed by something other than the steps of the private run" in capsys.readouterr().out
    assert not (tmp_path / "out" / LEDGER_NAME).exists()


def test_buffers_that_stay_or_are_not_saved_are_no_reason(tmp_path):
    fill = On(step_end=lambda model, **_: model.unsaved.add_(1.0))
    trainer = saved(trainer_of(tmp_path, model=with_prototypes(), callbacks=[fill]))
    assert verified(tmp_path / "out")
    again = saved(trainer_of(tmp_path, model=trainer.model))
    assert again.privacy.ledger.steps_run == 4 + 4
    assert verified(tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        dict(callbacks=[On(step_end=at(3, interrupt))]),
        dict(callbacks=[On(train_end=lambda model, **_: model.classifier.bias.data.zero_())]),
        dict(bf16_full_eval=True),
    ],
)
def test_what_a_run_or_an_evaluation_does_to_the_model_is_vouched_for(tmp_path, options):
    trainer = trainer_of(tmp_path, evaluated=text_data(8, seed=1), **options)
    try:
        trainer.train()
    except KeyboardInterrupt:
        # As the file is, so that a process which is killed next has taken it down.
        assert PrivacyLedger.load(tmp_path / "out").head == trainer.privacy.ledger.head
    trainer.evaluate()
    trainer.save_model()
    assert "model.safetensors" in hashes(tmp_path / "out")
    assert verified(tmp_path / "out")


def test_a_checkpoint_with_other_weights_is_not_resumed(tmp_path):
    trainer_of(tmp_path, **CHECKPOINTS).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    before = (tmp_path / "out" / LEDGER_NAME).read_bytes()
    double(checkpoint / "model.safetensors")
    with refused("weights-without-account", match=r"model\.safetensors"):
        trainer_of(tmp_path, **CHECKPOINTS).train(resume_from_checkpoint=str(checkpoint))
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before


def test_a_saved_adapter_on_its_base_with_a_head_made_anew_goes_on_with_its_ledger(tmp_path):
    saved(trainer_of(tmp_path, model=adapted(), max_steps=2))
    base = tiny_bert()
    torch.nn.init.normal_(base.classifier.weight)
    loaded = PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True)
    assert trained(trainer_of(tmp_path, model=loaded, max_steps=2)).privacy.ledger.steps_run == 4


class Hub:
    """Takes what is uploaded, as the hub would, with the files that Transformers leaves out left out."""

    def __init__(self, folder):
        self.folder = folder

    def create_repo(self, name, **options):
        return type("Url", (), {"repo_id": f"me/{name}"})

    def upload_folder(self, *, folder_path, ignore_patterns=(), path_in_repo=None, **options):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns(*ignore_patterns))


def test_what_is_pushed_is_bound_and_the_card_has_its_head(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    monkeypatch.setattr("transformers.modelcard.is_offline_mode", lambda: True, raising=False)
    trainer = trained(trainer_of(tmp_path))
    trainer.args.push_to_hub = True
    trainer.save_model()
    head = PrivacyLedger.load(hub.folder).head
    assert head in (hub.folder / "README.md").read_text()
    assert main(["verify", str(hub.folder), "--head", head]) == 0
    assert verified(tmp_path / "out")
    assert not list(hub.folder.glob("*.lock"))
    assert "model.safetensors" in hashes(hub.folder)


class Images:
    def __len__(self):
        return 24

    def __getitem__(self, row):
        return {"pixel_values": torch.full((3, 8, 8), row / 24), "labels": row % 2}


VIT = ViTConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
)  # fmt: skip


def of_images(tmp_path, *, model=None, **options):
    images = dict(data=Images(), evaluated=Images(), collator=default_data_collator)
    model = ViTForImageClassification(VIT) if model is None else model
    return trainer_of(tmp_path, model=model, **images, **options)


@pytest.mark.parametrize("is_private", [True, False])
def test_weights_that_are_written_under_other_names_are_all_loaded(tmp_path, is_private):
    """As ViT's, by a resume and as the best model: none is left as it was, or of another step."""
    saves = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    saves |= {} if is_private else dict(disable_dp=True, noise_multiplier=None)
    # Of the rehearsal of a private run, twice, and of steps 2 and 4.
    scores = iter([0.0, 0.0, 1.0, 0.5][0 if is_private else 2 :])
    metrics = dict(compute_metrics=lambda _: {"score": next(scores)}, metric_for_best_model="score", greater_is_better=True)
    best = trained(of_images(tmp_path, load_best_model_at_end=True, max_steps=4, **saves, **metrics))
    folder = tmp_path / "out" / "checkpoint-2"
    assert best.state.best_model_checkpoint == str(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert not {*file.keys()} <= best.model.state_dict().keys()
    saved = ViTForImageClassification.from_pretrained(folder).state_dict()
    begun = {}
    begins = On(train_begin=lambda model, **_: begun.update(copy.deepcopy(model.state_dict())))
    of_images(tmp_path, max_steps=3, callbacks=[begins], **saves).train(resume_from_checkpoint=str(folder))
    for found in (best.model.state_dict(), begun):
        for name, value in saved.items():
            assert torch.equal(value, found[name]), name


class WithMore(ViTForImageClassification):
    """Takes more than a configuration, so that `from_pretrained` cannot make it."""

    def __init__(self, config, width):
        super().__init__(config)
        between = torch.nn.Linear(config.hidden_size, width)
        self.classifier = torch.nn.Sequential(between, torch.nn.GELU(), torch.nn.Linear(width, 2))


class Around(PreTrainedModel):
    """A model of one's own around one of Transformers'."""

    config_class, base_model_prefix, _supports_sdpa = ViTConfig, "vision", True

    def __init__(self, config):
        super().__init__(config)
        self.vision = ViTModel(config, add_pooling_layer=False)
        self.head = torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, pixel_values, labels=None):
        return self.head(self.vision(pixel_values).last_hidden_state[:, 0])


def with_another_head():
    model = ViTForImageClassification(VIT)
    model.classifier = torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(8, 2))
    return model


@pytest.mark.parametrize("make", [with_another_head, lambda: WithMore(VIT, 5), lambda: Around(VIT)])
def test_the_best_model_and_a_resume_are_of_any_class(tmp_path, make):
    """Whatever `from_pretrained` would make of the configuration: the tensors of the model at hand take the values."""
    saves = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, cls=OfPixels)
    scores = iter([0.0, 0.0, 1.0, 0.5])  # of the rehearsal, twice, and of steps 2 and 4
    metrics = dict(compute_metrics=lambda _: {"score": next(scores)}, metric_for_best_model="score", greater_is_better=True)
    model = make()
    own = dict(model.named_parameters())
    best = trained(of_images(tmp_path, model=model, load_best_model_at_end=True, max_steps=4, **saves, **metrics))
    folder = tmp_path / "out" / "checkpoint-2"
    assert best.state.best_model_checkpoint == str(folder)
    assert all(own[name] is parameter for name, parameter in best.model.named_parameters())
    resumed = of_images(tmp_path, model=make(), max_steps=2, **saves)
    resumed.train(resume_from_checkpoint=str(folder))
    torch.testing.assert_close(weights(best), weights(resumed), rtol=0, atol=0)
    # Without a mapping of names in between: the file has the same values.
    written = sorted(value.double().sum().item() for value in load_file(folder / "model.safetensors").values())
    torch.testing.assert_close(sorted(value.double().sum().item() for value in best.model.state_dict().values()), written)
    best.save_model()
    assert verified(tmp_path / "out")


class OfPixels(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        logits = model(pixel_values=inputs["pixel_values"])
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        return torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")
