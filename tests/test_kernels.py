"""Where kernels work is found by a launch, before anything is counted; and Triton's compiler takes them all."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from doppler_hf import kernels
from doppler_hf.privacy.noise import noise_source


def test_where_triton_does_not_work_the_cpu_makes_the_noise_and_the_user_is_told(monkeypatch):
    """As in a container without a C compiler."""

    def fails(*_, device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "launch", fails)
    kernels.are_usable.cache_clear()
    with pytest.warns(UserWarning, match=r"Training on this GPU is slow: .* \(Failed to find C compiler\)\. Install triton"):
        assert noise_source(torch.device("cuda")).startswith("AES-256-CTR")
    kernels.are_usable.cache_clear()


def test_the_trial_is_a_launch(monkeypatch):
    """In the interpreter, on a device that is called CUDA's."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernels.are_usable.cache_clear()
    assert kernels.are_usable(torch.device("cuda"))
    kernels.are_usable.cache_clear()
    assert not kernels.are_usable(torch.device("cpu"))


# What Triton compiles for an H100, without one: the interpreter takes more than the compiler does.
COMPILED = """
import re
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from doppler_hf.optim import fused_update
from doppler_hf.privacy.clipping import kernels
from doppler_hf.privacy.noise import chacha

def show(kernel, kinds, warps, patterns, **constants):
    source = ASTSource(kernel, signature=kinds | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    print(kernel.fn.__name__, *(len(re.findall(pattern, ptx)) for pattern in patterns))

OWNED, STORED = {"table": "*i64", "owner": "*i32"}, r"st\\.global"
LOADED_WIDE, STORED_WIDE = r"ld\\.global\\S*\\.v4", r"st\\.global\\S*\\.v4"
for terms, past, is_shaped, dtype in ((1, 0, False, tl.float32), (4, 2, True, tl.float64)):
    options = {"LANES": chacha.LANES, "TERMS": terms, "K": past, "SHAPED": is_shaped, "T": dtype}
    show(chacha._release, OWNED, chacha._WARPS, [STORED], **options)

options = {"BLOCK": fused_update.BLOCK, "S": tl.float32}
for order, has_v, dtype in ((1, True, tl.float32), (0, False, tl.bfloat16)):
    patterns = [LOADED_WIDE, STORED_WIDE, STORED, r"cvt\\.rn\\.bf16"]
    show(fused_update._update, OWNED, fused_update._WARPS, patterns, K=order, HAS_V=has_v, X=dtype, G=dtype, **options)

options = dict(L=tl.bfloat16, R=tl.bfloat16, IS_LOOKUP=False, ALIGNED=True, INTERPRETED=False)
kinds, sizes = {"table": "*i64", "found": "*fp32", "most": "i32"}, dict(VANISHED=1e-25, TILE=64, DEPTH=64, RUN=1024)
show(kernels._compare, kinds, 4, [r"wgmma\\.mma_async", "ld\\.local", STORED], **options, **sizes)
options = dict(T=tl.bfloat16, OUT=tl.bfloat16, ALIGNED=True, CHUNK=4096, PIECES=4)
show(kernels._weigh, {"table": "*i64"}, 4, [LOADED_WIDE, STORED_WIDE, r"cvt\\.rn\\.bf16"], **options)
kinds = dict.fromkeys(("x", "mean", "rstd", "grad", "of_weight", "of_bias"), "*fp32") | {"time": "i32", "n": "i32"}
show(kernels._sum_normalized, kinds, 4, [STORED], ROWS=32, COLUMNS=128)
"""


@pytest.mark.thorough
def test_the_compiler_takes_the_kernels_for_tensor_cores_and_wide_loads():
    """A lane of the noise has eight numbers, each written once, and kept beside if it is shaped.

    One of the optimizer has two vectors of float32 or one of bfloat16: weight, gradient, state and second moment are read,
    all but the gradient are written, and beside that there is a way for the rest.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=variables | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("_")]
    rounded_weights = found[3].pop()
    assert found[:4] == [["_release", "8"], ["_release", "16"], ["_update", "8", "6", "30", "0"], ["_update", "2", "1", "9"]]
    (_, products, spilled, stored), (_, read, written, rounded), (_, sums) = found[4:]
    assert min(map(int, (products, read, written, rounded, rounded_weights, sums))) > 0
    assert (spilled, stored) == ("0", "3")
