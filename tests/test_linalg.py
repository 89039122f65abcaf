"""Sums and norms are right in every layout, at the largest sizes; the precision of products is put up and back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from doppler_hf.linalg import RUN, highest_conv_precision, highest_matmul_precision, norm, row_norms, row_sums
from tests.support.processors import OneAfterAnother
from tests.support.tiers import further, thorough

ROOT = Path(__file__).parents[1]
SIDE = 4096


def equal(*shape):
    return torch.full(shape, 0.3)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# Views of 4,096 × 4,096 numbers, as a model's weights, gradients and factors are.
LAYOUTS = {
    "contiguous": lambda draw: draw(SIDE, SIDE),
    "transposed": lambda draw: draw(SIDE, SIDE).T,
    "sliced": lambda draw: draw(SIDE, SIDE + 5)[:, 3:-2],
    "strided": lambda draw: draw(SIDE, 2 * SIDE)[:, ::2],
    "expanded": lambda draw: draw(SIDE, 1).expand(SIDE, SIDE),
    "expanded over rows": lambda draw: draw(1, SIDE).expand(SIDE, SIDE),
    "by heads": lambda draw: draw(64, 64, 64, 64).transpose(1, 2),
    "blocks of a few": lambda draw: draw(2**21, 4, 4)[:, ::2, 1::2],
    "channels last": lambda draw: draw(4, 1024, 64, 64).to(memory_format=torch.channels_last),
}  # fmt: skip
CASES = [
    (layout, draw, dtype) for layout in LAYOUTS for draw in (equal, normal) for dtype in (torch.float32, torch.bfloat16)
]
QUICK = [("sliced", normal, torch.float32), ("expanded", equal, torch.float32), ("blocks of a few", equal, torch.bfloat16)]
# Of three runs, each in any order, half of it for the root; numbers of half precision are exact in float32.
MOST = 3 * RUN * 2.0**-24


@pytest.mark.parametrize(("layout", "draw", "dtype"), further(CASES, quick=QUICK))
def test_norms_of_millions_of_numbers_are_right_in_every_layout(layout, draw, dtype):
    values = LAYOUTS[layout](draw).to(dtype)
    exact = values.double().square_().sum().sqrt()
    found = norm(values)
    assert found.dtype == torch.float32
    assert abs(found.double() / exact - 1) <= MOST / 2


@pytest.mark.parametrize(("layout", "draw", "dtype"), further(CASES, quick=QUICK))
def test_sums_of_millions_of_numbers_are_right_in_every_layout(layout, draw, dtype):
    """Of every row, the rest being added up, and of all numbers together."""
    values = LAYOUTS[layout](draw).abs().to(dtype)
    for rows in (values.flatten(1), values.reshape(1, -1)):
        exact = rows.double().sum(dim=1)
        assert row_sums(rows).dtype == torch.float32
        assert (row_sums(rows).double() / exact - 1).abs().max() <= MOST
    del rows
    exact = values.flatten(1).double().square_().sum(dim=1).sqrt()
    assert (row_norms(values.flatten(1)).double() / exact - 1).abs().max() <= MOST / 2


@pytest.mark.parametrize("number", [0, 1, RUN - 1, RUN, RUN + 1, 2 * RUN, 60_000, RUN**2 - 1, RUN**2, RUN**2 + RUN + 1])
def test_rows_of_any_length_are_added_up_by_whoever_adds_one_number_after_another(number):
    """As a processor may, for which no kernel adds in pairs."""
    values = torch.full((2, 2 * number), 1 / 3)[:, ::2]
    with OneAfterAnother() as processor:
        found, roots = row_sums(values), row_norms(values)
    assert processor.sums >= 2 or number == 0
    torch.testing.assert_close(found.double(), values.double().sum(dim=1), rtol=MOST, atol=0.0)
    torch.testing.assert_close(roots.double(), values.double().square().sum(dim=1).sqrt(), rtol=MOST / 2, atol=0.0)


def test_that_processor_is_as_bad_as_it_may_be():
    values = equal(1, SIDE, SIDE)
    exact = values.double().square().sum()
    with OneAfterAnother():
        assert torch.linalg.vector_norm(values).double().square() / exact < 0.95
        assert values.square().sum() / exact < 0.95
        assert abs(row_norms(values.flatten(1)).double().square() / exact - 1) <= MOST


@pytest.mark.thorough
def test_sums_over_a_vocabulary_of_151936_words_of_4096_numbers():
    """They take no memory here, nor does what is made of them."""
    values = equal(1, 1).expand(2, 151_936 * SIDE)
    exact = values[0, 0].double() * values.shape[1]
    assert ((row_sums(values).double() / exact - 1).abs() <= MOST * 4 / 3).all()
    assert ((row_norms(values).double() / (exact * values[0, 0].double()).sqrt() - 1).abs() <= MOST * 2 / 3).all()


KERNELS = ["DEFAULT", "AVX2", "AVX512"]  # each processor that has one of them has those before it


@pytest.mark.parametrize("kernels", thorough(*KERNELS))
def test_they_are_right_with_the_kernels_that_torch_has_for_other_processors(kernels):
    own = torch.backends.cpu.get_cpu_capability()  # or less, where the tests are told so
    # The other tests of this file have this processor's own. Torch would take what it lacks all the same, and be ended by a
    # signal.
    if own not in KERNELS[KERNELS.index(kernels) + 1 :]:
        pytest.skip(f"this processor has {own}")
    path = os.path.relpath(__file__, ROOT)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        "millions or vocabulary",
        path,
    ]
    variables = os.environ | {"ATEN_CPU_CAPABILITY": kernels.lower()}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(("gpu", "cpu"), [("tf32", "none"), ("none", "bf16"), ("none", "none")])
def test_so_is_what_was_allowed_by_the_switches_of_the_backends(gpu, cpu):
    matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    exact, switches = matrix @ matrix, (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [switch.fp32_precision for switch in switches]
    try:
        switches[0].fp32_precision, switches[1].fp32_precision = gpu, cpu
        allowed = matrix @ matrix
        with highest_matmul_precision():
            assert torch.equal(matrix @ matrix, exact)
        assert [switch.fp32_precision for switch in switches] == [gpu, cpu]
        assert torch.equal(matrix @ matrix, allowed)
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


@pytest.mark.parametrize(("conv", "is_contradiction"), [("tf32", False), ("ieee", True)])
def test_convolutions_are_as_precise_as_float32_and_then_as_the_user_has_allowed(conv, is_contradiction):
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        cudnn.allow_tf32 = conv == "tf32"
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = conv, "tf32" if is_contradiction else conv
        precisions = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
        with highest_conv_precision():
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("ieee", "ieee")
            if not is_contradiction:
                with cudnn.flags(enabled=False):  # as models of Transformers do for CTC
                    pass
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == precisions
        if not is_contradiction:
            assert cudnn.allow_tf32 == (conv == "tf32")
    finally:
        cudnn.allow_tf32 = before
