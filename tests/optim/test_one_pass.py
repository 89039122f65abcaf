"""One pass over memory, in slices or compiled, is the plain step."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch._inductor.exc
from torch.utils._python_dispatch import TorchDispatchMode

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer, one_pass
from doppler_hf.optim.one_pass import OnePass
from doppler_hf.optim.optimizer import COMPILES_RIGHT
from tests.support.pairwise import pairwise
from tests.support.tolerances import of_optimizer_steps

BASES = ["sgd", "adam", "adam_bc"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SHAPES = [(0,), (), (1,), (5,), (7,), (16,), (17,), (1000,), (4096,), (17,), (64, 64), (1000,), (9, 40)]


# Two optimizers of one process: each has programs of its own.
OPTIMIZERS = [
    {"dtypes": [torch.float32, torch.bfloat16]},
    {"dtypes": [torch.float32], "low_pass_filter": PAPER_FILTERS["momentum"], "base": "sgd"},
]


def trajectory(dtypes, *, steps=5, **options):
    """The weights after every step, and the last second moments; rate and noise change, and decay comes and goes."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape, dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    params = [torch.nn.Parameter(normal(shape, dtype)) for dtype in dtypes for shape in SHAPES]
    matrices = [p for p in params if p.shape == (9, 40)]
    others = [p for p in params if p.shape != (9, 40)]
    groups = [{"params": others}, {"params": matrices, "rank": 4, "update_proj_gap": 3}]
    constants = {"lr": 0.1, "low_pass_filter": PAPER_FILTERS["second-order"], "base": "adam_bc", "noise_std": 0.5}
    optimizer = DopplerOptimizer(groups, **constants | options)
    weights = []
    for t in range(steps):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1 / (1 + t), 0.1 * (t % 2)
        optimizer.noise_std = 0.5 + 0.2 * t
        for p in params:
            p.grad = normal(p.shape, p.dtype)
        optimizer.step()
        weights.append([p.detach().clone() for p in params])
    return weights, [optimizer.state[p].get("exp_avg_sq", torch.zeros(0)) for p in params]


def assert_same_but_for_rounding(ends, expected_ends):
    """Of five steps, whose updates are at most lr / √floor = 0.4 times a gradient."""
    for some, expected in zip([*ends[0], ends[1]], [*expected_ends[0], expected_ends[1]], strict=True):
        for one, other in zip(some, expected, strict=True):
            atol = of_optimizer_steps(
                5, largest=max(1.0, other.abs().max().item()) if other.numel() else 0.0, dtypes=[one.dtype]
            )
            torch.testing.assert_close(one, other, rtol=0, atol=atol)


def report(path):
    """What the tests below look at, made in a process of its own: shapes checked at run time would be compiled along."""
    torch.set_num_threads(1)  # as here: bases are sums, whose order the number of threads decides
    one_pass.TENSORS_AT_A_TIME = 3  # for the time that compiling takes
    one_pass.SMALL = 16
    torch._dynamo.config.recompile_limit = 1  # in the place of 8, of which it would take long to make one more
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends = [trajectory(**options, compiled=True) for options in OPTIMIZERS]
    messages = [str(warning.message) for warning in caught if "compiler" in str(warning.message)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        has_vectors = bool(torch._inductor.cpu_vec_isa.pick_vec_isa())
    except torch._inductor.exc.InvalidCxxCompiler:
        has_vectors = False
    torch.save({"ends": ends, "graphs": graphs, "messages": messages, "has_vectors": has_vectors}, path)


def reported(path, **environment):
    # torch takes what it has compiled for one processor for another, too, such as one that ATEN_CPU_CAPABILITY names.
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(path.with_name("compiled"))}
    command = f"from tests.optim.test_one_pass import report; report({str(path)!r})"
    subprocess.run([sys.executable, "-c", command], env=os.environ | environment, check=True, timeout=300)
    return torch.load(path, weights_only=True)


@pytest.mark.skipif(not COMPILES_RIGHT, reason="torch's compiler writes code that breaks the memory, and is not used")
@pytest.mark.thorough
def test_compiled_equals_uncompiled_and_every_dtype_is_compiled_once_whatever_torchs_own_limit(tmp_path):
    found = reported(tmp_path / "report")
    if not found["has_vectors"]:
        pytest.skip("what torch 2.13 writes for a processor without AVX2 names vectors and is no C++")
    assert (found["messages"], found["graphs"]) == ([], 3)
    for ends, options in zip(found["ends"], OPTIMIZERS, strict=True):
        assert_same_but_for_rounding(ends, trajectory(**options, compiled=False))


def test_a_compiler_that_fails_on_the_second_dtype_steps_nothing_twice(monkeypatch):
    class FailsOnHalf:
        def __init__(self, function, example, constants):
            if example.weight.dtype == torch.bfloat16:
                raise torch._inductor.exc.InductorError(ValueError("no bfloat16"), None)
            self.function = function

        def __call__(self, batch, constants):
            for tensors in batch:
                self.function(tensors, constants)

    monkeypatch.setattr(one_pass, "Program", FailsOnHalf)
    monkeypatch.setattr(one_pass, "SMALL", 16)
    with pytest.warns(UserWarning, match="no working compiler"):
        weights, _ = trajectory([torch.float32, torch.bfloat16], compiled=True)
    expected, _ = trajectory([torch.float32, torch.bfloat16], compiled=False)
    for one, other in zip(weights[-1], expected[-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "dtype", "base"), pairwise(PAPER_FILTERS, DTYPES, BASES), ids=str)
def test_slices_and_joined_small_tensors_equal_whole_ones(name, dtype, base, monkeypatch):
    options = {"base": base, "low_pass_filter": PAPER_FILTERS[name], "compiled": False}
    monkeypatch.setattr("tests.optim.test_one_pass.SHAPES", [(0,), (), (64,), (65,), (150,), (5, 27), (9, 40)])
    monkeypatch.setattr(one_pass, "SMALL", 0)
    whole = trajectory([dtype], **options)
    # As CPU_SLICE, a multiple of what any processor's registers hold: a number meets the same instructions in a slice as in
    # the whole, whose last few are done one by one.
    monkeypatch.setattr(one_pass, "CPU_SLICE", 64)
    sliced = trajectory([dtype], **options)
    for some, expected in zip([*sliced[0], sliced[1]], [*whole[0], whole[1]], strict=True):
        for one, other in zip(some, expected, strict=True):
            assert torch.equal(one, other)
    monkeypatch.setattr(one_pass, "SMALL", 140)  # in runs of fewer than 2 · 64, and one tensor alone
    assert_same_but_for_rounding(trajectory([dtype], **options), whole)


def test_many_small_tensors_take_as_many_kernels_as_few():
    class Kernels(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += not func.is_view
            return func(*args, **kwargs or {})

    def kernels_of_a_step(number):
        params = [torch.nn.Parameter(torch.ones(4, 5)) for _ in range(number)]
        optimizer = DopplerOptimizer(params, 0.1, low_pass_filter=PAPER_FILTERS["second-order"], base="adam_bc")
        for p in params:
            p.grad = torch.ones(4, 5)
        optimizer.step()
        with Kernels() as kernels:
            optimizer.step()
        return kernels.count

    assert kernels_of_a_step(30) == kernels_of_a_step(2) < 30


@pytest.mark.parametrize(("compiled", "threshold", "compiles_right", "expected"), [
    (None, 24, True, True), (None, 25, True, False), (True, 25, True, True), (False, 24, True, False),
    (None, 24, False, False),
])  # fmt: skip
def test_only_many_parameters_are_compiled_unless_told(compiled, threshold, compiles_right, expected, monkeypatch):
    asked = []

    class Recorder(OnePass):
        def __init__(self, function, *, compiled):
            asked.append(compiled)
            super().__init__(function, compiled=False)

    monkeypatch.setattr("doppler_hf.optim.optimizer.OnePass", Recorder)
    monkeypatch.setattr("doppler_hf.optim.optimizer.WORTH_COMPILING", threshold)
    monkeypatch.setattr("doppler_hf.optim.optimizer.COMPILES_RIGHT", compiles_right)
    params = [torch.nn.Parameter(torch.zeros(4, 5)), torch.nn.Parameter(torch.zeros(4))]
    optimizer = DopplerOptimizer([{"params": params[:1]}, {"params": params[1:]}], 0.1, compiled=compiled)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert asked == [expected]
