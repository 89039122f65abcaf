"""What reaches the engine is checked before the first step: rows, losses and layers that look at their neighbours."""

import math
import random
import re
import types

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset, Sequence, Value
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.data import default_collate

from doppler_hf import DopplerTrainer
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.preflight import values
from doppler_hf.preflight.model import refuse_model
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.clipping.gradients import Dense, Notes, Product
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import OfLogits, On, TokenMean, at, changing, refused_training, trained
from tests.support.trainers import checked_trainer_of as trainer_of

# Before, Transformers drew a coin for each layer, also where none is ever left out, and such a model is refused for that.
draws_for_layers_that_stay = pytest.mark.skipif(
    TorchVersion(hf.__version__) < "5.23", reason="draws coins for layers that always stay"
)


def test_a_layer_that_is_replaced_during_training_ends_the_run(tmp_path):
    def replace(model, **_):
        model.classifier = nn.Linear(model.config.hidden_size, model.config.num_labels)

    trainer = trainer_of(tmp_path, callbacks=[On(step_begin=at(1, replace))])
    with refused("replaced-parameter", match=r"'classifier\.\w+' was replaced by another one"):
        trainer.train()
    assert trainer.state.global_step == 1
    model = tiny_bert()
    replace(model)
    trains(tmp_path / "before", model=model)  # as advised


def trains(tmp_path, **options):
    """Train a step without a refusal."""
    assert trained(trainer_of(tmp_path, max_steps=1, **options)).state.global_step == 1


class PlainSGD(DopplerTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


class OwnDoppler(DopplerTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = DopplerOptimizer(self.model.parameters(), lr=0.1, base="sgd")
        return self.optimizer


class WithALearnedScale(DopplerTrainer):
    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        if not hasattr(self.model, "scale"):
            self.scale = nn.Linear(2, 2)
            optimizer.add_param_group({"params": [*self.scale.parameters()]})
        return optimizer

    def compute_per_sample_loss(self, model, inputs):
        scale = getattr(model, "scale", None) or self.scale
        labels = inputs.pop("labels")
        return F.cross_entropy(scale(model(**inputs).logits), labels, reduction="none")


def test_a_weight_of_the_loss_is_trained_as_a_layer_of_the_model_alone(tmp_path):
    options = dict(cls=WithALearnedScale, max_steps=1, rehearse=False, grad_sample_self_check=False)
    with refused("foreign-parameters", match="make them a layer of the model"):
        trainer_of(tmp_path, **options).train()
    model = tiny_bert()
    model.scale = nn.Linear(2, 2)
    before = model.scale.weight.detach().clone()
    trained(trainer_of(tmp_path / "mended", model=model, **options))
    assert not torch.equal(model.scale.weight, before)


def test_a_doppler_optimizer_of_the_users_own_is_told_the_size_of_the_noise(tmp_path):
    trainer = trained(trainer_of(tmp_path, cls=OwnDoppler, max_steps=1))
    assert trainer.optimizer.optimizer.noise_std == trainer.privacy.mechanism.noise_std(0) > 0.0


# --- the collator ---------------------------------------------------------------------------------------------------------


def without_mask(examples):
    return {name: value for name, value in pad(examples).items() if name != "attention_mask"}


def twice(examples):
    return {name: torch.cat([value, value]) for name, value in pad(examples).items()}


def randomly_mixed_up(examples):
    """MixUp as it is: each row with another one, in random order and with a random share."""
    batch = pad(examples)
    share = torch.rand(())
    other = batch["input_ids"][torch.randperm(len(examples))]
    return batch | {"input_ids": (share * batch["input_ids"] + (1 - share) * other).long()}


@pytest.mark.parametrize("coin", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_mixing_of_one_batch_in_ten_is_found(tmp_path, coin):
    def collator(examples):
        return randomly_mixed_up(examples) if coin() < 0.1 else pad(examples)

    refused_training(tmp_path, "rows-mixed", collator=collator)


class Recurrent(nn.Module):
    """An LSTM over packed rows, which torch wants in descending order of their lengths if they are called sorted."""

    def __init__(self, *, enforce_sorted):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)
        self.enforce_sorted = enforce_sorted

    def forward(self, input_ids, attention_mask):
        lengths = attention_mask.sum(dim=1).cpu()
        rows = nn.utils.rnn.pack_padded_sequence(
            self.embedding(input_ids), lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        return self.head(self.lstm(rows)[1][0][-1])


@pytest.mark.parametrize("is_reverse", [True, False])
def test_rows_sorted_by_length_are_refused_with_what_trains_in_their_order(tmp_path, is_reverse):
    def by_length(examples):
        return pad(sorted(examples, key=lambda row: len(row["input_ids"]), reverse=is_reverse))

    options = dict(cls=OfLogits, remove_unused_columns=False)
    model = Recurrent(enforce_sorted=True)
    refused_training(tmp_path, "rows-reordered", match="enforce_sorted=False", collator=by_length, model=model, **options)
    trains(tmp_path, model=Recurrent(enforce_sorted=False), **options)


def padded_on_the_left(examples):
    padded = ("input_ids", "attention_mask")
    batch = pad([row | {name: row[name][::-1] for name in padded} for row in examples])
    return batch | {name: batch[name].flip(1) for name in padded}


class OfEachClass(DopplerTrainer):
    """Returns a loss for each class, until told to take their mean."""

    is_mean = False

    def compute_per_sample_loss(self, model, inputs):
        losses = torch.nn.functional.log_softmax(model(**inputs).logits, dim=1)
        return losses.mean(dim=1) if self.is_mean else losses


def test_losses_of_each_class_are_refused_and_their_mean_trains(tmp_path, monkeypatch):
    with refused("other-number-of-losses", match=r"losses\.mean\(dim=1\)"):
        trainer_of(tmp_path, cls=OfEachClass, max_steps=1).train()
    monkeypatch.setattr(OfEachClass, "is_mean", True)
    trainer_of(tmp_path, cls=OfEachClass, max_steps=1).train()


class OfTokens(DopplerTrainer):
    """Returns a loss for each token, or what a function makes of them."""

    reduced = staticmethod(lambda losses, labels: losses)

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        losses = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), reduction="none")
        return self.reduced(losses, labels)


def of_tokens(rows):
    """Collate rows whose label is that of each of their tokens."""
    batch = pad(rows)
    return batch | {"labels": batch["labels"][:, None].where(batch["attention_mask"] > 0, -100)}


def test_losses_of_tokens_are_refused_and_the_mean_that_the_messages_name_trains(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = hf.BertForTokenClassification(tiny_bert().config)
    options = dict(model=model, cls=OfTokens, collator=of_tokens, data=rows_of([6, 9, 3, 8] * 6))
    mends = [refused_training(tmp_path, "other-number-of-losses", **options)]
    wrong_ones = lambda losses, labels: losses.view(labels.shape), lambda losses, labels: losses.view(labels.shape).mean(1)
    for wrong in wrong_ones:
        monkeypatch.setattr(OfTokens, "reduced", staticmethod(wrong))
        code = "depends-on-others" if len(mends) == 2 else "other-number-of-losses"
        mends.append(refused_training(tmp_path, code, **options))
    (mend,) = {found.group() for text in mends if (found := re.search(r"losses\.view\(.*?\.clamp\(min=1\)", text))}
    assert all(mend in text for text in mends)
    monkeypatch.setattr(OfTokens, "reduced", staticmethod(lambda losses, labels: eval(mend)))
    trains(tmp_path, **options)


class OfPairs(DopplerTrainer):
    """Combines scores of shape (rows, 1) with amounts of shape (rows,), until told to give both one shape."""

    is_squeezed = False

    def compute_per_sample_loss(self, model, inputs):
        amounts = inputs.pop("labels").float()
        logits = model(**inputs).logits
        scores = logits.squeeze(-1) if self.is_squeezed else logits
        return (scores - amounts).square()


def test_losses_of_pairs_of_rows_are_refused_and_scores_of_the_labels_shape_train(tmp_path, monkeypatch):
    options = dict(model=tiny_bert(num_labels=1), cls=OfPairs)
    refused_training(tmp_path, "other-number-of-losses", match=r"one for each pair.*logits\.squeeze\(-1\)", **options)
    monkeypatch.setattr(OfPairs, "is_squeezed", True)
    trains(tmp_path, **options)


def every_other(examples):
    return pad(examples[::2])


@pytest.mark.parametrize(("collator", "got"), [(twice, "more"), (every_other, "fewer")])
def test_rows_are_counted_in_every_step(tmp_path, monkeypatch, collator, got):
    monkeypatch.setattr(values, "_COLLATED_AT_ONCE", 3)  # the look at rows before the run finds no larger batch
    of_many = lambda examples: collator(examples) if len(examples) > 3 else pad(examples)  # noqa: E731
    trainer = trainer_of(tmp_path, collator=of_many, grad_sample_self_check=False, per_device_train_batch_size=10)
    with refused("other-number-of-losses", match=got):
        trainer.train()


def test_a_decoder_that_is_padded_on_the_left_is_told_to_pad_on_the_right(tmp_path):
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, pad_token_id=0, num_labels=2)
    model = hf.GPT2ForSequenceClassification(config)
    refused_training(
        tmp_path, "depends-on-others", match=r"tokenizer\.padding_side = 'right'", model=model, collator=padded_on_the_left
    )
    trains(tmp_path, model=model, collator=pad)


# --- the loss -------------------------------------------------------------------------------------------------------------


def plus(term):
    """Return a trainer that adds a term to the cross-entropy, of the logits and itself."""

    class Plus(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            logits = model(**inputs)["logits"]
            losses = F.cross_entropy(logits, labels, reduction="none")
            return losses + term(logits, losses)

    return Plus


# Far below what rounding may change, and each times the number of examples of a draw.
OF_THE_BATCH = {
    "the sum of logits": lambda z, losses: 1e-4 * (z * z.sum(0)).sum(-1),
    "the mean of losses": lambda z, losses: -1e-4 * losses.mean(),
    "next to nothing": lambda z, losses: 1e-12 * (z * z.sum(0)).sum(-1),
    "the one before": lambda z, losses: 1e-4 * (z * z.roll(1, 0)).sum(-1),
    "the first": lambda z, losses: 1e-4 * (z * z[:1]).sum(-1),
    "the last": lambda z, losses: 1e-4 * (z * z[-1:]).sum(-1),
    "those before": lambda z, losses: 1e-4 * z.cumsum(0).square().sum(-1),
    "its own label's": lambda z, losses: 1e-4 * (z @ z.mT).softmax(1).square().sum(1),
    "larger batches": lambda z, losses: max(len(z) - 8, 0) * 1e-4 * (z * z.sum(0)).sum(-1),
}
OF_ITSELF = {
    "a penalty": lambda z, losses: 1e-4 * z.square().sum(-1),
    "entropy": lambda z, losses: -(z.softmax(1) * z.log_softmax(1)).sum(1),
    "a weight by confidence": lambda z, losses: losses * (1 - z.softmax(1).amax(1).detach()) ** 2,
    "nothing": lambda z, losses: 0.0 * losses,
}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 32) for name in OF_THE_BATCH), *thorough(*((name, 8) for name in OF_THE_BATCH if name != "larger batches"))],
)
def test_a_loss_that_reads_the_batch_is_refused_however_little(tmp_path, name, size):
    options = dict(per_device_train_batch_size=size, gradient_accumulation_steps=1, data=text_data(64))
    refused_training(tmp_path, "depends-on-others", match="'classifier.bias'", cls=plus(OF_THE_BATCH[name]), **options)


@pytest.mark.parametrize("name", OF_ITSELF)
def test_a_loss_of_its_own_example_trains(tmp_path, name):
    trains(tmp_path, cls=plus(OF_ITSELF[name]), per_device_train_batch_size=32, data=text_data(64))


@pytest.mark.parametrize("trains_below", [False, True])
def test_a_layer_that_reads_the_batch_is_refused_however_little(tmp_path, trains_below):
    model = tiny_bert()
    model.bert.embeddings.register_forward_hook(lambda module, args, output: output - 1e-4 * output.mean(0))
    model.bert.requires_grad_(trains_below)
    at = r"'bert\.embeddings\.LayerNorm\.bias'" if trains_below else "the model's inputs"
    refused_training(tmp_path, "depends-on-others", match=at, model=model)


@pytest.mark.parametrize("trainer", [TokenMean, changing(lambda losses, inputs: losses / len(losses))])
def test_a_loss_that_scales_with_the_batch_is_refused_without_a_number_that_is_computed_from_examples(tmp_path, trainer):
    # The first two have equal shares, as if both were merely clipped to less.
    refusal = refused_training(
        tmp_path, "depends-on-others", match="the loss depends", cls=trainer, data=rows_of([6, 6, 3, 8] * 6)
    )
    assert not re.search(r"\d", re.sub(r"'[\w.]+'", "", refusal))


def test_a_wrong_rule_is_refused_with_a_line_that_mends_it(tmp_path, monkeypatch):
    noted, model = Notes.note, tiny_bert()
    wrong = model.bert.pooler.dense.weight

    def note(self, parameter, gradient):
        if parameter is wrong:
            is_product = isinstance(gradient, Product)
            gradient = Product(gradient.left, gradient.right * 1.5) if is_product else Dense(gradient.values * 1.5)
        noted(self, parameter, gradient)

    monkeypatch.setattr(Notes, "note", note)
    trainer = trainer_of(tmp_path, model=model, max_steps=1)
    with refused("wrong-gradients", match="'bert.pooler.dense.weight'.*engine='book_keeping'") as refusal:
        trainer.train()
    line = re.search(r"(trainer\.model\.\S+\))\. Please", str(refusal.value))[1]
    exec(line, {"trainer": trainer})  # as the user would
    trainer.train()
    assert not wrong.requires_grad


# --- models that look at their neighbours' padding ------------------------------------------------------------------------


SIZES = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=2,
    max_position_embeddings=32, pad_token_id=0,
)  # fmt: skip


def llama(**more):
    torch.manual_seed(0)
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**(SIZES | dict(num_key_value_heads=2) | more)))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 6}  # fmt: skip


def fnet():
    """Mixes all places of a row, those of the padding too."""
    return hf.FNetForSequenceClassification(hf.FNetConfig(**SIZES, hidden_dropout_prob=0.0))


class OnTheFly(torch.utils.data.Dataset):
    """Texts whose lengths nobody knows beforehand; one of them is long."""

    def __init__(self, number, *, padded_to=0):
        self.number, self.padded_to = number, padded_to

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        length = 30 if index == self.number // 2 + 1 else 3 + index % 3
        tokens, rest = [5 + (index + 7 * place) % 40 for place in range(length)], max(self.padded_to - length, 0)
        return {"input_ids": tokens + [0] * rest, "attention_mask": [1] * length + [0] * rest, "labels": index % 2}


def test_lengths_are_asked_for_where_positions_depend_on_the_longest(tmp_path):
    model = llama(max_position_embeddings=8, rope_parameters=DYNAMIC, initializer_range=0.2)
    refused_training(tmp_path, "positions-of-the-batch", match="unknown lengths", model=model, data=OnTheFly(300))
    trains(tmp_path, model=model, data=OnTheFly(300, padded_to=32))  # the fix


class Remembering(hf.BertForSequenceClassification):
    """Keeps a running mean of its embeddings, and subtracts it."""

    def __init__(self, config, kind):
        super().__init__(config)
        mean = torch.zeros(config.hidden_size)
        if kind == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        else:
            self.register_buffer("mean", mean, persistent=kind == "saved buffer")

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.bert.embeddings(input_ids)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(dim=(0, 1)), alpha=0.1)
        embedded = self.bert.embeddings.word_embeddings(input_ids) - self.mean
        return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("kind", ["buffer", "saved buffer", "parameter"])
def test_statistics_of_the_data_are_refused_wherever_they_are_kept(tmp_path, kind):
    code = "weights-written" if kind == "parameter" else "buffers-written"
    refused_training(tmp_path, code, match="'mean'", model=Remembering(tiny_bert().config, kind))


# --- what would be ignored ------------------------------------------------------------------------------------------------


class OfTheBatch(DopplerTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)


class OfBoth(OfTheBatch):
    def compute_per_sample_loss(self, model, inputs):
        return super().compute_per_sample_loss(model, inputs)


def test_a_loss_of_the_batch_is_refused_where_it_would_not_be_called(tmp_path):
    with refused("method-without-effect", match=r"OfTheBatch\.compute_loss"):
        trainer_of(tmp_path, cls=OfTheBatch)
    trainer_of(tmp_path, cls=OfBoth)
    trainer_of(tmp_path, cls=OfTheBatch, disable_dp=True, noise_multiplier=None)


class InOrderOf(nn.Module):
    """Takes the rows of a batch with the longest first, as for packing, and puts them back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.mixed, self.head = nn.Embedding(50, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, labels):
        order = torch.argsort(-attention_mask.sum(dim=1), stable=True)
        kept = attention_mask.unsqueeze(-1)
        sequences = (self.embeddings(input_ids) * kept)[order]
        sequences = torch.tanh(self.mixed(sequences.mT)).mT[torch.argsort(order)]
        logits = self.head((sequences * kept).sum(dim=1) / kept.sum(dim=1))
        return F.cross_entropy(logits, labels, reduction="none")


class OfOwnLosses(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return model(**inputs)


def of_no_number():
    model = tiny_bert()
    model.classifier.weight.data[0, 0] = math.nan
    return model


@pytest.mark.parametrize(("trainable", "change"), [(False, "frozen"), (True, "unfrozen")])
@pytest.mark.parametrize(("event", "steps"), [("train_begin", 0), ("step_begin", 0), ("step_end", 1)])
def test_what_is_trained_stays_the_same_or_no_further_step_is_counted(tmp_path, event, steps, trainable, change):
    model = tiny_bert()
    model.classifier.requires_grad_(not trainable)
    change_it = On(**{event: lambda model, **_: model.classifier.requires_grad_(trainable)})
    trainer = trainer_of(tmp_path, model=model, callbacks=[change_it])
    with refused("trained-parameters-changed", match=f"'classifier.bias' was {change}"):
        trainer.train()
    assert trainer.state.global_step == steps
    if not steps:
        assert PrivacyLedger.load(tmp_path / "out").epsilon() == 0.0
        trainer.train()  # it is frozen before it now


def test_a_private_checkpoint_is_not_resumed_without_privacy(tmp_path):
    # Without an optimizer's state there is nothing that the other optimizer cannot read.
    saving = dict(save_strategy="steps", save_steps=2, save_only_model=True)
    trainer_of(tmp_path, **saving).train()
    public = trainer_of(tmp_path, noise_multiplier=None, disable_dp=True, **saving)
    with refused("private-checkpoint"):
        public.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


class MixedUp(DopplerTrainer):
    """Mixes each row with the one before it, in training only."""

    def compute_per_sample_loss(self, model, inputs):
        if model.training:
            embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = 0.5 * embedded + 0.5 * embedded.roll(1, 0)
        return DopplerTrainer.compute_per_sample_loss(self, model, inputs)


def frozen_embeddings():
    model = tiny_bert(initializer_range=0.3, hidden_dropout_prob=0.1)
    model.get_input_embeddings().requires_grad_(False)
    return model


def mixture(**more):
    torch.manual_seed(0)
    config = hf.NllbMoeConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1,
        max_position_embeddings=64, init_std=0.2, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        **more,
    )  # fmt: skip
    model = hf.NllbMoeForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("router" not in name and "expert" not in name)
    return model


@draws_for_layers_that_stay
def test_a_capacity_that_the_batch_shares_is_refused(tmp_path):
    def collate(examples):
        batch = pad(examples)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch | {"labels": labels, "input_ids": batch["input_ids"].clamp(min=1)}

    options = dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0, router_jitter_noise=0.0)
    refused_training(
        tmp_path, "expert-capacity", match="expert_capacity=1048576", model=mixture(**options), collator=collate
    )
    trains(tmp_path, model=mixture(expert_capacity=2**20, **options), collator=collate)  # the fix


# --- which examples are looked at -----------------------------------------------------------------------------------------


def rows_of(lengths):
    generator = np.random.default_rng(0)
    tokens = [generator.integers(5, 50, size=length).tolist() for length in lengths]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": index % 2} for index, row in enumerate(tokens)]
    return Dataset.from_list(rows)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_examples_without_a_gradient_are_replaced_by_others(tmp_path, value):
    """The shortest and the longest have no gradient, or none that is finite; all losses scale with the batch."""

    def unlabelled(losses, inputs):
        lengths = inputs["attention_mask"].sum(dim=1)
        return losses * len(lengths) * torch.where((lengths == 3) | (lengths == 8), value, 1.0)

    refused_training(tmp_path, "depends-on-others", match="the loss depends", cls=changing(unlabelled))


@pytest.mark.parametrize(("views", "checked"), [(1, True), (2, False)])
def test_a_transform_that_makes_more_rows_of_an_example_is_refused(tmp_path, views, checked):
    """Each window of a long text would contribute C."""
    data = text_data().with_transform(lambda rows: {name: [*values, *values] for name, values in rows.items()})
    options = dict(grad_sample_self_check=checked, augmentation_multiplicity=views, remove_unused_columns=False)
    refused_training(tmp_path, "rows-not-examples", data=data, **options)


UNCHECKED = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, grad_sample_self_check=False)


@pytest.mark.parametrize(
    "collator",
    [hf.default_data_collator, hf.DataCollatorWithPadding(hf.BertTokenizer(vocab={"[PAD]": 0})), default_collate],
    ids=["default", "padding", "torch's"],
)
def test_an_example_without_a_column_of_others_is_refused(tmp_path, collator):
    """Transformers' collators ask the first example alone which columns there are."""
    data = [{"input_ids": [index + 1] * 4, "token_type_ids": [0] * 4, "label": index % 2} for index in range(8)]
    del data[0]["token_type_ids"]
    trainer = trainer_of(tmp_path, data=data, collator=collator, **UNCHECKED)
    with refused("columns-differ"):
        trainer.train()


def test_an_example_of_fewer_choices_than_others_is_refused(tmp_path):
    """Transformers' collator takes as many choices of each example as the first one has."""
    torch.manual_seed(0)
    model = hf.BertForMultipleChoice(tiny_bert().config)
    data = [{"input_ids": [[index + 1] * 4] * (3 if index else 2), "label": index % 2} for index in range(8)]
    collator = hf.DataCollatorForMultipleChoice(hf.BertTokenizer(vocab={"[PAD]": 0}))
    options = dict(model=model, data=data, collator=collator, **UNCHECKED | {"per_device_train_batch_size": 7})
    trainer = trainer_of(tmp_path, **options)
    with refused("choices-differ"):
        trainer.train()


# --- precision, and what is remembered ------------------------------------------------------------------------------------


def big_bird(**more):
    config = hf.BigBirdConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2,
        block_size=2, num_random_blocks=1, max_position_embeddings=64, pad_token_id=0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout=0.0, **more,
    )  # fmt: skip
    model = hf.BigBirdForSequenceClassification(config)
    model.bert.pooler.requires_grad_(False)  # which the head does not use
    return model


def test_a_model_that_replaces_its_layers_for_good_is_refused(tmp_path):
    data = rows_of([8] * 20 + [30] * 20)
    refused_training(tmp_path, "layers-replaced", match=r"'bert\.encoder\S+'", model=big_bird(), data=data)
    trains(tmp_path, model=big_bird(attention_type="original_full"), data=data)  # the fix


def bart():
    parts = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads", "layers")}
    return hf.BartForSequenceClassification(hf.BartConfig(vocab_size=50, d_model=16, encoder_layerdrop=0.1, **parts))


def deberta():
    return hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(**tiny_bert(hidden_dropout_prob=0.1).config.to_diff_dict(), relative_attention=True)
    )


SHARED = {
    "LayerDrop": (bart, "'encoder_layerdrop', 'layerdrop'"),
    "SpecAugment": (lambda: tiny_bert(mask_time_prob=0.05), "'mask_time_prob'"),
    "dropout of a table": (deberta, "pos_dropout'"),
}


@pytest.mark.parametrize("name", SHARED)
def test_random_numbers_that_all_rows_share_are_refused_and_the_line_that_is_named_switches_them_off(tmp_path, name):
    """A model copies them from its config, and the copy is what counts."""
    make, named = SHARED[name]
    model = make()
    trainer = trainer_of(tmp_path, model=model)
    with refused("shared-random-numbers", match=named) as refusal:
        trainer.train()
    exec(re.search(r": ((?:for|\[).*\])\.$", str(refusal.value))[1])  # as the user would
    probabilities = ("layerdrop", "encoder_layerdrop", "mask_time_prob")
    assert not any(getattr(owner, each, 0.0) for owner in (*model.modules(), model.config) for each in probabilities)
    assert not any(module.p for of, module in model.named_modules() if of.endswith("pos_dropout"))
    probe = types.SimpleNamespace(short=[], longest=None, collated=lambda rows: {})
    refuse_model(types.SimpleNamespace(probe=probe), trainer)


def test_an_inverse_that_begins_with_a_maximum_over_the_batch_is_refused_with_its_mend(tmp_path):
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = hf.NystromformerConfig(**sizes, num_landmarks=4, segment_means_seq_len=16, conv_kernel_size=3)
    torch.manual_seed(0)
    model, data = hf.NystromformerForSequenceClassification(config), rows_of([16] * 24)
    refused_training(tmp_path, "maximum-over-batch", match="init_option", model=model, data=data)
    for module in model.modules():
        module.init_option = "exact"
    trains(tmp_path, model=model, data=data)


def labels_as(form):
    return Dataset.from_list([row | {"labels": form(row["labels"])} for row in text_data()])


def one_label(data):
    return data.map(lambda row: {"labels": int(row["labels"][0])})


def whole_numbers(data):
    return data.cast_column("labels", Value("int64"))


LABELS = {
    "an amount": (float, "num_labels=1", lambda data: data, 1),
    "a float, which is a class": (float, r"cast_column\('labels', datasets.Value\('int64'\)\)", whole_numbers, 2),
    "a class in a list": (lambda label: [label], r"map\(lambda row: .*int\(row\['labels'\]\[0\]\)}\)", one_label, 2),
    "a float in a list": (lambda label: [float(label)], r"int\(row\['labels'\]\[0\]\)", one_label, 2),
    "several whole numbers": (
        lambda label: [label, 1], r"cast_column\('labels', datasets.Sequence\(datasets.Value\('float32'\)\)\)",
        lambda data: data.cast_column("labels", Sequence(Value("float32"))), 2,
    ),
    "more than there are classes": (lambda label: [0.0, 1.0, label], "num_labels", lambda data: data, 3),
}  # fmt: skip


@pytest.mark.parametrize("form", LABELS)
def test_labels_of_another_shape_are_refused_and_train_with_the_mend_that_is_named(tmp_path, form):
    make, said, mend, num_labels = LABELS[form]
    refused_training(tmp_path, "wrong-shape", match=said, data=labels_as(make))
    trains(tmp_path / "mended", data=mend(labels_as(make)), model=tiny_bert(num_labels=num_labels))


def tiny_llama():
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))


IGNORED = {
    "classes": (tiny_bert, lambda row: -100, lambda row: row["labels"]),
    "tokens": (tiny_llama, lambda row: [-100] * 6, lambda row: row["input_ids"]),
}


@pytest.mark.parametrize("kind", IGNORED)
def test_labels_that_no_loss_counts_are_refused_unless_one_example_has_others(tmp_path, kind):
    model, ignored, counted = IGNORED[kind]
    rows = rows_of([6] * 200)
    none = rows.map(lambda row: {"labels": ignored(row)})
    refused_training(tmp_path, "no-labels-count", match=r"row\['input_ids'\]", model=model(), data=none)
    one = rows.map(lambda row, index: {"labels": (counted if index == 137 else ignored)(row)}, with_indices=True)
    for name, data in (("one", one), ("all", rows.map(lambda row: {"labels": counted(row)}))):
        trains(tmp_path / name, model=model(), data=data, collator=hf.default_data_collator)
    # A loss of one's own may count them.
    trains(tmp_path / "own", model=model(), data=none, cls=WithoutLabels, collator=hf.default_data_collator)


class WithoutLabels(DopplerTrainer):
    """Knows what to learn from elsewhere."""

    def compute_per_sample_loss(self, model, inputs):
        return model(**inputs).logits.flatten(1).square().mean(dim=1)


class Labels(DopplerTrainer):
    """Keeps the labels that reach the loss."""

    def compute_per_sample_loss(self, model, inputs):
        self.seen = [*getattr(self, "seen", []), *inputs["labels"].flatten().tolist()]
        return super().compute_per_sample_loss(model, inputs)


def test_a_whole_number_among_the_labels_does_not_cut_those_of_others(tmp_path):
    """Transformers' default collator asks the first example alone whether labels are whole numbers."""
    data = [{"input_ids": [index + 1] * 4, "label": 0.5 if index else 3} for index in range(8)]
    options = dict(model=tiny_bert(num_labels=1), data=data, collator=hf.default_data_collator, max_steps=1)
    trainer = trained(trainer_of(tmp_path, cls=Labels, **options, **UNCHECKED))
    assert sorted(trainer.seen[-8:]) == [0.5] * 7 + [3.0]


class WithoutMask(nn.Module):
    """A bag of embeddings that reads the padding, whose row is zero until noise is added to it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embedding(input_ids).sum(1) / attention_mask.sum(1, keepdim=True))


def test_a_model_that_reads_the_padding_is_refused_although_its_row_is_zero_at_first(tmp_path):
    model = WithoutMask()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    options = dict(cls=OfLogits, remove_unused_columns=False)
    refused_training(tmp_path, "depends-on-others", model=model, **options)
    assert all(torch.equal(*pair) for pair in zip(before, model.cpu().parameters(), strict=True))


def test_a_refusal_names_no_length_of_an_example(tmp_path):
    wrong = lambda examples: pad(examples) | {"labels": pad(examples)["input_ids"]}  # noqa: E731
    options = dict(model=tiny_bert(max_position_embeddings=64), data=rows_of([7] * 20 + [31]), collator=wrong)
    refusal = refused_training(tmp_path, "wrong-shape", **options)
    assert not [number for number in ("31", "62", "93", "7,", "14") if number in refusal]


# --- the others, in a line or two -----------------------------------------------------------------------------------------


def with_noise_of_each_row():
    model = tiny_bert()
    scaled = lambda output: 0.3 * output.detach().std(dim=-1, keepdim=True)  # noqa: E731
    model.bert.embeddings.word_embeddings.register_forward_hook(
        lambda module, args, output: output + scaled(output) * torch.randn_like(output)
    )
    return model


def with_dropout_of_a_number():
    model = tiny_bert(hidden_dropout_prob=0.1)
    model.bert.embeddings.register_forward_hook(lambda module, args, output: F.dropout(output, 0.1, module.training))
    return model


# What is refused, its code, what the message names, and options of the trainer.
REFUSED = {
    "complex weights, since noise is of real numbers": (
        "not-real", r"'weight' .*torch\.complex64.* torch\.view_as_complex",
        lambda: dict(model=nn.Linear(2, 2, dtype=torch.complex64), remove_unused_columns=False),
    ),
    "nothing is trained": (
        "nothing-trained", "requires_grad",
        lambda: dict(model=tiny_bert().requires_grad_(False)),
    ),
    "a model in float16": (
        "float16-parameters", r"'bert\..*dtype=torch\.float32",
        lambda: dict(model=tiny_bert().half()),
    ),
    "weights of which no loss is finite": (
        "no-finite-loss", None, lambda: dict(model=of_no_number())
    ),
    "an optimizer of the user's own": (
        "another-optimizer", "SGD", lambda: dict(cls=PlainSGD)
    ),
    "losses that are not attached to the graph": (
        "loss-without-graph", None,
        lambda: dict(cls=changing(lambda losses, inputs: losses.detach())),
    ),
    "a batch that is no dictionary": (
        "batch-not-tensors", "tuple",
        lambda: dict(collator=lambda rows: tuple(pad(rows).values())),
    ),
    "several rows of an example": (
        "other-number-of-losses", r"\(13,\)", lambda: dict(collator=twice)
    ),
    "rows that a layer takes in an order of its own": (
        "depends-on-others", r"layer 'mixed' \(Conv1d\)", lambda: dict(model=InOrderOf(), cls=OfOwnLosses)
    ),
    "what couples examples in training only": (
        "depends-on-others", None, lambda: dict(cls=MixedUp, model=frozen_embeddings())
    ),
    "a layer that sees the padding": (
        "depends-on-others", r"layer '\S+' \(\w+\) depends on the length",
        lambda: dict(model=fnet(), remove_unused_columns=False, collator=without_mask),
    ),
    "positions that change with the longest": (
        "positions-of-the-batch", "max_length=4",
        lambda: dict(model=llama(max_position_embeddings=4, rope_parameters=DYNAMIC)),
    ),
    "positions of two lengths": (
        "positions-of-the-batch", "max_length=6", lambda: dict(model=llama(rope_parameters=LONG))
    ),
}  # fmt: skip
TRAINS = {
    "padding on the left, where positions are relative": lambda: dict(model=llama(), collator=padded_on_the_left),
    "a layer that sees the padding, where there is none": lambda: dict(
        model=fnet(), data=rows_of([8] * 24), remove_unused_columns=False, collator=without_mask
    ),
    "noise in a forward that follows its own row": lambda: dict(model=with_noise_of_each_row()),
    "dropout with a number": lambda: dict(model=with_dropout_of_a_number()),
    "masks that are switched off, as Whisper's": lambda: dict(
        model=tiny_bert(mask_time_prob=0.05, apply_spec_augment=False)
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_before_the_first_step(tmp_path, what):
    code, named, options = REFUSED[what]
    refused_training(tmp_path, code, match=named, **options())


@pytest.mark.parametrize("what", TRAINS)
def test_it_trains(tmp_path, what):
    trains(tmp_path, **TRAINS[what]())
