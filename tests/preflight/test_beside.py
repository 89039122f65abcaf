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
from doppler_hf.preflight.autograd_check.moved_weights import moved_weights
from tests.support.tiers import further, thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import checked_trainer_of as trainer_of
from tests.support.trainers import trained


def of_losses(change):
    """Return a trainer of the cross-entropies changed by a function of them, the labels and the logits."""

    class Changed(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            return change(F.cross_entropy(logits.float(), labels, reduction="none"), labels, logits)

    return Changed


def refused(tmp_path, match=r"changes with the examples beside it", **options):
    trainer = trainer_of(tmp_path, **options)
    with pytest.raises(ValueError, match=match) as refusal:
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()
    return str(refusal.value)


def hard_negatives(losses, labels, logits):
    positive = labels == 0
    count = int(min(3 * max(int(positive.sum()), 1), int((~positive).sum())))
    kept = positive.clone()
    if count:
        kept[losses.detach().masked_fill(positive, -1).topk(count).indices] = True
    return losses * kept


class Backward(torch.autograd.Function):
    """Leaves values as they are, and multiplies gradients by factors."""

    @staticmethod
    def forward(context, values, factors):
        context.save_for_backward(factors)
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0], None


def focal(losses):
    return (1 - (-losses.detach()).exp()) ** 2


# Each has a gradient in its own row alone.
OF_OTHERS = {
    "the hardest eight": lambda l, y, z: l * (l.detach() >= l.detach().topk(min(8, len(l)))[0][-1]),
    "above the median": lambda l, y, z: l * (l.detach() >= l.detach().median()),
    "above the mean": lambda l, y, z: l * (l.detach() >= l.detach().mean()),
    "without the largest tenth": lambda l, y, z: (
        l * (l.detach() <= l.detach().sort()[0][len(l) - 1 - int(0.1 * len(l))])
    ),
    "small losses": lambda l, y, z: l * (l.detach() <= l.detach().sort()[0][math.ceil(0.9 * len(l)) - 1]),
    "inverse counts of classes": lambda l, y, z: l / torch.bincount(y, minlength=2)[y],
    "effective numbers of classes": lambda l, y, z: l * (1 - 0.9) / (1 - 0.9 ** torch.bincount(y, minlength=2)[y].float()),
    "three negatives for each positive": hard_negatives,
    "weights by rank": lambda l, y, z: l * (1 + l.detach().argsort().argsort()) / len(l),
    "the largest half": lambda l, y, z: l * torch.zeros_like(l).index_fill(0, l.detach().topk((len(l) + 1) // 2).indices, 1),
    "factors of mean one": lambda l, y, z: l * focal(l) / focal(l).mean(),
    "factors of maximum one": lambda l, y, z: l * focal(l) / focal(l).max(),
    "softmax over the batch": lambda l, y, z: l * torch.softmax(l.detach(), dim=0) * len(l),
    "clipped at a quantile": lambda l, y, z: torch.minimum(l, l.detach().quantile(0.9)),
    "standardized": lambda l, y, z: l / (l.detach().std(correction=0) + 1),
    "the most confident": lambda l, y, z: l * (z.detach().amax(1) >= z.detach().amax(1).median()),
    "as many as the labels of the first": lambda l, y, z: l * (1 + (y == y[0]).float().mean()),
    "its place": lambda l, y, z: l * (1 + torch.arange(len(l)) / len(l)),
    "the size of the batch": lambda l, y, z: l * min(1.0, 4 / len(l)),
    "the longest of the batch alone": lambda l, y, z: l + 0 * l.sum().detach() if len(l) < 3 else l * (l.detach() < l.max()),
    "a gradient by rank, with the value as it is": lambda l, y, z: Backward.apply(
        l, (l.detach() >= l.detach().topk(min(3, len(l)))[0][-1]).float()
    ),
    "a gradient by count, with the value as it is": lambda l, y, z: Backward.apply(l, 1 / torch.bincount(y)[y]),
}  # fmt: skip
OF_ITSELF = {
    "focal": lambda l, y, z: l * focal(l),
    "weights of classes, as constants": lambda l, y, z: l * torch.tensor([0.3, 1.7])[y],
    "a fixed threshold": lambda l, y, z: l * (l.detach() >= 0.5),
    "clipped at a constant": lambda l, y, z: l.clamp(max=0.7),
    "its own confidence": lambda l, y, z: l * z.softmax(1).detach().amax(1),
    "a mean over its own classes": lambda l, y, z: l + 0.1 * z.log_softmax(1).mean(dim=1).abs(),
    "of numbers between 0 and 1": lambda l, y, z: F.binary_cross_entropy(
        z.float().sigmoid(), F.one_hot(y, 2).float(), reduction="none"
    ).mean(dim=1),
}  # fmt: skip
DATA = dict(data=text_data(96), gradient_accumulation_steps=1)


@pytest.mark.parametrize(
    ("name", "size"),
    further([(name, size) for name in OF_OTHERS for size in (16, 64)], quick=[(name, 16) for name in OF_OTHERS]),
)
def test_a_loss_that_reads_ranks_or_counts_is_refused(tmp_path, name, size):
    refusal = refused(tmp_path, cls=of_losses(OF_OTHERS[name]), per_device_train_batch_size=size, **DATA)
    assert not any(digit in refusal for digit in "0123456789")  # none that is computed from examples


@pytest.mark.parametrize(
    "name", further([*OF_OTHERS], quick=["the hardest eight", "inverse counts of classes", "its place"])
)
def test_it_is_refused_in_bfloat16_too(tmp_path, name):
    model = tiny_bert().to(torch.bfloat16)
    refused(tmp_path, cls=of_losses(OF_OTHERS[name]), model=model, per_device_train_batch_size=16, **DATA)


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
    refused(tmp_path, r"if that of another is NaN.*counts as zero by itself", cls=of_losses(GUARDS[name]), **DATA)
    trained(trainer_of(tmp_path, cls=of_losses(lambda l, y, z: l), max_steps=1, **DATA))
    kept_apart = of_losses(lambda l, y, z: torch.where(l.isfinite(), l, torch.zeros_like(l)))
    trained(trainer_of(tmp_path, cls=kept_apart, max_steps=1, **DATA))


# --- layers ---------------------------------------------------------------------------------------------------------------


def with_capacity(x, *, capacity, experts=4):
    """Send each token to an expert, which takes the first ones of the batch and leaves the others as they are."""
    generator = torch.Generator().manual_seed(0)
    tokens = x.flatten(0, 1)
    router = torch.randn(x.shape[-1], experts, generator=generator).to(x)
    matrices = torch.randn(experts, x.shape[-1], x.shape[-1], generator=generator).to(x) / x.shape[-1] ** 0.5
    chosen = (tokens.detach() @ router).argmax(dim=1)
    out = tokens
    for expert in range(experts):
        taken = (chosen == expert).nonzero().flatten()[: capacity(len(tokens))]
        is_taken = torch.zeros_like(chosen).index_fill(0, taken, 1).bool().unsqueeze(1)
        out = torch.where(is_taken, tokens + tokens @ matrices[expert], out)
    return out.view(x.shape)


def quantized(x):
    """Round to 127 steps of the largest number in the batch."""
    step = x.detach().abs().amax() / 127
    return x + ((x / step).round() * step - x).detach()


def most_important(x):
    """Change the half of the batch's tokens with the largest norm."""
    norms = x.detach().norm(dim=-1)
    return torch.where((norms >= norms.median()).unsqueeze(-1), x.tanh(), x)


def balanced(x):
    """Normalize a gate over the tokens of the batch, as Sinkhorn's does, without a gradient."""
    gate = x.detach()[..., :4].softmax(dim=-1)
    gate = gate / gate.flatten(0, 1).mean(dim=0)
    return x * gate.mean(dim=-1, keepdim=True)


LAYERS = {
    "a capacity by a factor": lambda x: with_capacity(x, capacity=lambda tokens: math.ceil(1.25 * tokens / 4)),
    "a fixed capacity": lambda x: with_capacity(x, capacity=lambda tokens: 12),
    "tokens by rank": most_important,
    "a step of the largest number": quantized,
    "a gate that is balanced": balanced,
    "a mean without a gradient": lambda x: x - 0.1 * x.detach().mean(dim=(0, 1)),
    "its place": lambda x: x * (1 + torch.arange(len(x)).to(x) / len(x)).view(-1, 1, 1),
}


def with_layer(change, *, model=None):
    model = tiny_bert() if model is None else model
    # Behind the layer norm of the embeddings.
    model.bert.embeddings.register_forward_hook(lambda module, args, output: change(output))
    return model


@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_reads_ranks_or_shares_a_capacity_is_refused_by_name(tmp_path, name, seed):
    model, data = with_layer(LAYERS[name]), text_data(96, seed=seed)
    torch.manual_seed(seed)
    model.bert.embeddings.apply(model._init_weights)
    refusal = refused(tmp_path, model=model, data=data, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    assert "the layer 'bert.embeddings' (BertEmbeddings) depends on the other examples" in refusal


class Hidden(nn.Module):
    """Adds to a layer's output something that reads the batch, behind a gate that is closed or next to it at the start."""

    def __init__(self, layer, *, gate):
        super().__init__()
        self.layer, self.gate = layer, nn.Parameter(gate * torch.ones(layer.out_features))

    def forward(self, x):
        return self.layer(x) + self.gate * LAYERS["tokens by rank"](x)[..., : self.layer.out_features]


def with_gate(*, gate):
    model = tiny_bert()
    attention = model.bert.encoder.layer[0].attention.self
    attention.value = Hidden(attention.value, gate=gate)
    return model


def behind_an_adapter():
    """The second factor of LoRA is zero at the start, behind which the first one reads the batch."""
    model = get_peft_model(tiny_bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["value"]))
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda module, args, output: LAYERS["tokens by rank"](output))
    return model


@pytest.mark.parametrize("gate", [0.0, 1e-6])
def test_what_a_gate_hides_at_the_start_is_seen_with_moved_weights(tmp_path, gate):
    model = with_gate(gate=gate)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused(tmp_path, model=model, **DATA)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_an_adapter_of_zeros_hides_is_seen_with_moved_weights(tmp_path):
    refused(tmp_path, model=behind_an_adapter(), **DATA)


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
QUICK = ["pairs of examples", "dropout, divided by the number", "a random half", "weights that add up to the number"]


@pytest.mark.parametrize(
    ("name", "size"),
    further([(name, size) for name in HIDDEN for size in (8, 16, 64)], quick=[(name, 16) for name in QUICK]),
)
def test_random_numbers_hide_no_loss_that_reads_others_or_counts_them(tmp_path, name, size):
    if "eight rows" in name and size == 8:
        pytest.skip("no batch has more")
    said = refused(
        tmp_path, "changes with the examples beside it|has a gradient in the places of others",
        cls=of_losses(HIDDEN[name]), per_device_train_batch_size=size, **DATA,
    )  # fmt: skip
    assert "own row" in said or "its example alone" in said


@pytest.mark.parametrize("dtype", [torch.float32, *thorough(torch.bfloat16)])
@pytest.mark.parametrize(
    ("name", "size"),
    further([(name, size) for name in OF_ONE for size in (8, 16)], quick=[("noise on the logits", 16), ("two calls", 16)]),
)
def test_random_numbers_of_a_row_are_its_own(tmp_path, name, size, dtype):
    trainer = trainer_of(
        tmp_path, cls=of_losses(OF_ONE[name]), model=tiny_bert().to(dtype), per_device_train_batch_size=size, max_steps=1,
        **DATA,
    )  # fmt: skip
    assert trained(trainer).state.global_step > 0
