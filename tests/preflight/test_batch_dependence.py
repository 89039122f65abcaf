"""What a loss or layer reads of the examples beside it is refused before the first step, though no gradient shows it."""

import math
import random

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from doppler_hf.errors import Refusal
from doppler_hf.preflight.autograd_check.moved_weights import moved_weights
from tests.support.beside import LAYERS, OF_ITSELF, OF_OTHERS, behind_an_adapter, of_losses, with_gate, with_layer
from tests.support.refusals import refused
from tests.support.tiers import further, thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import checked_trainer_of as trainer_of
from tests.support.trainers import refused_training, trained

DATA = dict(data=text_data(96), gradient_accumulation_steps=1)


@pytest.mark.parametrize(
    ("name", "size"),
    further([(name, size) for name in OF_OTHERS for size in (16, 64)], quick=[(name, 16) for name in OF_OTHERS]),
)
def test_a_loss_that_reads_ranks_or_counts_is_refused(tmp_path, name, size):
    refusal = refused_training(
        tmp_path, "depends-on-others", cls=of_losses(OF_OTHERS[name]), per_device_train_batch_size=size, **DATA
    )
    assert not any(digit in refusal for digit in "0123456789")  # none that is computed from examples


@pytest.mark.parametrize(
    "name", further([*OF_OTHERS], quick=["the hardest eight", "inverse counts of classes", "its place"])
)
def test_it_is_refused_in_bfloat16_too(tmp_path, name):
    model = tiny_bert().to(torch.bfloat16)
    refused_training(
        tmp_path, "depends-on-others", cls=of_losses(OF_OTHERS[name]), model=model, per_device_train_batch_size=16, **DATA
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_ITSELF)
def test_a_loss_of_its_own_row_trains(tmp_path, name, dtype):
    trainer = trainer_of(
        tmp_path, cls=of_losses(OF_ITSELF[name]), model=tiny_bert().to(dtype), per_device_train_batch_size=16, max_steps=1,
        **DATA,
    )  # fmt: skip
    assert trained(trainer).state.global_step == 1


# With one NaN they drop the batch, or all that is not the largest.
GUARDS = {
    "zeros for all": lambda l, y, z: l if l.isfinite().all() else l.nan_to_num(0) * 0,
    "the sum": lambda l, y, z: torch.where(l.detach().sum().isfinite(), l, torch.zeros_like(l)),
}  # fmt: skip


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_against_nan_that_drops_the_batch_is_refused_and_trains_without(tmp_path, name):
    refused_training(tmp_path, "nan-spreads", cls=of_losses(GUARDS[name]), **DATA)
    trained(trainer_of(tmp_path, cls=of_losses(lambda l, y, z: l), max_steps=1, **DATA))
    kept_apart = of_losses(lambda l, y, z: torch.where(l.isfinite(), l, torch.zeros_like(l)))
    trained(trainer_of(tmp_path, cls=kept_apart, max_steps=1, **DATA))


# --- layers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_reads_ranks_or_shares_a_capacity_is_refused_by_name(tmp_path, name, seed):
    model, data = with_layer(LAYERS[name]), text_data(96, seed=seed)
    torch.manual_seed(seed)
    model.bert.embeddings.apply(model._init_weights)
    refusal = refused_training(
        tmp_path, "depends-on-others", model=model, data=data, per_device_train_batch_size=16, gradient_accumulation_steps=1
    )
    assert "the layer 'bert.embeddings' (BertEmbeddings) depends on the other records" in refusal


@pytest.mark.parametrize("gate", [0.0, 1e-6])
def test_what_a_gate_hides_at_the_start_is_seen_with_moved_weights(tmp_path, gate):
    model = with_gate(gate=gate)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused_training(tmp_path, "depends-on-others", model=model, **DATA)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_an_adapter_of_zeros_hides_is_seen_with_moved_weights(tmp_path):
    refused_training(tmp_path, "depends-on-others", model=behind_an_adapter(), **DATA)


# --- weights are given back -----------------------------------------------------------------------------------------------


def of_one_storage():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(first.weight.data)
    return nn.Sequential(first, second)


def with_strange_numbers():
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight[0] = torch.tensor([-0.0, math.nan, math.inf, 1e-45])
    return layer


WEIGHTS = {
    "a model": tiny_bert,
    "bfloat16": lambda: tiny_bert().to(torch.bfloat16),
    "adapters": lambda: get_peft_model(tiny_bert(), LoraConfig(r=2, target_modules=["query"])),
    "one storage": of_one_storage,
    "strange numbers": with_strange_numbers,
    "tied": lambda: hf.BertForMaskedLM(tiny_bert().config),
    "a large matrix of zeros": lambda: nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024).apply(zeros)),
}


def zeros(layer):
    nn.init.zeros_(layer.weight)


def bits(model):
    return {
        name: value.detach().contiguous().view(torch.uint8).clone() for name, value in model.named_parameters() if value.ndim
    }


@pytest.mark.parametrize("kind", WEIGHTS)
def test_moved_weights_are_given_back_bit_for_bit(kind):
    model = WEIGHTS[kind]()
    before, places = bits(model), {name: value.data_ptr() for name, value in model.named_parameters()}
    with moved_weights(model):
        inside = bits(model)
    after = bits(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert places == {name: value.data_ptr() for name, value in model.named_parameters()}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    moved = {name for name, value in before.items() if not torch.equal(inside[name], value)}
    # A large matrix that passes something on stays as it is.
    assert moved == trained - ({"0.weight"} if kind.startswith("a large") else set())


# --- losses with random numbers ---------------------------------------------------------------------------------------


def mixed_up(losses, labels, logits):
    others = torch.randperm(len(labels))
    return 0.7 * losses + 0.3 * F.cross_entropy(logits.float(), labels[others], reduction="none")


def random_part_of_the_hardest(losses, labels, logits):
    chosen = (losses.detach() + torch.rand(len(losses))).topk(max(1, len(losses) // 2)).indices
    return losses * torch.zeros_like(losses).index_fill(0, chosen, 1.0)


def noisy(losses, labels, logits):
    return F.cross_entropy(logits.float() + 0.1 * torch.randn_like(logits), labels, reduction="none")


def kept(count):
    """Return a loss of a random part of the batch."""
    return lambda l, y, z: l * torch.zeros_like(l).index_fill(0, torch.randperm(len(l))[: count(len(l))], 1.0)


def rescaled(l, y, z):
    is_kept = (torch.rand(len(l)) > 0.3).float()
    return l * is_kept * len(l) / is_kept.sum().clamp(min=1)


# Random numbers hide none of these.
HIDDEN = {
    "pairs of examples": mixed_up,
    "a random part of the hardest": random_part_of_the_hardest,
    "dropout, divided by the number": lambda l, y, z: F.cross_entropy(F.dropout(z, 0.1), y, reduction="none") / len(l),
    "noise, times the root of the number": lambda l, y, z: noisy(l, y, z) * len(l) ** 0.5,
    "noise, twice above eight rows": lambda l, y, z: noisy(l, y, z) * (1 + (len(l) > 8)),
    "noise, divided by a count of the class": lambda l, y, z: noisy(l, y, z) / torch.bincount(y, minlength=2)[y],
    "noise, times its place": lambda l, y, z: noisy(l, y, z) * (1 + torch.arange(len(l)) / len(l)),
    "a random half": kept(lambda number: max(1, number // 2)),
    "all but one": kept(lambda number: number - 1),
    "weights that add up to the number": lambda l, y, z: l * torch.rand(len(l)).softmax(0) * len(l),
    "weights by rank of random numbers": lambda l, y, z: l * torch.rand(len(l)).argsort() / len(l),
    "rescaled by how many stayed": rescaled,
    "one doubled": lambda l, y, z: l * (1 + F.one_hot(torch.randint(len(l), ()), len(l))),
    "half of the signs": lambda l, y, z: l * (1 + 0.1 * (torch.randperm(len(l)) % 2 * 2.0 - 1.0)),
    "noise less its mean": lambda l, y, z: l * (1 + (noise := torch.randn(len(l))) - noise.mean()),
    "one time of a grid": lambda l, y, z: l * ((torch.rand(()) + torch.arange(len(l)) / len(l)) % 1),
    "pairs of examples, in half of the batches": lambda l, y, z: mixed_up(l, y, z) if random.random() < 0.5 else l,
    "noise, pairs in half of the batches": lambda l, y, z: mixed_up(l, y, z) if np.random.rand() < 0.5 else noisy(l, y, z),
    "NumPy's noise, divided by the number": lambda l, y, z: l * torch.from_numpy(np.random.rand(len(l))) / len(l),
    "Python's noise, divided by the number": lambda l, y, z: l * torch.tensor([random.random() for _ in l]) / len(l),
}  # fmt: skip
# Random numbers of an example, or of the whole batch.
OF_ONE = {
    "noise on the logits": noisy,
    "dropout on the logits": lambda l, y, z: F.cross_entropy(F.dropout(z, 0.3), y, reduction="none"),
    "a random weight": lambda l, y, z: l * torch.rand(len(l)),
    "two numbers for each row": lambda l, y, z: l * torch.rand(2, len(l)).sum(0),
    "two calls": lambda l, y, z: noisy(l, y, z) + (F.dropout(z) - F.dropout(z)).square().sum(1),
    "one number for all rows": lambda l, y, z: l * torch.rand(()),
    "one vector for all rows": lambda l, y, z: F.cross_entropy(z + torch.randn(z.shape[1]), y, reduction="none"),
    "a loop over rows": lambda l, y, z: torch.stack([loss * torch.rand(()) for loss in l]),
    "a mixture within an example": lambda l, y, z: (
        (lam := torch.distributions.Beta(0.4, 0.4).sample((len(l),))) * l
        + (1 - lam) * F.cross_entropy(z, 1 - y, reduction="none")
    ),
    "a class at random": lambda l, y, z: F.cross_entropy(
        z, torch.multinomial(torch.full_like(z.detach(), 0.5), 1)[:, 0], reduction="none"
    ),
    "Gumbel noise": lambda l, y, z: -(F.gumbel_softmax(z) * F.one_hot(y, 2)).sum(1),
    "a loop until a number is small": lambda l, y, z: l * next(n for n in iter(lambda: torch.rand(()), None) if n < 0.9),
    "NumPy's noise": lambda l, y, z: l * torch.from_numpy(np.random.rand(len(l))),
    "NumPy's number for all rows": lambda l, y, z: l * np.random.rand(),
    "Python's noise": lambda l, y, z: l * torch.tensor([random.random() for _ in l]),
}  # fmt: skip
QUICK = [
    "pairs of examples",
    "pairs of examples, in half of the batches",
    "dropout, divided by the number",
    "a random half",
    "weights that add up to the number",
]


@pytest.mark.parametrize(
    ("name", "size"),
    further([(name, size) for name in HIDDEN for size in (8, 16, 64)], quick=[(name, 16) for name in QUICK]),
)
def test_random_numbers_hide_no_loss_that_reads_others_or_counts_them(tmp_path, name, size):
    if "eight rows" in name and size == 8:
        pytest.skip("no batch has more")
    cls = of_losses(HIDDEN[name])
    trainer = trainer_of(tmp_path, cls=cls, per_device_train_batch_size=size, **DATA)
    with pytest.raises(Refusal) as refusal:
        trainer.train()
    assert refusal.value.code == "depends-on-others"
    assert trainer.privacy.ledger is None


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    further(
        [(name, size, dtype) for name in OF_ONE for size, dtype in ((8, torch.bfloat16), (16, torch.float32))],
        quick=[("noise on the logits", 16, torch.float32), ("two calls", 16, torch.float32)],
    ),
)
def test_random_numbers_of_a_row_are_its_own(tmp_path, name, size, dtype):
    trainer = trainer_of(
        tmp_path, cls=of_losses(OF_ONE[name]), model=tiny_bert().to(dtype), per_device_train_batch_size=size, max_steps=1,
        **DATA,
    )  # fmt: skip
    assert trained(trainer).state.global_step > 0


class Sampling(torch.nn.Module):
    """Draws a code for each row, as a variational autoencoder does, and may change the gradient of the codes."""

    def __init__(self, change=None):
        super().__init__()
        self.bert, self.change = tiny_bert(), change

    def forward(self, input_ids, attention_mask):
        logits = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        logits = logits + 0.1 * torch.randn_like(logits)
        if self.change is not None and logits.requires_grad:
            logits.register_hook(self.change)
        return logits


class OfCodes(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs), labels, reduction="none")


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [(None, False), (lambda g: g / g.norm(), True), (lambda g: g - g.mean(0), True), (lambda g: 2 * g, False)],
    ids=["none", "divided by the norm of all", "less the mean of all", "doubled"],
)
def test_random_numbers_hide_no_backward_pass_that_reads_others(tmp_path, change, is_refused):
    trainer = trainer_of(tmp_path, cls=OfCodes, model=Sampling(change), max_steps=1, label_names=["labels"], **DATA)
    if not is_refused:
        trained(trainer)
        return
    with refused("depends-on-others"):
        trainer.train()
    assert trainer.privacy.ledger is None
