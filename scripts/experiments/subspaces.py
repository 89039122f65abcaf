"""The share of the gradient that GaLore's basis captures if it is computed from noise: private or filtered gradients.

    python -m scripts.experiments.subspaces --data_dir data --output out/subspaces.jsonl

A multilayer perceptron is trained privately on MNIST, its first matrix (784 × 256) in a subspace of rank r that is renewed
every `update_proj_gap` steps. After each renewal the gradient without clipping and noise of 4,096 training examples is
projected too; what is reported is its captured energy ‖PᵀG‖²/‖G‖², beside that of the best basis of this rank and that of
a random one, which is r/256. This gradient is not private and goes nowhere else. `data_dir` holds `mnist/` with its splits
as parquet files. Every run is a line of JSON.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.galore import PROJECTOR_SOURCES, find_basis
from doppler_hf.privacy import AllocationSampler, ClippedGradients, GaussianMechanism, default_delta, get_noise_multiplier
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.data_sources import load_images
from scripts.bench.measure import append_json_line


@dataclass
class SubspaceArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with mnist/."})
    output: str | None = field(default=None, metadata={"help": "File to which every run is added as a line of JSON."})
    epsilons: list[float] = field(default_factory=lambda: [1.0, 8.0], metadata={"help": "Privacy budgets ε."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of initialization."})
    low_pass_filter: str = field(default="second-order", metadata={"help": "Name or coefficients of the filter."})
    projector: str = field(default="randomized", metadata={"help": "How a basis is found: svd, randomized or warm."})
    rank: int = field(default=16, metadata={"help": "Rank r."})
    update_proj_gap: int = field(default=20, metadata={"help": "Steps from one basis to the next."})
    steps: int = field(default=120, metadata={"help": "Steps T of a run."})
    expected_batch_size: int = field(default=1024, metadata={"help": "Expected size B of a draw."})
    lr: float = field(default=1e-3, metadata={"help": "Learning rate of adam_bc."})


def tensors(data_dir: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images, shape (N, 784), and labels of every split."""
    splits = load_images("mnist", f"{data_dir}/mnist")
    return {
        name: (
            torch.tensor(np.stack([np.asarray(image) for image in split["image"]])).flatten(1) / 255,
            torch.tensor(split["label"]),
        )
        for name, split in splits.items()
    }


def perceptron() -> nn.Sequential:
    """Return a network of 203,530 parameters."""
    return nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10))


def losses_of(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return one loss per image."""
    return nn.functional.cross_entropy(network(images), labels, reduction="none")


def clean_gradient(weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """Return the ordinary gradient of the mean loss with respect to the first matrix."""
    network = perceptron()
    network.load_state_dict(weights)
    return torch.autograd.grad(losses_of(network, images, labels).mean(), network[0].weight)[0]


def train(
    data: dict[str, tuple[Tensor, Tensor]], args: SubspaceArguments, *, epsilon: float, seed: int, source: str
) -> dict:
    """Train once, and return the share that every basis but the first captured, and the test accuracy."""
    images, labels = data["train"]
    torch.manual_seed(seed)
    network = perceptron()
    matrix = network[0].weight
    sampler = AllocationSampler(num_examples=len(labels), expected_batch_size=args.expected_batch_size)
    sigma = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=default_delta(len(labels)),
        sample_rate=sampler.sample_rate,
        steps=args.steps,
    )
    mechanism = GaussianMechanism(noise_multiplier=sigma, max_grad_norm=1.0, expected_batch_size=args.expected_batch_size)
    rest = [p for p in network.parameters() if p is not matrix]
    optimizer = DopplerOptimizer(
        [{"params": [matrix], "rank": args.rank, "update_proj_gap": args.update_proj_gap}, {"params": rest}],
        lr=args.lr,
        low_pass_filter=LowPassFilter.parse(args.low_pass_filter),
        base="adam_bc",
        noise_std=mechanism.noise_std(0),
        projector=args.projector,
        projector_source=source,
    )
    captured, best = [], []
    with ClippedGradients(network, max_grad_norm=1.0) as clipped:
        for step in range(args.steps):
            drawn = sampler.draw(step)
            clipped.backward(losses_of(network, images[drawn], labels[drawn]))
            gradients = mechanism.privatize(clipped.sums, step=step)
            for name, p in network.named_parameters():
                p.grad = gradients[name]
            clipped.reset()
            is_renewed = step % args.update_proj_gap == 0
            twin = copy.deepcopy(network.state_dict()) if is_renewed else None
            optimizer.step()
            if twin is not None and step > 0:
                clean = clean_gradient(twin, images[:4096], labels[:4096])
                bases = (optimizer.state[matrix]["basis"], find_basis(clean, args.rank, projector="svd"))
                shares = [float((basis.T @ clean).square().sum() / clean.square().sum()) for basis in bases]
                captured.append(shares[0])
                best.append(shares[1])
    with torch.no_grad():
        accuracy = float((network(data["test"][0]).argmax(dim=1) == data["test"][1]).float().mean())
    return {"captured": captured, "best": best, "accuracy": accuracy, "sigma": sigma}


def main(argv: Sequence[str] | None = None) -> None:
    """Train every combination, and print a line for each."""
    with one_line_errors():
        (args,) = parse_args(SubspaceArguments, argv=argv)
        LowPassFilter.parse(args.low_pass_filter)
        data = tensors(args.data_dir)
    for epsilon in args.epsilons:
        for source in PROJECTOR_SOURCES:
            runs = [train(data, args, epsilon=epsilon, seed=seed, source=source) for seed in args.seeds]
            for seed, run in zip(args.seeds, runs, strict=True):
                append_json_line({"epsilon": epsilon, "source": source, "seed": seed} | run | asdict(args), args.output)
            captured, best = (np.mean([run[name] for run in runs]) for name in ("captured", "best"))
            accuracies = [100 * run["accuracy"] for run in runs]
            print(
                f"ε = {epsilon:g}, from the {source:8}: {100 * captured:.1f} % of the gradient's energy (the best basis "
                f"{100 * best:.1f} %, a random one {100 * args.rank / 256:.1f} %); accuracy {np.mean(accuracies):.1f} ± "
                f"{np.std(accuracies, ddof=1) if len(runs) > 1 else 0:.1f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
