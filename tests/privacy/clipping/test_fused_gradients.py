"""Norms and sums in kernels are those of torch's operators, to their rounding. Without a GPU they are interpreted."""

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from torch.torch_version import TorchVersion

from doppler_hf import triton_support
from doppler_hf.privacy.clipping import fused_gradients
from tests.support.interpreter import repair_casts
from tests.support.models import batch_for, build, losses_of, rows
from tests.support.per_example import book_keeping
from tests.support.tiers import thorough

pytestmark = [
    # Torch 2.11 has it. Compiled, the kernels do not mind: tests/test_triton_support.py.
    pytest.mark.skipif(
        TorchVersion(triton.__version__) < "3.7",
        reason="with NumPy 2.4 its interpreter takes no bound of a loop from memory",
    ),
    pytest.mark.usefixtures("unchecked_arrays"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime"),  # of NumPy, where a number is not finite
]

C = 0.1
DTYPES = [torch.bfloat16, *thorough(torch.float32, torch.float16)]
# Places, and widths of both factors: one place, less than a tile, whole ones, more than a run, one number more.
SHAPES = [(1, 5, 3), (70, 33, 48), (64, 16, 1040), (129, 17, 2)]


@pytest.fixture(autouse=True)
def rounded(monkeypatch):
    repair_casts(monkeypatch)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums_in_full(left, right):
    """Σ L∘R, Σ |L∘R| and Σ_t ‖l_t‖‖r_t‖ in float64."""
    left, right = left.double(), right.double() if right.is_floating_point() else nn.functional.one_hot(right).double()
    grams = left @ left.mT, right @ right.mT
    terms, sizes = grams[0] * grams[1], [gram.diagonal(dim1=1, dim2=2) for gram in grams]
    return torch.stack([terms.sum((1, 2)), terms.abs().sum((1, 2)), (sizes[0] * sizes[1]).sqrt().sum(1)], dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_lookups_of_all_lengths_are_compared_at_once(dtype):
    pairs = [(normal(2, time, p, dtype=dtype), normal(2, time, q, seed=1, dtype=dtype)) for time, p, q in SHAPES]
    pairs.append((normal(2, 70, 9, dtype=dtype), torch.arange(140).view(2, 70) % 5))
    for pair, found in zip(pairs, fused_gradients.compare(pairs, vanished=1e-25), strict=True):
        # Products of half precision are exact; a thousand additions in float32 are not.
        torch.testing.assert_close(found.double(), sums_in_full(*pair), rtol=2e-6, atol=1e-12)


@triton.jit
def _write_tiles(begin, out):
    pair = begin + tl.program_id(0)
    i, j = fused_gradients._tiles_of(pair)
    tl.store(out + 2 * tl.program_id(0), i)
    tl.store(out + 2 * tl.program_id(0) + 1, j)


@pytest.mark.parametrize("row", [0, 1, 992, 1009, 20_000])
def test_pairs_of_tiles_are_counted_row_by_row_in_texts_of_any_length(row):
    """Of a million places, too, where float32 no longer holds a root."""
    first, out = row * (row + 1) // 2, torch.zeros(2 * row + 3 if row < 2 else 40, 2, dtype=torch.int64)
    begin = first if row < 2 else first - 20
    _write_tiles[(len(out),)](begin, out)
    wanted = [(i, j) for i in range(max(0, row - 1), row + 2) for j in range(i + 1)]
    start = wanted.index((row, 0)) - (0 if row < 2 else 20)
    assert list(map(tuple, out.tolist())) == wanted[start : start + len(out)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_are_weighted_and_those_left_out_add_nothing(dtype, monkeypatch):
    monkeypatch.setattr(fused_gradients, "AT_ONCE", 2**13)  # in several launches
    monkeypatch.setattr(fused_gradients, "CHUNK", 128)
    of_clip, products, memory = torch.tensor([0.3, torch.nan, 0.0]), {}, []
    for time, p, q in SHAPES:
        # With a number before and after, which nothing may write.
        for seed, dim in enumerate((p, q)):
            memory.append(torch.cat([torch.ones(1), normal(3 * time * dim, seed=seed), torch.ones(1)]).to(dtype))
            memory[-1][1 + time * dim] = torch.nan if p % 2 else torch.inf
        products[time, p, q] = (memory[-2][1:-1].view(3, time, p), memory[-1][1:-1].view(3, time, q), of_clip)
    before = {key: (left.clone(), right.clone()) for key, (left, right, _) in products.items()}
    found = {key: (left, right) for key, left, right in fused_gradients.weighed(products)}
    assert found.keys() == before.keys()
    assert not products
    for (_, p, q), (left, right) in found.items():
        own, weighed, other = (0, left, right) if p <= q else (1, right, left)
        wanted_dtype = torch.float32 if dtype == torch.float16 else dtype
        whole = before[_, p, q]
        assert torch.equal(weighed[0], (whole[own][0].float() * of_clip[0]).to(wanted_dtype))
        assert torch.equal(other[0], whole[1 - own][0])
        assert not weighed[1:].any()
        # Finite numbers of the other factor, which may be a weight or a user's, stay as they are.
        assert torch.equal(other[1], whole[1 - own][1].nan_to_num(nan=0.0, posinf=0.0))
        assert torch.equal(other[2], whole[1 - own][2])
    assert all(each[0] == each[-1] == 1.0 for each in memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_a_normalization(dtype):
    x, grad = normal(2, 37, 150), normal(2, 37, 150, seed=1, dtype=dtype)
    mean, rstd = x.mean(dim=2, keepdim=True), 1 / x.std(dim=2, keepdim=True)
    wanted = ((x - mean) * rstd * grad).sum(dim=1), grad.float().sum(dim=1)
    torch.testing.assert_close(fused_gradients.normalized_sums(x, mean, rstd, grad), wanted, rtol=1e-5, atol=1e-5)


def of_model(name, *, in_kernels, of=losses_of, autocast=False, count=6, **options):
    """Return norms and sums of a model's examples."""
    torch.manual_seed(0)
    model = build(name, torch.float32)
    inputs, labels = rows(*batch_for(model, torch.float32), torch.arange(6) < count)
    with mock.patch.object(triton_support, "are_usable", return_value=in_kernels), book_keeping(model, **options) as clipped:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = of(model, inputs, labels)
        norms = clipped.backward(losses)
        return norms, torch.cat([total.double().flatten() for total in clipped.sums.values()])


@pytest.mark.parametrize(
    ("name", "granularity"),
    [("gpt2-lm", "flat"), ("vit", "per_layer"), *thorough(("bert", "per_layer"), ("llama-lora", "flat"))],
)
def test_a_model_has_the_norms_and_sums_of_torchs_operators(name, granularity):
    """A table that is a head too, patches of images, adapters; one example has no finite gradient."""

    def losses(*batch):
        return losses_of(*batch) * torch.tensor([1.0, torch.inf, 1.0])

    options = dict(max_grad_norm=C, norm_rule="ghost", granularity=granularity, of=losses, count=3)
    (norms, sums), (wanted_norms, wanted) = (of_model(name, in_kernels=which, **options) for which in (True, False))
    assert norms.isfinite().tolist() == [True, False, True]
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-5, atol=0.0, equal_nan=True)
    torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-7)


def test_products_are_summed_from_the_factors_that_the_kernel_has_weighted(monkeypatch):
    """A table that is a head too keeps the sum of what was looked up."""
    options = dict(in_kernels=True, norm_rule="ghost", max_grad_norm=C, count=2)
    _, whole = of_model("gpt2-lm", **options)
    weighed = fused_gradients.weighed

    def scaled(products, by):
        return ((key, by * left, right) for key, left, right in weighed(products))

    found = []
    for by in (0.0, 2.0):
        monkeypatch.setattr(fused_gradients, "weighed", lambda products, by=by: scaled(products, by))
        found.append(of_model("gpt2-lm", **options)[1])
    rest, doubled = found
    assert 0 < rest.norm() < whole.norm()
    torch.testing.assert_close(doubled - whole, whole - rest, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", [*thorough("bert"), "gpt2-lm"])
def test_neighbours_in_bfloat16_are_at_most_c_apart(name):
    """The factor is lowered for what rounding may add, and no more than that: a tenth at most where terms cancel."""
    options = dict(in_kernels=True, autocast=True, max_grad_norm=C / 10, norm_rule="ghost")
    (norms, whole), (_, others) = (of_model(name, count=count, **options) for count in (3, 2))
    assert norms.min() > C / 10
    assert 0.9 < (whole - others).norm() / (C / 10) <= 1.0


def test_rounding_that_always_goes_up_stays_within_c():
    """A number a little above the middle of two of bfloat16's: its product with a clip factor may round up every time."""
    most = 0.0
    for max_grad_norm in torch.linspace(0.5, 1.0, 24).tolist():
        layer = nn.Linear(16, 16, bias=False).bfloat16()
        inputs = torch.ones(1, 4, 16, dtype=torch.bfloat16)
        with mock.patch.object(triton_support, "are_usable", return_value=True):
            clipped = book_keeping(layer, max_grad_norm=max_grad_norm, norm_rule="ghost", clipping="vanilla")
        with clipped:
            clipped.backward(layer(inputs).sum(dim=(1, 2)))
            most = max(most, (clipped.sums["weight"].double().norm() / max_grad_norm).item())
    assert 0.99 < most <= 1.0
