"""What one clipped example contributes where rounding is hardest on it.

    python -m scripts.bench.rounding --output out/rounding.jsonl
    python -m scripts.bench.rounding --groups layers,heads --seeds 3

A contribution is the clipped sum of one example, its norm taken in float64. C is a tenth of the example's norm: by autograd
in float64 on the same weights, or of large models from the unclipped sum. ‖contribution‖/C must not be above 1, and
far below 1 is signal thrown away. Beside it stands κ = S/‖g‖ of `doppler_hf.privacy.clipping.gradients`, by how much the
terms of the gradient cancel.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping import gradients
from doppler_hf.privacy.token_losses import next_labels, summed_token_losses
from scripts.bench.engine import IMAGE, LM, TEXT, Work, build, losses_of
from scripts.bench.measure import append_json_line, chosen, settings
from scripts.training.arguments import one_line_errors, parse_args

EPS = torch.finfo(torch.float32).eps
LONG = (("max_position_embeddings", 4098),)
GPT2 = Work("gpt2", LM, 2, 64, 2, 50_257, 128, 1, options=(("n_positions", 4098),))
LLAMA = Work("llama", LM, 2, 64, 2, 50_257, 128, 1, options=LONG)
ROBERTA = Work("roberta", TEXT, 4, 128, 2, 50_265, 128, 1, options=LONG)
VIT = Work("vit", IMAGE, 4, 192, 3, 0, 224, 1)
WORKS = {
    "roberta": ROBERTA,
    "roberta-lora": replace(ROBERTA, lora_r=8),
    "roberta-768": replace(ROBERTA, hidden=768, heads=12, layers=2),
    "gpt2-tied": GPT2,
    "llama-untied": LLAMA,
    "vit": VIT,
}
KINDS = ("hidden", "hidden among 4", "hidden among 32")
MOST_LOGITS, MOST_IN_FLOAT64 = 7e7, 2e7


@dataclass
class RoundingArguments:
    """The cases."""

    groups: str = field(default="models,trained,pairs,heads,layers,padding", metadata={"help": "Comma separated."})
    lengths: str = field(default="32,128,512,2048,4096", metadata={"help": "In tokens, comma separated."})
    vocabularies: str = field(default="1000,50257,128256,256000", metadata={"help": "Comma separated."})
    rules: str = field(default="auto,ghost", metadata={"help": "How norms are computed, comma separated."})
    seeds: int = field(default=2, metadata={"help": "How many draws of each single layer."})
    steps: int = field(default=120, metadata={"help": "The most steps of a model on its one example."})
    scale: str = field(default="full", metadata={"help": "tiny tries out the script.", "choices": ["full", "tiny"]})
    device: str = field(default="cpu", metadata={"help": "cpu.", "choices": ["cpu"]})
    threads: int = field(default=1, metadata={"help": "torch's threads."})
    output: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


@dataclass(frozen=True)
class Case:
    """A model with the losses of one example, and how the engine is called for it."""

    name: str
    model: nn.Module
    losses: Callable[[nn.Module], Tensor]
    rule: str = "auto"
    views: int = 1
    rows_per_loss: int = 1
    exact: float | None = None  # ‖g‖ in float64, where it is known beforehand


def clipped_sum(case: Case, *, bound: float, **constants: float) -> tuple[float, dict[str, Tensor]]:
    """Return the example's norm and its clipped sum, with other constants of `gradients`."""
    options: dict[str, Any] = {"norm_rule": case.rule, "rows_per_loss": case.rows_per_loss}
    constants = {"GUARD": gradients.GUARD} | constants
    with (
        mock.patch.multiple(gradients, **constants),
        ClippedGradients(case.model, max_grad_norm=bound, **options) as clipped,
    ):
        norm = clipped.backward(case.losses(case.model), views=case.views)
        return norm.double().item(), dict(clipped.sums)


def size(tensors: dict[str, Tensor]) -> float:
    """Return the norm of all numbers, in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in tensors.values()))


def exact_norm(case: Case) -> float | None:
    """Return the norm by autograd in float64, where the model is small enough."""
    if case.exact is not None or sum(each.numel() for each in case.model.parameters()) > MOST_IN_FLOAT64:
        return case.exact
    model = copy.deepcopy(case.model).double()
    losses = case.losses(model)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(losses.sum() / case.views, [*trained.values()], allow_unused=True)
    return size({name: each for name, each in zip(trained, found, strict=True) if each is not None})


def measure(case: Case) -> dict[str, Any]:
    """Return what the example contributes, and by how much its terms cancel."""
    first, whole = clipped_sum(case, bound=1e30, GUARD=64.0, TERMS=0.0)
    norm_of_sum = size(whole)
    # The guard is a multiple of S², so that another guard tells S.
    sizes = max(clipped_sum(case, bound=1e30, GUARD=1 / EPS, TERMS=0.0)[0] ** 2 - first**2, 0.0)
    bound = max((exact_norm(case) or norm_of_sum) / 10, 1e-12)
    _, total = clipped_sum(case, bound=bound)
    return {
        "case": case.name,
        "rule": case.rule,
        "contribution": size(total) / bound,
        "kappa": math.sqrt(sizes) / norm_of_sum,
    }


def text(vocabulary: int, length: int, *, seed: int = 0) -> Tensor:
    """Return one text whose words are as frequent as Zipf's, shape (1, length)."""
    uniform = torch.rand(1, length, generator=torch.Generator().manual_seed(seed))
    return (float(vocabulary - 10) ** uniform).long() + 5


def of_work(work: Work) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model without dropout and one example."""
    model, batch = build(work, device="cpu")
    if work.head is not IMAGE:
        batch["input_ids"] = text(work.vocabulary, work.length)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["labels"] = batch["input_ids"] if work.head is LM else batch["labels"][:1]
    for name, each in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each, std=0.02)
    return model.eval(), batch


def losses(batch: dict[str, Tensor], *, precision: str = "float32") -> Callable[[nn.Module], Tensor]:
    """Return the function from a model to the batch's losses."""

    def found(model: nn.Module) -> Tensor:
        is_float = {name: each.is_floating_point() for name, each in batch.items()}
        dtype = next(model.parameters()).dtype
        return losses_of(
            model, {name: each.to(dtype) if is_float[name] else each for name, each in batch.items()}, precision=precision
        )

    return found


def works(args: RoundingArguments) -> Iterator[tuple[str, Work]]:
    """Yield every model at every length and, of language models, every vocabulary."""
    for name, work in WORKS.items():
        for length in map(int, args.lengths.split(",")):
            if work.head is IMAGE:
                side = 16 * math.isqrt(length) if args.scale == "full" else 32
                yield f"{name} T={(side // 16) ** 2 + 1}", replace(work, length=side)
            elif work.head is TEXT:
                if work.hidden * length <= 5e5:
                    yield f"{name} T={length}", replace(work, length=length)
            else:
                for words in map(int, args.vocabularies.split(",")):
                    if words * length <= MOST_LOGITS:
                        yield f"{name} V={words} T={length}", replace(work, length=length, vocabulary=words)


def models(args: RoundingArguments) -> Iterator[Case]:
    """Yield whole models of random weights, in float32 and under autocast."""
    for name, work in works(args):
        model, batch = of_work(work)
        for precision in ("float32", "bf16"):
            for rule in args.rules.split(","):
                yield Case(f"{name} {precision}", model, losses(batch, precision=precision), rule)


def trained(args: RoundingArguments) -> Iterator[Case]:
    """Yield models on their way to the one example that they are trained on."""
    for name, work in works(args):
        if work.length not in (128, 224, 512) or work.vocabulary > 60_000 or work.hidden > 200:
            continue
        model, batch = of_work(work)
        found, optimizer = losses(batch), torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 3e-3)
        for step in range(1, args.steps + 1):
            optimizer.zero_grad()
            loss = found(model).sum()
            loss.backward()
            optimizer.step()
            is_last = float(loss.detach()) < 1e-4 or step == args.steps
            if step in (3, 10, 20, 40) or is_last:
                optimizer.zero_grad(set_to_none=True)
                for rule in args.rules.split(","):
                    yield Case(f"{name} after {step} steps, loss {float(loss.detach()):.0e}", model, found, rule)
            if is_last:
                break


def pairs(args: RoundingArguments) -> Iterator[Case]:
    """Yield two rows an example, as in DPO, whose gradients cancel."""
    for name, work in works(args):
        if work.head is not LM or work.length > 600 or work.vocabulary > 60_000:
            continue
        model, batch = of_work(work)
        same = batch["input_ids"].repeat(2, 1)
        other = same.clone()
        other[1, -1] = 9
        for rest, ids in ((1.0, other), (0.1, same), (1e-2, same), (1e-3, same), (0.0, other)):

            def of_rows(model: nn.Module, ids: Tensor = ids) -> Tensor:
                return summed_token_losses(model(input_ids=ids).logits, next_labels(ids))

            signs = torch.tensor([1.0, rest - 1])

            def of_views(model: nn.Module, of_rows: Any = of_rows, signs: Tensor = signs) -> Tensor:
                return of_rows(model) * signs

            def of_pair(model: nn.Module, of_views: Any = of_views) -> Tensor:
                return -F.logsigmoid(-0.1 * of_views(model).sum(0, keepdim=True))

            title = f"{name} pair to {rest:g}" if rest else f"{name} pair of one other word"
            for rule in args.rules.split(","):
                yield Case(title, model, of_pair, rule, rows_per_loss=2)
                yield Case(f"{title}, views", model, of_views, rule, views=2)


def heads(args: RoundingArguments) -> Iterator[Case]:
    """Yield heads at places of one label, whose hidden states cancel: its word's terms hide those of all others."""
    for vocabulary in (4_096, 8_192, 16_384, *map(int, args.vocabularies.split(","))):
        for length in (8, 16, 64):
            for spread in (0.1, 1.0) if vocabulary * length <= MOST_LOGITS else ():
                generator = torch.Generator().manual_seed(0)
                head = nn.Linear(64, vocabulary, bias=False)
                head.weight.data = torch.randn(vocabulary, 64, generator=generator) * spread / 8
                state = torch.randn(64, generator=generator)
                states = torch.stack([state, -state]).repeat(length // 2, 1)[None]

                def of_labels(head: nn.Module, states: Tensor = states) -> Tensor:
                    logits = head(states.to(head.weight))
                    return F.cross_entropy(logits[0], torch.zeros(states.shape[1], dtype=torch.long))[None]

                yield Case(f"head V={vocabulary} T={length} spread {spread:g}", head, of_labels, "ghost")


def factors(kind: str, time: int, p: int, q: int, rest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return gradients of the output and inputs, shapes (time, p) and (time, q), that cancel but for `rest`."""
    right, half = torch.randn(1, q, generator=generator), time // 2
    if kind == "hidden":  # a large number that cancels, behind which many small ones are lost
        left = torch.full((time, p), rest * 1e-3)
        left[:, 0] = torch.tensor([1.0, -1.0]).repeat(half)
        return left, right.repeat(time, 1)
    # The same of many kinds of places, whose large numbers cancel in products of two.
    kinds, sign = int(kind.rpartition(" ")[2]), torch.tensor([1.0, -1.0]).repeat(half)[:, None]
    left, large = sign * torch.full((time, p), rest * 1e-3), torch.ones(1, 1)
    while len(large) < kinds:
        large = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), large)
    left[:, :: p // kinds][:, :kinds] = large.repeat_interleave(time // kinds, 0) / kinds**0.5
    return left, sign * right


def layers(args: RoundingArguments) -> Iterator[Case]:
    """Yield single layers, searched over shapes, lengths, and how far terms cancel."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((64, 64), (768, 768), (3072, 768), (8192, 256), (16_384, 64), (50_257, 64))
    for time in (8, *map(int, args.lengths.split(","))):
        for p, q in shapes if args.scale == "full" else shapes[:1]:
            for kind in (kind for kind in KINDS if time * time * p <= 2e10 and (time >= 128 or not kind.endswith("32"))):
                for rest in (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)[:: 1 if time <= 512 else 2]:
                    for _ in range(args.seeds if time < 512 else 1):
                        yield layer(kind, time, p, q, rest, generator)


def layer(kind: str, time: int, p: int, q: int, rest: float, generator: torch.Generator) -> Case:
    """Return one layer without weights of its own, and its exact norm."""
    name = f"{kind} p={p} q={q} T={time} rest {rest:g}"
    left, right = factors(kind, time, p, q, rest, generator)
    linear = nn.Linear(q, p, bias=False)
    nn.init.zeros_(linear.weight)
    exact = float((left.double().mT @ right.double()).norm())
    return Case(name, linear, lambda model: (model(right[None]) * left).sum()[None], "ghost", exact=exact)


def padding(args: RoundingArguments) -> Iterator[dict[str, Any]]:
    """Yield by how much of C a contribution changes with places behind the example, whose inputs are not zero."""
    for name, work in WORKS.items():
        for length in map(int, args.lengths.split(",")):
            if work.head is IMAGE or work.hidden * length > 1e5:
                continue
            model, batch = of_work(replace(work, length=length))
            for rule in args.rules.split(","):
                exact, _ = clipped_sum(Case(name, model, losses(batch), rule), bound=1e30)
                alone: dict[str, Tensor] = {}
                for places in (0, 13, 200):
                    fill = {"input_ids": 1, "attention_mask": 0, "labels": -100}
                    padded = {
                        key: F.pad(each, (0, places), value=fill[key]) if each.ndim == 2 else each
                        for key, each in batch.items()
                    }
                    _, total = clipped_sum(Case(name, model, losses(padded), rule), bound=exact / 10)
                    alone = alone or total
                    change = size({key: each.double() - alone[key].double() for key, each in total.items()}) / (exact / 10)
                    yield {"case": f"{name} T={length} and {places}", "rule": rule, "change": change}


GROUPS: dict[str, Callable[[RoundingArguments], Iterator[Any]]] = {
    each.__name__: each for each in (models, trained, pairs, heads, layers, padding)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every case, and print a line for each."""
    with one_line_errors():
        (args,) = parse_args(RoundingArguments, argv=argv)
        groups = chosen("--groups", args.groups, GROUPS)
    torch.set_num_threads(args.threads)
    for group in groups:
        for case in GROUPS[group](args):
            result = {"group": group, **(measure(case) if isinstance(case, Case) else case), **settings(args)}
            append_json_line(result, args.output)
            if "change" in result:
                print(f"{result['case']}, {result['rule']}: changes by {result['change']:.1e} C", flush=True)
                continue
            print(f"{case.name}, {case.rule}: {result['contribution']:.7f} C, κ {result['kappa']:.3g}", flush=True)


if __name__ == "__main__":
    main()
