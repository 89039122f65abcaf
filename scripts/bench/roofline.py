"""What a private pass, a release and an optimizer step would cost a GPU, without one.

    python -m scripts.bench.roofline --works roberta-base,gpt2
    python -m scripts.bench.roofline --works roberta-base,roberta-base-lora --texts 1024

Models of real size run on tensors without memory, under bf16 autocast. The time of a kernel is the largest of three: its
bytes over the memory's speed, its operations over the speed of their dtype, and the least that a kernel takes. The speeds
are fitted to what an H100 took for the same passes. What it gives are ratios of a private to a plain pass.

With `--texts`, it also compares whole steps on a batch of texts with SST-2's lengths: micro-batches cut by tokens, against
shuffled rows as in `Trainer`. There a pass takes the time of its kernels, or that of the Python which launches them, if that
is longer.
"""

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from doppler_hf import triton_support
from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim import fused_update as of_optimizer
from doppler_hf.privacy import GaussianMechanism
from doppler_hf.privacy.batching.cutting import Cut, grid_for, tokens_for
from doppler_hf.privacy.clipping import fused_gradients
from doppler_hf.privacy.noise import chacha
from doppler_hf.run.planning.memory import move_in, without_memory
from scripts.bench import engine
from scripts.bench.measure import append_json_line, chosen
from scripts.bench.micro_batches import lengths_like_sst2
from scripts.training.arguments import one_line_errors, parse_args

BYTES_PER_SECOND = 2.4e12
OPERATIONS_PER_SECOND = {torch.bfloat16: 480e12, torch.float16: 480e12}
OTHER_OPERATIONS_PER_SECOND = 45e12
LEAST_SECONDS = 2.2e-6
# What Python takes to launch a kernel: an H100 took 46 ms for passes of some 1,500 kernels, and was busy for 11 of them.
LAUNCH_SECONDS = 30e-6
ROWS = 32  # per_device_train_batch_size
aten = torch.ops.aten
# No kernels, though their schema does not call them views.
FREE = {
    aten._unsafe_view,
    aten._reshape_alias,
    aten.lift_fresh,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
}
# They read or write some rows of a table.
TAKING, ADDING = {aten.embedding, aten.index_select, aten.gather}, {aten.index_add, aten.index_add_}


@dataclass
class RooflineArguments:
    """The settings of the estimate."""

    works: str = field(
        default="roberta-base,gpt2,vit-base,roberta-base-lora,llama-1b-lora",
        metadata={"help": f"Of {', '.join(engine.ALL_WORKS)}; comma separated."},
    )
    operators: int = field(default=0, metadata={"help": "How many of the dearest operators are printed of each work."})
    texts: int = field(
        default=0, metadata={"help": "The expected batch of a whole step on texts with SST-2's lengths; 0 leaves it out."}
    )
    output: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


class Cost(TorchDispatchMode):
    """Adds up seconds, kernels and bytes of what runs in the block: operators of torch, and kernels of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self.seconds, self.kernels, self.bytes = 0.0, 0, 0
        self.by_operator: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def __enter__(self) -> "Cost":
        self._begin()
        super().__enter__()
        return self

    def add(self, name: str, size: int, operations: int = 0, dtype: torch.dtype = torch.float32) -> None:
        """Add one kernel that reads and writes so many bytes."""
        speed = OPERATIONS_PER_SECOND.get(dtype, OTHER_OPERATIONS_PER_SECOND)
        seconds = max(size / BYTES_PER_SECOND, operations / speed, LEAST_SECONDS)
        self.kernels, self.bytes, self.seconds = self.kernels + 1, self.bytes + size, self.seconds + seconds
        entry = self.by_operator[f"{name} {str(dtype).removeprefix('torch.')}"]
        entry[0] += 1
        entry[1] += seconds

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        packet = operator.overloadpacket
        if is_free(operator):
            return result
        inputs, outputs = (tensors_in(each) for each in ((args, kwargs), result))
        size = sum(each.nbytes for each in (*inputs, *outputs))
        if packet in TAKING:
            size = 2 * sum(each.nbytes for each in outputs)
        if packet in ADDING:
            size = 3 * inputs[2].nbytes
        operations = 0
        if packet in flop_registry:
            shapes = [each for each in args if not isinstance(each, torch.dtype)]  # of the result
            operations = flop_registry[packet](*shapes, **(kwargs or {}), out_val=result)
        self.add(str(packet).removeprefix("aten."), size, operations, inputs[0].dtype if inputs else torch.float32)
        return result

    @contextlib.contextmanager
    def with_kernels(self) -> Iterator[None]:
        """Count kernels of ours in the block, on which they are taken for usable."""

        def compare(products: Any, **options: Any) -> Any:
            for left, right in products:
                tiles = -(-left.shape[1] // fused_gradients.TILE)
                places = len(left) * tiles * (tiles + 1) // 2 * fused_gradients.TILE**2
                widths = left.shape[2] + (right.shape[2] if right.ndim > 2 else 0)
                inside.append((left.nbytes + right.nbytes, 2 * places * widths, left.dtype))
            return original[fused_gradients, "compare"](products, **options)

        def weighed(products: Any) -> Any:
            for left, right, _ in tuple(products.values()):
                inside.append((2 * min(left.nbytes, right.nbytes), 0, left.dtype))
            return original[fused_gradients, "weighed"](products)

        def normalized_sums(*tensors: Tensor) -> Any:
            inside.append((sum(each.nbytes for each in tensors), 0, torch.float32))
            return original[fused_gradients, "normalized_sums"](*tensors)

        def add_noise_and_scale(values: Any, **options: Any) -> None:
            written = [*values, *(state[0] for state in options["states"])]
            read = [*values, *(past for state in options["states"] for past in state[1:])]
            inside.append((sum(each.nbytes for each in (*written, *read)), 0, values[0].dtype))
            original[chacha, "add_noise_and_scale"](values, **options)

        def fused_update(steps: Any) -> Any:
            for tensors, _ in steps:
                size = sum(each.nbytes for each in tensors.of_shape)
                inside.append((2 * size - tensors.grad.nbytes, 0, tensors.weight.dtype))
            return original[of_optimizer, "fused_update"](steps)

        def launch(kernel: Any, *_: Any, **options: Any) -> None:
            dtype = next(
                (options[name] for name in ("L", "T", "X") if name in options), triton_support.triton_dtype(torch.float32)
            )
            name = kernel.fn.__name__.lstrip("_")
            some = [each for each in inside if triton_support.triton_dtype(each[2]) == dtype]
            self.add(
                name, sum(each[0] for each in some), sum(each[1] for each in some), some[0][2] if some else torch.float32
            )
            inside[:] = [each for each in inside if each not in some]

        inside: list[tuple[int, int, torch.dtype]] = []
        addresses = itertools.count(step=1 << 40)  # so far apart that no two tensors overlap
        replaced = {
            (fused_gradients, "compare"): compare,
            (fused_gradients, "weighed"): weighed,
            (fused_gradients, "normalized_sums"): normalized_sums,
            (chacha, "add_noise_and_scale"): add_noise_and_scale,
            (of_optimizer, "fused_update"): fused_update,
            (triton_support, "launch"): launch,
            (triton_support, "are_usable"): lambda device: True,
            (triton_support, "address_of"): lambda values: next(addresses),
        }
        original = {key: getattr(*key) for key in replaced}
        with contextlib.ExitStack() as stack:
            for (owner, name), function in replaced.items():
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


def is_free(operator: Any) -> bool:
    """Return whether an operator of torch launches no kernel."""
    return operator.is_view or operator.overloadpacket in FREE or operator.namespace in ("prim", "profiler")


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def cost_of_pass(work: engine.Work, kind: str) -> Cost:
    """Return the cost of a forward and a backward pass, plain or private, under bf16 autocast."""
    model, batch = engine.build(work, device="meta")
    cost, args = Cost(), engine.BenchArguments(precision="bf16", device="cpu")
    with without_memory(on_cuda=True), cost.with_kernels():
        move_in(model)
        batch = {name: torch.empty(each.shape, dtype=each.dtype, device="cpu") for name, each in batch.items()}
        with engine.stepping(kind, model, batch, args) as step:
            step()  # tries which way fits a layer without a rule
            with cost:
                step()
    return cost


def cost_of_release(work: engine.Work) -> Cost:
    """Return the cost of the release of a step's sums."""
    model, _ = engine.build(work, device="meta")
    cost = Cost()
    with without_memory(on_cuda=True), cost.with_kernels():
        sums = {name: torch.empty(each.shape, device="cpu") for name, each in model.named_parameters() if each.requires_grad}
        mechanism = GaussianMechanism(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
        with cost:
            mechanism.privatize(sums, step=0)
    return cost


def cost_of_optimizer(work: engine.Work) -> Cost:
    """Return the cost of an optimizer's step, with the momentum filter and AdamBC."""
    model, _ = engine.build(work, device="meta")
    cost = Cost()
    with without_memory(on_cuda=True), cost.with_kernels():
        move_in(model)
        trained = [each for each in model.parameters() if each.requires_grad]
        low_pass_filter = PAPER_FILTERS["momentum"]
        optimizer = DopplerOptimizer(trained, 1e-4, low_pass_filter=low_pass_filter, base="adam_bc", noise_std=1e-4)
        for _ in range(2):  # the first makes the states
            for each in trained:
                each.grad = torch.empty_like(each)
            with cost:
                optimizer.step()
    return cost


def seconds_with_python(cost: Cost) -> float:
    """Return the seconds of a pass, which waits for Python if its kernels are short."""
    return max(cost.kernels * LAUNCH_SECONDS, cost.seconds)


def step_on_texts(work: engine.Work, number: int) -> dict[str, float]:
    """Return passes and seconds of a whole step on so many texts: by tokens in bfloat16, and plain on shuffled rows."""
    lengths = lengths_like_sst2(number)
    longest = int(lengths.max())
    shapes = [(len(rows), int(rows.max())) for rows in np.split(lengths, range(ROWS, number, ROWS))]
    tokens = tokens_for(on_cpu=False, rows=ROWS, longest=longest, width=work.hidden)
    cut = Cut(None, tokens, padded=grid_for(on_cpu=False, pieces=-(-number // ROWS)))
    sorted_lengths = lengths[cut.order(lengths, None, None)]
    private_shapes = []
    start = 0
    for stop, multiple in cut.passes(number, lengths=sorted_lengths):
        own = int(sorted_lengths[start:stop].max())
        private_shapes.append((stop - start, own if multiple is None else -(-own // multiple) * multiple))
        start = stop

    @functools.cache
    def seconds_of(kind: str, rows: int, length: int) -> float:
        return seconds_with_python(cost_of_pass(replace(work, batch=rows, length=length), kind))

    once = sum(map(seconds_with_python, (cost_of_release(work), cost_of_optimizer(work))))
    return {
        "passes": len(private_shapes),
        "plain_passes": len(shapes),
        "step_s": sum(seconds_of("book_keeping", *shape) for shape in private_shapes) + once,
        "plain_step_s": sum(seconds_of("plain", *shape) for shape in shapes),  # without its optimizer
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Estimate every work, and print a line for each."""
    with one_line_errors():
        (args,) = parse_args(RooflineArguments, argv=argv)
        works = chosen("--works", args.works, engine.ALL_WORKS)
    for name in works:
        work = engine.ALL_WORKS[name]
        plain, private = cost_of_pass(work, "plain"), cost_of_pass(work, "book_keeping")
        release, optimizer = cost_of_release(work), cost_of_optimizer(work)
        result = {
            "work": name,
            "busy": private.seconds / plain.seconds,
            "kernels": private.kernels / plain.kernels,
            "plain_s": plain.seconds,
            "plain_kernels": plain.kernels,
            "release_s": release.seconds,
            "release_kernels": release.kernels,
            "optimizer_s": optimizer.seconds,
            "optimizer_kernels": optimizer.kernels,
            "optimizer_bytes": optimizer.bytes,
        }
        print(
            f"{name:18} busy ×{result['busy']:.2f}, kernels ×{result['kernels']:.2f}: {1e3 * plain.seconds:.1f} → "
            f"{1e3 * private.seconds:.1f} ms, {plain.kernels} → {private.kernels}; release {1e3 * release.seconds:.2f} ms, "
            f"{release.kernels}; optimizer {1e3 * optimizer.seconds:.2f} ms, {optimizer.kernels}",
            flush=True,
        )
        for operator, (count, seconds) in sorted(private.by_operator.items(), key=lambda item: -item[1][1])[
            : args.operators
        ]:
            before, of_plain = plain.by_operator[operator]
            print(f"    {operator:36} {of_plain * 1e3:6.2f} → {seconds * 1e3:6.2f} ms, {before:4.0f} → {count:4.0f}")
        if args.texts:
            step = step_on_texts(work, args.texts)
            result |= step
            print(
                f"    a step on {args.texts:,} texts ×{step['step_s'] / step['plain_step_s']:.2f}: "
                f"{1e3 * step['plain_step_s']:.0f} → {1e3 * step['step_s']:.0f} ms, "
                f"{step['plain_passes']} → {step['passes']} passes"
            )
        append_json_line(result, args.output)


if __name__ == "__main__":
    main()
