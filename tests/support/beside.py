"""Losses and layers that read the examples beside an example, and some that look as if they did."""

import math

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from tests.support.tiny import tiny_bert


def of_losses(change):
    """Return a trainer of the cross-entropies changed by a function of them, the labels and the logits."""

    class Changed(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            return change(F.cross_entropy(logits.float(), labels, reduction="none"), labels, logits)

    return Changed


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
