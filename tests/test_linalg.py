"""The precision of products is put up and back."""

import pytest
import torch

from doppler_hf.linalg import highest_conv_precision, highest_matmul_precision


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
