"""Weights that no saved file would hold, or that nobody could load again, are known before the first step."""

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BartModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    FlaubertConfig,
    FlaubertForSequenceClassification,
    FlaubertModel,
    ResNetConfig,
    ResNetForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WavLMConfig,
    WavLMForSequenceClassification,
    default_data_collator,
)

from doppler_hf import DopplerTrainer
from doppler_hf.errors import Refusal
from doppler_hf.preflight.saved_weights import adapter_fix, outermost_modules, why_not_loaded
from doppler_hf.privacy import LEDGER_NAME
from tests.support.adapters import add_adapter, prefixed
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import trained, trainer_of

SIZES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16)
EVALUATES = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
BEST = EVALUATES | dict(load_best_model_at_end=True)
KINDS = {
    "bert": (BertModel, BertForSequenceClassification, BertConfig(vocab_size=50, **SIZES)),
    "distilbert": (
        DistilBertModel,
        DistilBertForSequenceClassification,
        DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=16),
    ),
    "bart": (
        BartModel,
        BartForSequenceClassification,
        BartConfig(
            vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
        ),
    ),
    "flaubert": (
        FlaubertModel,
        FlaubertForSequenceClassification,
        FlaubertConfig(vocab_size=50, emb_dim=16, n_layers=1, n_heads=2, max_position_embeddings=16),
    ),
}  # fmt: skip
TARGETS = dict(bert=["query"], distilbert=["q_lin"], bart=["q_proj"], flaubert=["q_lin"])


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Folders with encoders that have no head."""
    folder = tmp_path_factory.mktemp("encoders")
    for name, (encoder, _, config) in KINDS.items():
        torch.manual_seed(0)
        encoder(config).save_pretrained(folder / name)
    return folder


def with_a_new_head(encoders, kind="bert", seed=0):
    torch.manual_seed(seed)
    return KINDS[kind][1].from_pretrained(encoders / kind, num_labels=2)


def adapted(encoders, *, kind="bert", by="peft", seed=0, **options):
    model, config = with_a_new_head(encoders, kind, seed), LoraConfig(r=2, target_modules=TARGETS[kind], **options)
    if by == "peft":
        return get_peft_model(model, config)
    return add_adapter(model, config)


def unfrozen(model, ends):
    for name, parameter in model.named_parameters():
        if re.search(ends, name):
            parameter.requires_grad_(True)
    return model


def two_by_transformers(encoders):
    """Of two adapters of a model of Transformers only the first is saved."""
    model = adapted(encoders, by="transformers")
    add_adapter(model, LoraConfig(r=2, target_modules=["query"]), "second")
    model.set_adapter(["default", "second"])
    return unfrozen(model, r"lora_.\.")


class Forgetful(BertForSequenceClassification):
    """Leaves its head out of what it saves."""

    _keys_to_ignore_on_save = [r"classifier\."]


def whole(model):
    return model.requires_grad_(True)


HEAD = r"classifier\.(weight|bias)"
UNSAVED = {
    "a head": (lambda e: unfrozen(adapted(e), HEAD), "modules_to_save=['classifier']"),
    "a head, by add_adapter": (lambda e: unfrozen(adapted(e, by="transformers"), HEAD), "modules_to_save=['classifier']"),
    "norms": (
        lambda e: unfrozen(adapted(e, task_type="SEQ_CLS"), r"LayerNorm\.(weight|bias)"),
        "modules_to_save=['LayerNorm']",
    ),
    "one norm": (
        lambda e: unfrozen(adapted(e, task_type="SEQ_CLS"), r"layer\.0\.output\.LayerNorm\."),
        "modules_to_save=['bert.encoder.layer.0.output.LayerNorm']",
    ),
    "biases": (lambda e: unfrozen(adapted(e, task_type="SEQ_CLS"), r"value\.bias"), "bias='all'"),
    "the second adapter": (two_by_transformers, "Train one adapter at a time"),
    "weights that the class leaves out": (
        lambda e: whole(Forgetful.from_pretrained(e / "bert", num_labels=2)),
        "_keys_to_ignore_on_save",
    ),
}


def ended():
    """Texts that end with BART's token for it."""
    return text_data().map(lambda row: {name: [*row[name], end] for name, end in (("input_ids", 2), ("attention_mask", 1))})


def refused(trainer, code):
    with pytest.raises(Refusal) as refusal:
        trainer.train()
    assert refusal.value.code == code
    assert trainer.privacy.ledger is None
    return str(refusal.value)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("case", UNSAVED)
def test_trained_weights_that_no_file_holds_are_refused(tmp_path, encoders, case):
    make, mend = UNSAVED[case]
    assert mend in refused(trainer_of(tmp_path, model=make(encoders)), "weights-not-saved")
    assert not (tmp_path / "out" / LEDGER_NAME).exists()


def replaced(encoders):
    """A head of one's own, put on a model from a file."""
    model = with_a_new_head(encoders)
    model.classifier = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["query"]))


NEW = {
    "without task_type": (lambda e: adapted(e), ["classifier"]),
    "without task_type, by add_adapter": (lambda e: adapted(e, by="transformers"), ["classifier"]),
    "a head of another name": (lambda e: adapted(e, kind="bart", task_type="SEQ_CLS"), ["classification_head"]),
    "a summary": (lambda e: adapted(e, kind="flaubert", task_type="SEQ_CLS"), ["sequence_summary"]),
    "a head that was replaced": (replaced, ["classifier"]),
}


@pytest.mark.parametrize("case", NEW)
def test_a_new_head_that_is_frozen_and_in_no_file_is_refused(tmp_path, encoders, case):
    make, heads = NEW[case]
    said = refused(trainer_of(tmp_path, model=make(encoders), data=ended(), evaluated=[*ended()]), "head-not-saved")
    assert f"Set modules_to_save={heads}" in said
    assert ("task_type='SEQ_CLS'" in said) == (heads == ["classifier"])


@pytest.mark.parametrize(
    ("kind", "by", "modules"),
    [
        ("bert", "peft", ["classifier"]),
        ("bert", "peft", ["classifier", "LayerNorm"]),
        ("bert", "transformers", ["classifier"]),
        ("bart", "peft", ["classification_head"]),
    ],
)
def test_with_the_mend_the_saved_files_hold_what_was_trained(tmp_path, encoders, kind, by, modules):
    data = ended()
    model = adapted(encoders, kind=kind, by=by, modules_to_save=modules)
    trainer = trained(trainer_of(tmp_path, model=model, data=data))
    trainer.save_model()
    batch = {name: value for name, value in pad(list(data)).items() if name != "labels"}
    again = with_a_new_head(encoders, kind, seed=5)
    if by == "peft":
        again = PeftModel.from_pretrained(again, tmp_path / "out")
    else:
        again.load_adapter(str(tmp_path / "out"))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**batch).logits, trainer.model.eval()(**batch).logits)


@pytest.mark.parametrize(
    "options", [dict(task_type="SEQ_CLS"), dict(task_type="SEQ_CLS", bias="all"), dict(modules_to_save=["classifier"])]
)
def test_adapters_that_are_saved_whole_are_trained_without_a_word(tmp_path, encoders, options, capsys):
    trained(trainer_of(tmp_path, model=adapted(encoders, **options), **EVALUATES))
    assert "in no file" not in capsys.readouterr().out


def test_code_of_the_users_own_saves_what_it_wants_to(tmp_path, encoders):
    class Saves(DopplerTrainer):
        def _save(self, output_dir=None, state_dict=None):
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), f"{output_dir}/weights.pt")

    trained(trainer_of(tmp_path, model=unfrozen(adapted(encoders), HEAD), cls=Saves, **EVALUATES))


def test_a_layer_that_is_trained_because_of_its_name_is_told(tmp_path, encoders, capsys):
    trained(trainer_of(tmp_path, model=adapted(encoders, kind="distilbert", task_type="SEQ_CLS")))
    assert "'pre_classifier' is trained in full next to the adapter" in capsys.readouterr().out


def test_adapters_of_a_model_from_a_configuration_are_told(tmp_path, capsys):
    trained(trainer_of(tmp_path, model=get_peft_model(tiny_bert(), LoraConfig(r=2, target_modules=["query"]))))
    assert "was made from a configuration and is in no file" in capsys.readouterr().out


def prompted(encoders, config):
    return get_peft_model(with_a_new_head(encoders), config(task_type="SEQ_CLS", num_virtual_tokens=2))


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_prompts_are_saved(tmp_path, encoders, config):
    attach = prefixed if config is PrefixTuningConfig else get_peft_model
    model = attach(with_a_new_head(encoders), config(task_type="SEQ_CLS", num_virtual_tokens=2))
    trained(trainer_of(tmp_path, model=model, **EVALUATES))


@pytest.mark.parametrize("asked", ["load_best_model_at_end", "resume_from_checkpoint"])
def test_an_encoder_of_prompts_is_in_no_checkpoint(tmp_path, encoders, asked):
    def of(**options):
        return trainer_of(tmp_path, model=prompted(encoders, PromptEncoderConfig), **options)

    if asked == "load_best_model_at_end":
        said = refused(of(**BEST), "prompt-not-loaded")
    else:
        trained(of(**EVALUATES))
        with pytest.raises(Refusal) as refusal:
            of(**EVALUATES | dict(max_steps=6)).train(resume_from_checkpoint=True)
        assert refusal.value.code == "prompt-not-loaded"
        said = str(refusal.value)
    assert f"{asked} does not work with a prompt that an encoder computes" in said


def test_the_best_adapter_of_another_name_is_not_found_at_the_end(tmp_path, encoders):
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model = get_peft_model(with_a_new_head(encoders), config, adapter_name="mine")
    said = refused(trainer_of(tmp_path, model=model, **BEST), "best-adapter-not-loaded")
    assert "this run trains the adapter 'mine'" in said


def test_the_outermost_modules_are_named_and_the_shortest_names_that_take_no_more():
    model = nn.ModuleDict(
        dict(a=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), b=nn.ModuleDict(dict(norm=nn.Linear(1, 1))))
    )
    assert outermost_modules(model, {"a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"}) == ["a"]
    assert outermost_modules(model, {"a.0.weight", "b.norm.weight", "b.norm.bias"}) == ["a.0.weight", "b"]
    assert adapter_fix(model, ["a.0"]) == "Set modules_to_save=['a.0'] in the adapter's configuration"


# --- models that from_pretrained does not give back -----------------------------------------------------------------------


def resnet():
    config = ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic")
    torch.manual_seed(0)
    return ResNetForImageClassification(config)


def fixed_by_opacus():
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(resnet())


class Images:
    def __len__(self):
        return 24

    def __getitem__(self, row):
        return {"pixel_values": torch.full((3, 32, 32), row / 24), "labels": row % 2}


def test_a_model_whose_layers_were_replaced_is_told_with_lines_that_work(tmp_path, capsys, monkeypatch):
    images = dict(data=Images(), evaluated=Images(), collator=default_data_collator)
    trainer = trained(trainer_of(tmp_path, model=fixed_by_opacus(), **images, per_device_train_batch_size=2))
    said = capsys.readouterr().out
    assert "from_pretrained will not restore this model: 'resnet.embedder.embedder.normalization' is a " in said
    assert "but would be a BatchNorm2d" in said
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "`ResNetForImageClassification.from_pretrained` does not restore this model: 'resnet.embedder" in card
    assert "ResNetForImageClassification.from_pretrained(folder)" not in card
    lines = re.findall(r"(?:torch\.save|model\.load_state_dict)\(.*?'\)\)?", said)
    assert len(lines) == 2
    monkeypatch.chdir(tmp_path)
    exec(lines[0], dict(torch=torch, trainer=trainer))
    torch.manual_seed(7)
    model = fixed_by_opacus()
    exec(lines[1], dict(torch=torch, model=model))
    batch = torch.stack([Images()[row]["pixel_values"] for row in range(4)])
    with torch.no_grad():
        found, expected = model.eval()(batch).logits, trainer.model.eval()(batch).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class WithMore(BertForSequenceClassification):
    def __init__(self, config, width):
        super().__init__(config)
        self.between = nn.Linear(width, width)


def more_labels(model):
    model.classifier = nn.Linear(16, 5)
    return model


def without_pooler(model):
    model.bert.pooler = nn.Identity()
    return model


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class WithParametrizedHead(BertForSequenceClassification):
    """The head has no bias, so that all of its weights are in the parametrization."""

    def __init__(self, config):
        super().__init__(config)
        self.classifier = nn.Linear(16, 2, bias=False)
        parametrize.register_parametrization(self.classifier, "weight", Doubled())


def another_parametrization():
    model = WithParametrizedHead(tiny_bert().config)
    parametrize.remove_parametrizations(model.classifier, "weight")
    parametrize.register_parametrization(model.classifier, "weight", Halved())
    return model


def another_parametrized_layer():
    model = WithParametrizedHead(tiny_bert().config)
    model.classifier = NonDynamicallyQuantizableLinear(16, 2, bias=False)
    parametrize.register_parametrization(model.classifier, "weight", Doubled())
    return model


def speech(model=Wav2Vec2ForSequenceClassification, config=Wav2Vec2Config):
    """A model with weight norm, for which torch makes a class of its own."""
    sizes = dict(conv_dim=[8], conv_kernel=[4], conv_stride=[2], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    return model(config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **sizes))


def without_weight_norm():
    model = speech()
    parametrize.remove_parametrizations(model.wav2vec2.encoder.pos_conv_embed.conv, "weight")
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (tiny_bert, None),
        (speech, None),
        (lambda: speech(WavLMForSequenceClassification, WavLMConfig), None),
        (
            without_weight_norm,
            "it does not have a layer 'wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight', unlike a new "
            "Wav2Vec2ForSequenceClassification",
        ),
        (lambda: WithParametrizedHead(tiny_bert().config), None),
        (another_parametrization, "'classifier.parametrizations.weight' is a Halved, but would be a Doubled"),
        (another_parametrized_layer, "'classifier' is a NonDynamicallyQuantizableLinear, but would be a Linear"),
        (lambda: tiny_bert(num_labels=7), None),
        (lambda: more_labels(tiny_bert()), "'classifier' would have weights of a different shape"),
        (
            lambda: without_pooler(tiny_bert()),
            "it does not have a layer 'bert.pooler.dense', unlike a new BertForSequenceClassification",
        ),
        (lambda: WithMore(tiny_bert().config, 3), "its class needs more arguments than a configuration"),
    ],
)
def test_another_model_than_that_of_the_configuration_is_known(make, why):
    model = make()
    state = torch.get_rng_state()
    assert why_not_loaded(model) == why
    assert torch.equal(torch.get_rng_state(), state)


class AroundAnEncoder(nn.Module):
    """A module of a user's own, whose head no file has."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return {"logits": self.head(self.encoder(input_ids, attention_mask).last_hidden_state[:, 0])}


class WithOwnLoss(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return nn.functional.cross_entropy(model(**inputs)["logits"], labels, reduction="none")


def _copied(folder):
    return copy.deepcopy(BertForSequenceClassification.from_pretrained(folder)), DopplerTrainer, "classifier"


def _around(folder):
    return AroundAnEncoder(BertModel.from_pretrained(folder)), WithOwnLoss, "head"


@pytest.mark.parametrize("make", [_copied, _around])
def test_a_frozen_head_without_marks_is_noted_and_the_note_mends_it(tmp_path, encoders, capsys, make):
    """In a copy no tensor has Transformers' mark of what was loaded, and a module of one's own has none on its head."""
    options = dict(r=2, target_modules=["query"])
    for is_mended in (False, True):
        model, cls, head = make(encoders / "bert")
        config = LoraConfig(**options, **({"modules_to_save": [head]} if is_mended else {}))
        trained(trainer_of(tmp_path, model=get_peft_model(model, config), cls=cls, rehearse=True))
        said = capsys.readouterr().out
        assert (f"{head}' seem to be new" in said) != is_mended
        assert (f"modules_to_save=['{head}']" in said) != is_mended


def test_adapters_that_train_no_other_layers_name_the_kind_that_does(tmp_path, encoders):
    config = TrainableTokensConfig(task_type="SEQ_CLS", target_modules=["word_embeddings"], token_indices=[7, 8])
    tokens = get_peft_model(with_a_new_head(encoders), config)
    message = refused(trainer_of(tmp_path, model=tokens, max_steps=1), "head-not-saved")
    assert "LoraConfig" in message
    assert "modules_to_save" in message
    assert "trainable_token_indices" in message
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], trainable_token_indices=[7, 8])
    trained(trainer_of(tmp_path / "b", model=get_peft_model(with_a_new_head(encoders), lora), max_steps=1))


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_an_adapter_that_is_resumed_on_another_base_is_noted(tmp_path, capsys, adapter):
    def on(base, *, steps, resume):
        folder = tmp_path / base
        if not folder.exists():
            tiny_bert().save_pretrained(folder)
        model = get_peft_model(
            BertForSequenceClassification.from_pretrained(folder),
            LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]),
            adapter_name=adapter,
        )
        saves = dict(save_strategy="steps", save_steps=1, max_steps=steps)
        trainer_of(tmp_path, model=model, **saves).train(resume_from_checkpoint=resume)
        return " ".join(capsys.readouterr().out.split())

    said = "If they are two models, stop here, and resume with the first one"
    assert said not in on("mine/cased", steps=1, resume=None)
    told = on("mine/uncased", steps=2, resume=True)
    assert said in told
    assert f"was trained on the base model {tmp_path / 'mine' / 'cased'}" in told
    # Of the same name, perhaps in another folder: the mend, since the resumed run was of the other base.
    assert said not in on("elsewhere/uncased", steps=3, resume=True)
