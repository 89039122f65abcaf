"""The best floor for DP-AdamBC: paired private runs over floor, learning rate and seed, on two tasks.

    python -m scripts.experiments.tune_floor --data_dir data --output out/floor.jsonl --tasks mnist
    python -m scripts.experiments.tune_floor --data_dir data --output out/floor.jsonl --tasks sst2 --steps 200

DP-AdamBC divides by √max(v̂ - noise_std², floor), and the default floor is a fraction of noise_std². The floor changes the
effective step size, so every fraction gets a learning rate of its own: the best by the mean accuracy of the tuning seeds, on
a grid of factor 2 that is widened until the best is inside. What is reported are other seeds at that learning rate. Runs are
paired: a seed fixes initialization, draws and noise, and two fractions differ in nothing else. Tasks: a CNN of 26,010
parameters on MNIST, and an MLP on the hashed words of SST-2 (their weights are public; idf would be learnt from private
data), both from scratch, with the filter `momentum` and a learning rate that falls linearly to zero.

Every run is one line of JSON, written as it ends; what the file holds already is not run again. `data_dir` holds
`mnist/` and `glue/sst2/`, each with its splits as parquet files.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import ClippedGradients, GaussianMechanism, PoissonSampler, default_delta, get_noise_multiplier
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.data_sources import load_glue, load_images
from scripts.bench.measure import append_json_line

HASHED_WORDS = 4096


@dataclass
class FloorArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with mnist/ and glue/sst2/."})
    output: str = field(metadata={"help": "File of results, a line of JSON for every run; what it holds is not run again."})
    tasks: list[str] = field(default_factory=lambda: ["mnist", "sst2"], metadata={"help": "Of mnist and sst2."})
    epsilons: list[float] = field(default_factory=lambda: [1.0, 8.0], metadata={"help": "Privacy budgets ε."})
    fractions: list[float] = field(
        default_factory=lambda: [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0],
        metadata={
            "help": "Floors in units of noise_std². The search of each begins at the learning rate of the one before."
        },
    )
    lr: float = field(default=4e-3, metadata={"help": "Centre of the first grid of learning rates."})
    tune_seeds: list[int] = field(default_factory=lambda: [100, 101], metadata={"help": "Seeds that choose the rate."})
    report_seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "Seeds in the table."})
    steps: int = field(default=100, metadata={"help": "Steps T of a run."})
    expected_batch_size: int = field(default=1024, metadata={"help": "Expected size B of a draw."})
    threads: int = field(default=1, metadata={"help": "torch's threads."})


@dataclass(frozen=True)
class Run:
    """All that determines a run's result."""

    task: str
    epsilon: float
    fraction: float
    lr: float
    seed: int
    steps: int
    expected_batch_size: int


class Task(NamedTuple):
    """A task: `rows` of a split, by index, as the network's input; the labels of both splits; network and clip norm C."""

    rows: Callable[[str, np.ndarray], Tensor]
    labels: dict[str, Tensor]
    network: Callable[[], nn.Module]
    max_grad_norm: float


def load_mnist(data_dir: str) -> Task:
    """Load MNIST, and a small CNN for it, with tanh as is usual for private CNNs (Papernot et al. 2021)."""
    splits = load_images("mnist", f"{data_dir}/mnist")
    pixels = {name: torch.from_numpy(np.stack([np.asarray(image) for image in splits[name]["image"]])) for name in splits}

    def network() -> nn.Module:
        convolutions = (nn.Conv2d(1, 16, 8, stride=4, padding=2), nn.Tanh(), nn.Conv2d(16, 32, 4), nn.Tanh())
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))

    labels = {name: torch.tensor(splits[name]["label"]) for name in splits}
    return Task(lambda name, rows: pixels[name][rows, None].float() / 255, labels, network, max_grad_norm=1.0)


def load_sst2(data_dir: str) -> Task:
    """Load SST-2 as hashed counts of words, each sentence of norm 1, and an MLP for them."""
    from sklearn.feature_extraction.text import HashingVectorizer

    splits = load_glue("sst2", f"{data_dir}/glue/sst2")
    words = {name: HashingVectorizer(n_features=HASHED_WORDS).transform(splits[name]["sentence"]) for name in splits}

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(HASHED_WORDS, 32), nn.ReLU(), nn.Linear(32, 2))

    labels = {name: torch.tensor(splits[name]["label"]) for name in splits}
    return Task(lambda name, rows: torch.from_numpy(words[name][rows].toarray()).float(), labels, network, max_grad_norm=0.3)


LOADERS = {"mnist": (load_mnist, "test"), "sst2": (load_sst2, "validation")}


@functools.cache
def load(name: str, data_dir: str) -> Task:
    """Load a task, once."""
    return LOADERS[name][0](data_dir)


@functools.cache
def noise_multiplier(epsilon: float, num_examples: int, expected_batch_size: int, steps: int) -> float:
    """Return σ for the default δ, computed once for all runs that share it."""
    rate = expected_batch_size / num_examples
    delta = default_delta(num_examples)
    return get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps)


def train(run: Run, task: Task) -> dict[str, Any]:
    """Train once, and return the test accuracy and the numbers of the mechanism."""
    start = time.perf_counter()
    labels, size = task.labels["train"], run.expected_batch_size
    sampler = PoissonSampler(num_examples=len(labels), expected_batch_size=size, seed=run.seed)
    sigma = noise_multiplier(run.epsilon, len(labels), size, run.steps)
    mechanism = GaussianMechanism(
        noise_multiplier=sigma, max_grad_norm=task.max_grad_norm, expected_batch_size=size, seed=run.seed
    )
    torch.manual_seed(run.seed)
    network = task.network()
    optimizer = DopplerOptimizer(
        network.parameters(),
        lr=run.lr,
        low_pass_filter=PAPER_FILTERS["momentum"],
        base="adam_bc",
        noise_std=mechanism.noise_std(0),
        floor=run.fraction * mechanism.noise_std(0) ** 2,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / run.steps)
    with ClippedGradients(network, max_grad_norm=task.max_grad_norm, clipping="vanilla") as clipped:
        for step in range(run.steps):
            drawn = sampler.draw(step)
            if len(drawn):
                logits = network(task.rows("train", drawn))
                clipped.backward(nn.functional.cross_entropy(logits, labels[drawn], reduction="none"))
            gradients = mechanism.privatize(clipped.sums, step=step)
            for name, parameter in network.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
            schedule.step()
            clipped.reset()
    split = LOADERS[run.task][1]
    with torch.no_grad():
        predicted = network(task.rows(split, np.arange(len(task.labels[split])))).argmax(dim=1)
    return {
        "accuracy": (predicted == task.labels[split]).double().mean().item(),
        "sigma": sigma,
        "noise_std": mechanism.noise_std(0),
        "max_grad_norm": task.max_grad_norm,
        "num_examples": len(labels),
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": time.perf_counter() - start,
    }


def read(path: str) -> dict[Run, float]:
    """Return the accuracy of every run that the file holds."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {Run(**{key.name: row[key.name] for key in fields(Run)}): row["accuracy"] for row in map(json.loads, lines)}


def accuracies(done: dict[Run, float], args: FloorArguments, seeds: Sequence[int], **setting: Any) -> np.ndarray:
    """Return the accuracy of each seed at one setting, shape (seeds,). Missing runs are added to `done` and the file."""
    runs = [Run(**setting, seed=seed, steps=args.steps, expected_batch_size=args.expected_batch_size) for seed in seeds]
    for run in runs:
        if run not in done:
            result = train(run, load(run.task, args.data_dir))
            append_json_line(asdict(run) | result | {"settings": asdict(args)}, args.output)
            done[run] = result["accuracy"]
            print(f"{run}: accuracy {done[run]:.4f}, {result['seconds']:.1f} s", flush=True)
    return np.array([done[run] for run in runs])


def tune(done: dict[Run, float], args: FloorArguments, *, centre: float, **setting: Any) -> float:
    """Return the best learning rate, from three around `centre` and as many more as bring the best of them inside."""
    lrs = [centre / 2, centre, centre * 2]
    while True:
        means = np.array([accuracies(done, args, args.tune_seeds, lr=lr, **setting).mean() for lr in lrs])
        ties = np.flatnonzero(means == means.max())
        best = int(ties[len(ties) // 2])
        if 0 < best < len(lrs) - 1:
            return lrs[best]
        lrs = [lrs[0] / 2, *lrs] if best == 0 else [*lrs, lrs[-1] * 2]


def table(reported: dict[float, np.ndarray], lrs: dict[float, float]) -> str:
    """Return the rows for one task and ε, in percent, with the paired difference from the fraction of the best mean.

    Args:
        reported: Fraction → accuracy of each seed, the same seeds for all.
        lrs: Fraction → learning rate.
    """
    best = max(reported, key=lambda fraction: reported[fraction].mean())
    lines = ["| fraction | lr | accuracy | difference from the best ± s.e. |", "|---|---|---|---|"]
    for fraction, accuracy in reported.items():
        paired = 100 * (accuracy - reported[best])
        difference = "best" if fraction == best else f"{paired.mean():+.2f} ± {paired.std(ddof=1) / len(paired) ** 0.5:.2f}"
        mean, std = 100 * accuracy.mean(), 100 * accuracy.std(ddof=1)
        lines.append(f"| {fraction:g} | {lrs[fraction]:.2g} | {mean:.2f} ± {std:.2f} | {difference} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, report, and print a table for every task and ε."""
    with one_line_errors():
        (args,) = parse_args(FloorArguments, argv=argv)
        for name in args.tasks:
            if name not in LOADERS:
                raise ValueError(f"--tasks must be of {', '.join(LOADERS)}, got {name!r}.")
        if len(args.report_seeds) < 2 or not args.tune_seeds or {*args.tune_seeds} & {*args.report_seeds}:
            raise ValueError(
                f"--tune_seeds must have one seed or more and --report_seeds two or more, with none in both, got "
                f"{args.tune_seeds} and {args.report_seeds}."
            )
        for name in args.tasks:
            load(name, args.data_dir)
    torch.set_num_threads(args.threads)
    done = read(args.output)
    tables = []
    for name in args.tasks:
        for epsilon in args.epsilons:
            lrs, reported, centre = {}, {}, args.lr
            for fraction in args.fractions:
                setting = {"task": name, "epsilon": epsilon, "fraction": fraction}
                lrs[fraction] = centre = tune(done, args, centre=centre, **setting)
                reported[fraction] = accuracies(done, args, args.report_seeds, lr=centre, **setting)
            tables.append(f"{name}, ε = {epsilon:g}, {len(args.report_seeds)} seeds\n\n{table(reported, lrs)}\n")
    print("", *tables, sep="\n")


if __name__ == "__main__":
    main()
