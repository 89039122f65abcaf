"""`nn.MultiheadAttention` and what is built of it, against a loop over single examples and against its own forward."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import SiglipVisionConfig, SiglipVisionModel

from tests.support.nets import Net, check, draw, on, ready
from tests.support.per_example import (
    NORM_RULES,
    assert_equals_loop,
    assert_equals_loop_or_is_refused,
    assert_matches,
    assert_refused,
    book_keeping,
    gradients_of_each,
)

BATCH, QUERIES, KEYS, DIM, HEADS = 5, 3, 6, 4, 2
# Hand-made tiny nets, in float64.
EXACT = dict(atol=1e-10, rtol=1e-10)

PADDING = torch.arange(KEYS) >= torch.tensor([6, 4, 2, 5, 6])[:, None]
CAUSAL = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
# Query, key and value by how many of them are one tensor.
INPUTS = {
    "self": lambda n, x, y: (n.y(y),) * 3,
    "key is value": lambda n, x, y: (n.x(x), *(n.y(y),) * 2),
    "query is key": lambda n, x, y: (*(n.y(y),) * 2, n.v(y)),
    "all differ": lambda n, x, y: (n.x(x), n.y(y), n.v(y)),
}


class Attention(nn.Module):
    """A layer's outputs, and its weights if it returns them."""

    def __init__(self, inputs="self", *, keywords=None, **options):
        super().__init__()
        self.layer = nn.MultiheadAttention(DIM, HEADS, **options)
        self.x, self.y, self.v = (nn.Linear(3, size) for size in (DIM, self.layer.kdim, self.layer.vdim))
        self.inputs, self.keywords = INPUTS[inputs], keywords or {}

    def forward(self, x, y, *of_examples):
        keywords = self.keywords | dict(zip(("key_padding_mask", "attn_mask"), of_examples))
        if "attn_mask" in keywords and keywords["attn_mask"].ndim == 4:
            keywords["attn_mask"] = keywords["attn_mask"].flatten(0, 1)
        query, key, value = inputs = self.inputs(self, x, y)
        if not self.layer.batch_first:
            turned = {each: each.transpose(0, 1) for each in inputs}  # which stay one tensor
            query, key, value = (turned[each] for each in inputs)
        output, weights = self.layer(query=query, key=key, value=value, **keywords)
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], dim=1)


DATA = draw(BATCH, QUERIES, 3), draw(BATCH, KEYS, 3, seed=4)
FLOATS = torch.zeros_like(PADDING, dtype=torch.float64).masked_fill(PADDING, -3.0)
SQUARE = draw(BATCH, HEADS, KEYS, KEYS, seed=5)
KERNEL = dict(need_weights=False)
CASES = {
    "self": (Attention(), ()),
    "self, kernel": (Attention(keywords=KERNEL), ()),
    "self, padded": (Attention(), (PADDING,)),
    "self, padded, kernel": (Attention(keywords=KERNEL), (PADDING,)),
    "self, padded by numbers": (Attention(), (FLOATS,)),
    "self, weights of heads": (Attention(keywords=dict(average_attn_weights=False)), (PADDING,)),
    "self, mask": (Attention(keywords=dict(attn_mask=draw(KEYS, KEYS, seed=6))), ()),
    "self, mask of each head, padded": (Attention(), (FLOATS, SQUARE)),
    "self, mask of each head, padded, kernel": (Attention(keywords=KERNEL), (FLOATS, SQUARE)),
    "self, causal": (Attention(keywords=dict(attn_mask=CAUSAL, is_causal=True)), ()),
    "self, causal, kernel": (Attention(keywords=dict(attn_mask=CAUSAL, is_causal=True) | KERNEL), ()),
    "self, causal, padded, kernel": (Attention(keywords=dict(attn_mask=CAUSAL, is_causal=True) | KERNEL), (PADDING,)),
    "self, without bias": (Attention(bias=False), ()),
    "key is value": (Attention("key is value"), (PADDING,)),
    "query is key": (Attention("query is key", keywords=KERNEL), (PADDING,)),
    "all differ": (Attention("all differ", keywords=dict(attn_mask=CAUSAL[:QUERIES])), ()),
    "sizes of their own": (Attention("all differ", kdim=3, vdim=5), (PADDING,)),
    "sizes of their own, without bias": (Attention("all differ", kdim=3, vdim=5, bias=False, keywords=KERNEL), ()),
    "a key added": (Attention("key is value", add_bias_kv=True), (PADDING,)),
    "a key and a zero added": (Attention(add_bias_kv=True, add_zero_attn=True, keywords=KERNEL), (PADDING, SQUARE)),
    "a zero added": (Attention(add_zero_attn=True, keywords=dict(attn_mask=CAUSAL)), ()),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")  # of the two masks, as the loop calls it
def test_attention_is_that_of_torch_and_its_gradients_are_those_of_each_example(name, batch_first):
    net, of_examples = CASES[name]
    net.layer.batch_first = batch_first
    ready(net)
    own = net(*DATA, *of_examples)
    with book_keeping(net):
        torch.testing.assert_close(net(*DATA, *of_examples), own, **EXACT)
    assert_equals_loop(net, on(net, *DATA, *of_examples), BATCH, tolerance=EXACT)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("name", ["self", "key is value", "sizes of their own"])
def test_each_way_to_the_norm(name, norm_rule):
    net, of_examples = CASES[name]
    assert not check(net, *DATA, *of_examples, norm_rule=norm_rule, tolerance=EXACT)


@pytest.mark.parametrize("batch", [1, QUERIES, KEYS])  # as many examples as there are queries, or keys
def test_the_batch_is_read_from_batch_first(batch):
    net = Attention("key is value", batch_first=False)
    check(net, draw(batch, QUERIES, 3), draw(batch, KEYS, 3, seed=4), tolerance=EXACT)


@pytest.mark.parametrize("trained", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_a_part_of_it_is_trained(trained):
    net = ready(Attention("key is value", batch_first=True))
    net.layer.requires_grad_(False).get_parameter(trained).requires_grad_(True)
    assert_equals_loop(net, on(net, *DATA), BATCH, tolerance=EXACT)
    net.requires_grad_(False).layer.get_parameter(trained).requires_grad_(True)
    assert_equals_loop(net, on(net, *DATA), BATCH, tolerance=EXACT)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_that_of_the_forward_pass(need_weights):
    net = ready(Attention(dropout=0.5, batch_first=True, keywords=dict(need_weights=need_weights)))

    def losses():
        torch.manual_seed(3)
        return on(net, *DATA)(slice(None))

    expected = torch.autograd.grad(losses().sum(), list(net.layer.parameters()))
    with book_keeping(net, max_grad_norm=1e6) as clipped:
        clipped.backward(losses())
        for (name, _), gradient in zip(net.layer.named_parameters(), expected, strict=True):
            torch.testing.assert_close(clipped.sums[f"layer.{name}"], gradient, **EXACT)
        assert torch.equal(net.eval()(*DATA), net(*DATA))


def test_one_layer_twice_in_a_block_that_is_computed_again():
    layer = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def block(net, x):
        return net.layer(*[net.layer(x, x, x)[0].tanh()] * 3, need_weights=False)[0]

    net = ready(Net(lambda n, x: block(n, n.first(x)), first=nn.Linear(3, DIM), layer=layer))
    x = draw(BATCH, KEYS, 3)
    gradients = gradients_of_each(net, on(net, x), BATCH)
    assert_matches(net, on(net, x), gradients, tolerance=EXACT)
    for reentrant in (False, True):
        net.run = lambda n, x, reentrant=reentrant: checkpoint(
            lambda hidden: block(n, hidden), n.first(x), use_reentrant=reentrant
        )
        assert_matches(net, on(net, x), gradients, tolerance=EXACT)


@pytest.mark.parametrize("keywords", [{}, KERNEL], ids=["weights", "kernel"])
def test_bf16(keywords):
    """Against torch's own gradients in bf16, which round as much."""
    net = ready(Attention(batch_first=True, keywords=keywords)).float()
    x = DATA[1].float()

    def losses():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = net(None, x)
        return output.float().square().flatten(1).sum(dim=1)

    expected = torch.autograd.grad(losses().sum(), net.layer.in_proj_weight)[0]
    with book_keeping(net, max_grad_norm=1e6) as clipped:
        clipped.backward(losses())
        # A dozen roundings of 2⁻⁹ each.
        assert (clipped.sums["layer.in_proj_weight"] - expected).norm() < 12 * 2**-9 * expected.norm()


@pytest.mark.parametrize("place", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_a_weight_that_is_computed_is_right_or_refused(place):
    net = ready(Attention(batch_first=True))
    owner, _, name = place.rpartition(".")
    parametrize.register_parametrization(net.layer.get_submodule(owner), name, nn.Tanh())
    assert_equals_loop_or_is_refused(net, on(net, *DATA), BATCH, naming="layer")


def test_a_mask_that_is_trained_is_refused():
    class Biased(Attention):
        def __init__(self):
            super().__init__(batch_first=True)
            self.mask = nn.Embedding(KEYS, KEYS)

        def forward(self, x, y):
            self.keywords = dict(attn_mask=self.mask.weight)
            return super().forward(x, y)

    net = ready(Biased())
    assert_refused("no-per-sample-gradient", net, on(net, *DATA), BATCH, match=r"mask\.weight")


SIGLIP = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)  # fmt: skip
IMAGES = draw(BATCH, 3, 8, 8)


def siglip():
    return SiglipVisionModel(SiglipVisionConfig(**SIGLIP))


def of_images(model):
    return Net(lambda n, x: n.model(x).pooler_output, model=model)


def test_a_learned_query_as_that_of_siglip():
    fallbacks = check(of_images(siglip()), IMAGES, tolerance=EXACT)
    assert [name for name in fallbacks if "head" in name] == ["model.head"]  # its probe alone


def test_adapters_of_peft_beside_it_train_and_those_of_its_weights_are_refused_as_the_refusal_says():
    adapted = lambda targets: get_peft_model(siglip(), LoraConfig(r=2, target_modules=targets))  # noqa: E731
    net = ready(of_images(adapted(["attention", "q_proj"])))
    assert_refused("no-per-sample-gradient", net, on(net, IMAGES), BATCH, match=r"attention\.lora_A.* target_modules")
    check(of_images(adapted(["q_proj", "fc1"])), IMAGES)


def test_adapters_of_peft_that_compute_a_weight_for_a_forward_are_refused():
    """With biases that are trained, the layer has a rule; it must not compute with a weight that is not a parameter."""
    for parameter in ("attention.in_proj_weight", "mlp.fc1.weight"):
        config = LoraConfig(r=2, target_modules=[], target_parameters=[f"head.{parameter}"], bias="all")
        net = ready(of_images(get_peft_model(copy.deepcopy(siglip()), config)))
        assert_refused("no-per-sample-gradient", net, on(net, IMAGES), BATCH, match="lora_A")
