"""What both wings agree on: which side a subspace belongs to, and the way there and back."""

import pytest
import torch

from doppler_hf.linalg import factors, highest_conv_precision, highest_matmul_precision, is_wide, lift, project


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5)])
def test_lift_is_the_way_back_of_project(shape):
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(min(shape), 2, generator=generator, dtype=torch.float64)).Q
    low_rank = torch.randn(
        (2, shape[1]) if shape[0] <= shape[1] else (shape[0], 2), generator=generator, dtype=torch.float64
    )
    out = torch.full(shape, torch.nan, dtype=torch.float64)
    lift(low_rank, basis, out=out)
    # Two products of at most seven terms each.
    torch.testing.assert_close(project(out, basis), low_rank, rtol=0, atol=14 * 2.0**-52 * low_rank.norm().item())
    left, right = factors(low_rank, basis, wide=is_wide(out))
    assert torch.equal(left @ right, out)


def test_the_precision_that_the_user_has_allowed_is_put_back():
    torch.set_float32_matmul_precision("medium")
    try:
        with highest_matmul_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


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
                with cudnn.flags(enabled=False):  # as models of the host do for CTC
                    pass
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == precisions
        if not is_contradiction:
            assert cudnn.allow_tf32 == (conv == "tf32")
    finally:
        cudnn.allow_tf32 = before
