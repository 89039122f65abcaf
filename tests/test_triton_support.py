"""Where kernels work is found by a launch, before anything is counted; and what Triton's compiler makes of them all."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from doppler_hf import triton_support
from doppler_hf.privacy.noise import noise_source
from tests.support.interpreter import repair_casts
from tests.support.tiers import thorough


def test_where_triton_does_not_work_the_cpu_makes_the_noise_and_the_user_is_told(monkeypatch):
    """As in a container without a C compiler."""

    def fails(*_, device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_support, "launch", fails)
    triton_support.are_usable.cache_clear()
    with pytest.warns(UserWarning, match=r"so training is slow \(Failed to find C compiler\)\. Install triton"):
        assert noise_source(torch.device("cuda")).startswith("AES-256-CTR")
    triton_support.are_usable.cache_clear()


def test_the_trial_is_a_launch(monkeypatch):
    """In the interpreter, on a device that is called CUDA's."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    triton_support.are_usable.cache_clear()
    assert triton_support.are_usable(torch.device("cuda"))
    triton_support.are_usable.cache_clear()
    assert not triton_support.are_usable(torch.device("cpu"))


def compiled(program):
    """Return the lines that a program prints which compiles kernels for an H100, without one, as `launch` would."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILER + program], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("_", "["))]


COMPILER = r"""
import json, re
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from doppler_hf.optim import fused_update
from doppler_hf.privacy.clipping import fused_gradients
from doppler_hf.privacy.noise import chacha

OWNED = {"table": "*i64", "owner": "*i32"}
COMPARED = {"table": "*i64", "found": "*fp32", "most": "i32"}
NORMALIZED = dict.fromkeys(("x", "mean", "rstd", "grad", "of_weight", "of_bias"), "*fp32") | {"time": "i32", "n": "i32"}

def of(kernel, kinds, warps, **constants):
    source = ASTSource(kernel, signature=kinds | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": False}).asm
"""

# The interpreter takes more than the compiler does.
WIDE = r"""
def show(kernel, kinds, warps, patterns, **constants):
    ptx = of(kernel, kinds, warps, **constants)["ptx"]
    print(kernel.fn.__name__, *(len(re.findall(pattern, ptx)) for pattern in patterns))

STORED, LOADED_WIDE, STORED_WIDE = r"st\.global", r"ld\.global\S*\.v4", r"st\.global\S*\.v4"
for terms, past, is_shaped, dtype in ((1, 0, False, tl.float32), (4, 2, True, tl.float64)):
    options = {"LANES": chacha.LANES, "TERMS": terms, "K": past, "SHAPED": is_shaped, "T": dtype}
    show(chacha._release, OWNED, chacha._WARPS, [STORED], **options)

options = {"BLOCK": fused_update.BLOCK, "S": tl.float32}
for order, has_v, dtype in ((1, True, tl.float32), (0, False, tl.bfloat16)):
    patterns = [LOADED_WIDE, STORED_WIDE, STORED, r"cvt\.rn\.bf16"]
    show(fused_update._update, OWNED, fused_update._WARPS, patterns, K=order, HAS_V=has_v, X=dtype, G=dtype, **options)

options = dict(L=tl.bfloat16, R=tl.bfloat16, IS_LOOKUP=False, ALIGNED=True, INTERPRETED=False)
sizes = dict(VANISHED=1e-25, TILE=64, DEPTH=64, RUN=1024)
show(fused_gradients._compare, COMPARED, 4, [r"wgmma\.mma_async", r"ld\.local", STORED], **options, **sizes)
options = dict(T=tl.bfloat16, OUT=tl.bfloat16, ALIGNED=True, CHUNK=4096, PIECES=4)
show(fused_gradients._weigh, {"table": "*i64"}, 4, [LOADED_WIDE, STORED_WIDE, r"cvt\.rn\.bf16"], **options)
show(fused_gradients._sum_normalized, NORMALIZED, 4, [STORED], ROWS=32, COLUMNS=128)
"""


@pytest.mark.thorough
def test_the_compiler_takes_the_kernels_for_tensor_cores_and_wide_loads():
    """A lane of the noise has eight numbers, each written once, and kept beside if it is shaped.

    One of the optimizer has two vectors of float32 or one of bfloat16: weight, gradient, state and second moment are read,
    all but the gradient are written, and beside that there is a way for the rest.
    """
    found = [line.split() for line in compiled(WIDE)]
    rounded_weights = found[3].pop()
    assert found[:4] == [["_release", "8"], ["_release", "16"], ["_update", "8", "6", "30", "0"], ["_update", "2", "1", "9"]]
    (_, products, spilled, stored), (_, read, written, rounded), (_, sums) = found[4:]
    assert min(map(int, (products, read, written, rounded, rounded_weights, sums))) > 0
    assert (spilled, stored) == ("0", "3")


def test_every_launch_rounds_a_product_before_it_adds(monkeypatch):
    """Triton 3.9 would fuse them and warn that later versions do not, and its interpreter does not."""
    asked, device = [], torch.device("cpu")
    triton_support.launch({(3,): lambda *args, **options: asked.append((args, options))}, (3,), 5, device=device, BLOCK=16)
    assert asked == [((5,), {"BLOCK": 16, "enable_fp_fusion": False})]


# For every kernel and dtype: the instructions that make floating-point numbers of others, what is reduced, and what is
# computed in half precision, which is nothing but a change of dtype and a product for tensor cores.
ARITHMETIC = r"""
COMPUTING = "add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|min|max|sin|cos|ex2|lg2|tanh|cvt"
COMPUTING = rf"^\s+(?:@\S+ )?((?:{COMPUTING})\.\S*?f(?:16|32|64)\S*|(?:wg)?mma\.m\S+)"

def show(kernel, kinds, warps, **constants):
    made = of(kernel, kinds, warps, **constants)
    instructions = set(re.findall(COMPUTING, made["ptx"], re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<[^>]*x(\w+)>\) ->", made["ttir"])
    half = re.findall(r"(\S+f) [^:\n]*: tensor<[^>]*x(?:bf16|f16)\b", made["ttir"])
    assert len(reduced) == made["ttir"].count('"tt.reduce"')
    print(json.dumps([kernel.fn.__name__, *map(sorted, map(set, (instructions, reduced, half)))]))

for terms, past, is_shaped, dtype in ((1, 0, False, tl.float32), (4, 2, True, tl.float64)):
    show(chacha._release, OWNED, 8, LANES=256, TERMS=terms, K=past, SHAPED=is_shaped, T=dtype)
kinds = [(1, True, tl.float32, tl.float32), (2, True, tl.bfloat16, tl.float32), (0, False, tl.bfloat16, tl.bfloat16)]
for order, has_v, x, g in [*kinds, (3, True, tl.float16, tl.float16), (1, True, tl.float64, tl.float32)]:
    full = tl.float64 if x == tl.float64 else tl.float32
    show(fused_update._update, OWNED, 8, K=order, HAS_V=has_v, X=x, G=g, BLOCK=2048, S=full)
kinds = [(factor, is_lookup, True) for factor in (tl.bfloat16, tl.float16, tl.float32) for is_lookup in (False, True)]
for factor, is_lookup, is_aligned in [*kinds, (tl.bfloat16, False, False), (tl.float32, False, False)]:
    options = dict(L=factor, R=tl.int64 if is_lookup else factor, IS_LOOKUP=is_lookup, ALIGNED=is_aligned, INTERPRETED=False)
    depth = 32 if factor == tl.float32 else 64
    show(fused_gradients._compare, COMPARED, 4, **options, VANISHED=1e-25, TILE=64, DEPTH=depth, RUN=1024)
for factor, out in ((tl.bfloat16, tl.bfloat16), (tl.float16, tl.float32), (tl.float32, tl.float32)):
    show(fused_gradients._weigh, {"table": "*i64"}, 4, T=factor, OUT=out, ALIGNED=True, CHUNK=4096, PIECES=4)
for kind in ("*fp32", "*bf16", "*fp16"):
    show(fused_gradients._sum_normalized, NORMALIZED | {"x": kind, "grad": kind}, 4, ROWS=32, COLUMNS=128)
"""
# Rounded to nearest, numbers below the range of normal ones kept. Reading half precision or whole numbers rounds nothing.
ROUNDED = {f"{name}.rn.{dtype}" for name in ("add", "sub", "mul") for dtype in ("f32", "f64")} | {
    "cvt.rn.f32.f64",
    "max.NaN.f32",
    "max.f64",
}
READ = {"cvt.f32.bf16", "cvt.f32.f16", "cvt.f64.f32", "cvt.rn.f64.u32", "cvt.rn.f32.u32", "cvt.rzi.s64.f32"}
WRITTEN = {f"cvt.rn.{kind}{count}.f32" for kind in ("bf16", "f16") for count in ("", "x2")}
ROOTS = {"sqrt.rn.f32", "sqrt.rn.f64", "div.rn.f32", "div.rn.f64"}
# The products of `dot` are fused with its sum, and so is what CUDA's library computes logarithm and angles by.
OF_DOT = {"fma.rn.f32", *(f"wgmma.mma_async.sync.aligned.m64n64k16.f32.{kind}.{kind}" for kind in ("bf16", "f16")),
          *(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" for kind in ("bf16", "f16"))}  # fmt: skip
OF_LIBRARY = {"fma.rn.f64", "rcp.approx.ftz.f64", "cvt.rni.s32.f64", "cvt.rn.f64.s32"}
MAY_COMPUTE = {
    "_release": ROUNDED | READ | OF_LIBRARY | {"sqrt.rn.f64"},
    "_update": ROUNDED | READ | WRITTEN | ROOTS,
    "_compare": ROUNDED | READ | {"sqrt.rn.f32"} | OF_DOT,
    "_weigh": ROUNDED | READ | WRITTEN,
    "_sum_normalized": ROUNDED | READ,
}


@pytest.mark.thorough
def test_what_is_compiled_rounds_to_nearest_and_adds_up_in_float32():
    """As the interpreter does, so that the tests which it runs speak for a GPU: see `doppler_hf.triton_support`.

    No fused product outside of `dot`, no approximate root, no number cut off to bfloat16, none flushed to zero.
    """
    seen = [json.loads(line) for line in compiled(ARITHMETIC)]
    assert {name for name, *_ in seen} == {*MAY_COMPUTE}
    for name, instructions, reduced, half in seen:
        assert instructions, name
        assert {*instructions} <= MAY_COMPUTE[name], name
        assert {*reduced} <= {"f32"}, name
        assert {*half} <= {"arith.extf", "arith.truncf"}, name
    assert {"cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32"} & {each for _, instructions, *_ in seen for each in instructions}


@triton.jit
def _copy(source, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(source + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3)])
def test_the_repaired_interpreter_changes_dtypes_as_torch_does(seed, monkeypatch):
    """For all bit patterns of bfloat16, and for numbers of all sizes beside them."""
    repair_casts(monkeypatch)
    bits = np.random.default_rng(seed).integers(0, 2**32, 2**12, dtype=np.uint32)
    numbers = torch.from_numpy(bits.view(np.float32))
    halves = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    for source, dtype in ((numbers, torch.bfloat16), (halves, torch.float32)):
        found = torch.empty(len(source), dtype=dtype)
        _copy[(1,)](source, found, len(source))
        torch.testing.assert_close(found, source.to(dtype), rtol=0, atol=0, equal_nan=True)
