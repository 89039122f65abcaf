"""Random numbers of a seed that may be known are refused before the first step, wherever they are drawn."""

import functools
import random

import numpy as np
import pytest
import torch
import transformers as hf
from peft import VeraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from doppler_hf.audit import neighbour_distances
from tests.support.adapters import config_of
from tests.support.refusals import refused
from tests.support.tiny import pad, tiny_bert
from tests.support.trainers import checked_trainer_of as trainer_of
from tests.support.trainers import refused_training, trained


class Noisy(nn.Module):
    """A layer whose output has noise in training, drawn by a function of its shape."""

    def __init__(self, layer, draw):
        super().__init__()
        self.layer, self.draw = layer, draw

    def forward(self, x):
        out = self.layer(x)
        return out + 0.1 * torch.as_tensor(self.draw(tuple(out.shape))).to(out) if self.training else out


def noisy(draw, **attributes):
    model = tiny_bert()
    attention = model.bert.encoder.layer[0].attention.self
    attention.value = Noisy(attention.value, draw)
    vars(attention.value).update(attributes)
    return model


def from_global_generator(shape):
    return torch.randn(shape)


class Holder:
    def __init__(self, generator):
        self.generators = {"noise": [generator]}

    def draw(self, shape):
        return torch.randn(shape, generator=self.generators["noise"][0])


class WithoutRegistration(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)


def hooked():
    rng, model = np.random.default_rng(0), tiny_bert()
    model.bert.embeddings.register_forward_hook(lambda module, args, output: output + 0.1 * rng.random())
    return model


def seeded():
    return torch.Generator().manual_seed(0)


def pvera(**options):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes, pad_token_id=0, max_position_embeddings=16))
    config = config_of("PveraConfig", r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", **options)
    return get_peft_model(model, config)


HELD = {
    "torch's, as an attribute": (lambda: noisy(from_global_generator, generator=seeded()), "attribute generator"),
    "NumPy's, in a dictionary": (
        lambda: noisy(from_global_generator, rngs={"noise": np.random.default_rng(0)}), r"attribute rngs\['noise'\]"
    ),
    "NumPy's old one, in a list": (lambda: noisy(from_global_generator, rngs=[np.random.RandomState(0)]), r"rngs\[0\]"),
    "Python's": (lambda: noisy(from_global_generator, rng=random.Random(0)), "attribute rng"),
    "of a plain object's list": (lambda: noisy(Holder(seeded()).draw), r"attribute draw\.generators\['noise'\]\[0\]"),
    "of a layer that is in a list": (
        lambda: noisy(from_global_generator, others=[WithoutRegistration()]), r"others\[0\]\.rng"
    ),
    "of a method": (lambda: noisy(np.random.default_rng(0).standard_normal), "attribute draw"),
    "of a partial function": (lambda: noisy(functools.partial(torch.randn, generator=seeded())), "attribute draw"),
    "of a hook": (hooked, r"'bert.embeddings' \(BertEmbeddings\)"),
    "PEFT's PVeRA": (lambda: pvera(generator_seed=0), r"q_proj' \(Linear\) .* attribute pvera_generator\['default'\]"),
}  # fmt: skip


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", HELD)
def test_a_generator_that_a_layer_holds_is_refused_by_name(tmp_path, name, checked):
    make, match = HELD[name]
    refused_training(tmp_path, "generator-of-its-own", match=match, model=make(), grad_sample_self_check=checked)


def test_what_the_refusal_names_mends_it(tmp_path):
    trained(trainer_of(tmp_path / "pvera", model=pvera(), max_steps=1))
    model = noisy(from_global_generator, generator=seeded())
    model.bert.encoder.layer[0].attention.self.value.generator = None
    trained(trainer_of(tmp_path / "none", model=model, max_steps=1))


SYSTEM = random.SystemRandom()
NO_GENERATOR = {
    "of the operating system": lambda: noisy(from_global_generator, rng=SYSTEM),
    "torch's global one": lambda: noisy(from_global_generator, generator=torch.default_generator),
    "NumPy's global one": lambda: noisy(from_global_generator, rng=np.random.mtrand._rand),
    "a seed of a projection": lambda: get_peft_model(tiny_bert(), VeraConfig(r=2, target_modules=["query"])),
    "global numbers of NumPy": lambda: noisy(lambda shape: np.random.standard_normal(shape)),
    "dropout": lambda: tiny_bert(hidden_dropout_prob=0.3),
}


@pytest.mark.parametrize("name", NO_GENERATOR)
def test_secret_numbers_train(tmp_path, name):
    trained(trainer_of(tmp_path, model=NO_GENERATOR[name](), max_steps=1))


# --- seeds that are set in a pass -----------------------------------------------------------------------------------------


def after(seed):
    def draw(shape):
        seed()
        return torch.randn(shape)

    return draw


SEEDS = {
    "torch": lambda: torch.manual_seed(3),
    "NumPy": lambda: np.random.seed(3),
    "Python": lambda: random.seed(3),
    "torch and NumPy and Python": lambda: hf.set_seed(3),
}


class SeededLoss(DopplerTrainer):
    """Mixes words of the loss by numbers of a seed, of which one name is set for each test."""

    seed = staticmethod(lambda: None)

    def compute_per_sample_loss(self, model, inputs):
        self.seed()
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


@pytest.mark.parametrize("where", ["the model", "the loss", "the collator"])
@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_in_a_pass_is_refused_and_trains_without(tmp_path, monkeypatch, name, where):
    seed, options, what = SEEDS[name], {}, "The model or its loss"
    if where == "the model":
        options["model"] = noisy(after(seed))
    elif where == "the loss":
        monkeypatch.setattr(SeededLoss, "seed", staticmethod(seed))
        options["cls"] = SeededLoss
    else:
        what = "data_collator"
        options["collator"] = lambda rows: (seed(), pad(rows))[1]
    refused_training(tmp_path, "public-seed", match=f"^{what} .*{name}", **options)
    trained(trainer_of(tmp_path / "mended", max_steps=1))


class SeededDropout(nn.Dropout):
    """Has a mask that is the same every time, and none where there is no dropout."""

    def forward(self, x):
        if self.training and self.p:
            torch.manual_seed(0)
        return super().forward(x)


def test_a_seed_that_is_set_only_with_dropout_is_refused(tmp_path):
    model = tiny_bert()
    model.dropout = SeededDropout(0.1)
    refused_training(tmp_path, "public-seed", match="torch", model=model)


HIDDEN = np.random.default_rng(0)


def of_a_global_variable(shape):
    return HIDDEN.standard_normal(shape)


class HiddenLoss(DopplerTrainer):
    """Weighs losses by numbers of a generator in a global variable."""

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return losses * torch.as_tensor(of_a_global_variable(len(losses))).to(losses).exp()


class Averaging(DopplerTrainer):
    """Divides losses by a running mean of them, which it keeps."""

    mean = 1.0

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
        self.mean = 0.9 * self.mean + 0.1 * float(losses.detach().mean())
        return losses / self.mean


@pytest.mark.parametrize(
    "options",
    [dict(model=lambda: noisy(of_a_global_variable)), dict(cls=HiddenLoss), dict(cls=Averaging)],
    ids=["a model", "a loss", "a running mean"],
)
def test_a_hidden_generator_or_what_is_kept_from_batch_to_batch_is_refused(tmp_path, options):
    options = options | ({"model": options["model"]()} if "model" in options else {})
    refused_training(tmp_path, "not-repeatable", **options)


def in_a_fork(shape):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.randn(shape)


def test_a_seed_in_a_fork_is_refused_since_numbers_follow_the_place_of_a_row(tmp_path):
    refused_training(tmp_path, "depends-on-others", model=noisy(in_a_fork))


def masked_by_a_seed(rows):
    torch.manual_seed(0)
    batch = pad(rows)
    return batch | {"input_ids": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.2, 1)}


def test_a_collator_that_masks_by_a_seed_is_refused(tmp_path):
    refused_training(tmp_path, "public-seed", match="^data_collator .*torch", collator=masked_by_a_seed)


def test_a_collator_with_a_hidden_generator_is_refused(tmp_path):
    def collate(rows):
        batch = pad(rows)
        is_masked = torch.as_tensor(HIDDEN.random(batch["input_ids"].shape) < 0.2)
        return batch | {"input_ids": batch["input_ids"].masked_fill(is_masked, 1)}

    refused_training(tmp_path, "not-repeatable", match="^data_collator", collator=collate)


# --- doppler-hf check -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("generator-of-its-own", dict(model=lambda: pvera(generator_seed=0))),
        ("public-seed", dict(model=lambda: noisy(after(SEEDS["NumPy"])))),
        ("not-repeatable", dict(cls=HiddenLoss)),
    ],
    ids=["held", "seeded", "hidden"],
)
def test_the_neighbour_test_refuses_them_without_the_start_check(tmp_path, code, options):
    options = options | ({"model": options["model"]()} if "model" in options else {})
    trainer = trainer_of(tmp_path, grad_sample_self_check=False, **options)
    with refused(code):
        neighbour_distances(trainer, pairs=2)
