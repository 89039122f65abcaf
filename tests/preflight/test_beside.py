"""What a loss or layer reads of the examples beside it is refused before the first step, though no gradient shows it."""

import math

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from doppler_hf.preflight.autograd_check.moved_weights import moved_weights
from tests.support.beside import LAYERS, OF_ITSELF, OF_OTHERS, behind_an_adapter, of_losses, with_gate, with_layer
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
    assert "the layer 'bert.embeddings' (BertEmbeddings) depends on the other examples" in refusal


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


@pytest.mark.parametrize("change", [mixed_up, *thorough(random_part_of_the_hardest)])
def test_random_numbers_hide_no_loss_that_reads_others(tmp_path, change):
    said = refused_training(tmp_path, "depends-on-others", cls=of_losses(change))
    assert "Compute each loss from its own row" in said


def noisy_logits(losses, labels, logits):
    return F.cross_entropy(logits.float() + 0.1 * torch.randn_like(logits), labels, reduction="none")


@pytest.mark.parametrize("change", [noisy_logits, *thorough(lambda losses, *_: losses * torch.rand(len(losses)))])
def test_random_numbers_of_a_row_are_its_own(tmp_path, change):
    assert trained(trainer_of(tmp_path, cls=of_losses(change))).state.global_step > 0
