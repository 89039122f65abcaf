"""Two tasks from scratch that a CPU trains in seconds, and a private training of them by the library's parts.

A CNN of 26,010 parameters on MNIST, and an MLP on the hashed words of SST-2 (their weights are public; idf would be learnt
from private data). The learning rate falls linearly to zero. A seed fixes initialization, draws and noise.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import ClippedGradients, GaussianMechanism, PoissonSampler, default_delta, get_noise_multiplier
from doppler_hf.workloads.data_sources import load_glue, load_images

HASHED_WORDS = 4096


class Task(NamedTuple):
    """A task: `rows` of a split, by index, as the network's input; the labels of both splits; network and clip norm C."""

    rows: Callable[[str, np.ndarray], Tensor]
    labels: dict[str, Tensor]
    network: Callable[[], nn.Module]
    max_grad_norm: float


def load_mnist(data_dir: str) -> Task:
    """Load MNIST, and a small CNN for it."""
    splits = load_images("mnist", f"{data_dir}/mnist")
    pixels = {name: torch.from_numpy(np.stack([np.asarray(image) for image in splits[name]["image"]])) for name in splits}
    labels = {name: torch.tensor(splits[name]["label"]) for name in splits}
    return Task(lambda name, rows: pixels[name][rows, None].float() / 255, labels, cnn, max_grad_norm=1.0)


def cnn() -> nn.Module:
    """Return a small CNN, with tanh as is usual for private CNNs (Papernot et al. 2021)."""
    convolutions = (nn.Conv2d(1, 16, 8, stride=4, padding=2), nn.Tanh(), nn.Conv2d(16, 32, 4), nn.Tanh())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


def load_sst2(data_dir: str) -> Task:
    """Load SST-2 as hashed counts of words, each sentence of norm 1, and an MLP for them."""
    from sklearn.feature_extraction.text import HashingVectorizer

    splits = load_glue("sst2", f"{data_dir}/glue/sst2")
    words = {name: HashingVectorizer(n_features=HASHED_WORDS).transform(splits[name]["sentence"]) for name in splits}

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(HASHED_WORDS, 32), nn.ReLU(), nn.Linear(32, 2))

    labels = {name: torch.tensor(splits[name]["label"]) for name in splits}
    return Task(lambda name, rows: torch.from_numpy(words[name][rows].toarray()).float(), labels, network, max_grad_norm=0.3)


LOADERS = {
    "mnist": (load_mnist, "test"),
    "sst2": (load_sst2, "validation"),
}


@functools.cache
def load(name: str, data_dir: str) -> Task:
    """Load a task, once."""
    return LOADERS[name][0](data_dir)


@functools.cache
def noise_multiplier(epsilon: float, num_examples: int, expected_batch_size: int, steps: int) -> float:
    """Return σ for the default δ, computed once for all runs that share it."""
    rate, delta = expected_batch_size / num_examples, default_delta(num_examples)
    return get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps)


def train(
    task_name: str,
    data_dir: str,
    *,
    epsilon: float,
    lr: float,
    seed: int,
    steps: int,
    expected_batch_size: int,
    low_pass_filter: str,
    floor: float,
) -> dict[str, Any]:
    """Train once with DP-AdamBC, and return the test accuracy and the numbers of the mechanism.

    Args:
        task_name: A key of `LOADERS`.
        data_dir: Folder with mnist/ and glue/sst2/.
        epsilon: ε, at the default δ.
        lr: The first learning rate.
        seed: Of initialization, draws and noise.
        steps: T.
        expected_batch_size: B.
        low_pass_filter: The filter.
        floor: In units of the noise's variance.
    """
    start, task = time.perf_counter(), load(task_name, data_dir)
    labels, size = task.labels["train"], expected_batch_size
    torch.manual_seed(seed)
    network = task.network()
    sampler = PoissonSampler(num_examples=len(labels), expected_batch_size=size, seed=seed)
    sigma = noise_multiplier(epsilon, len(labels), size, steps)
    mechanism = GaussianMechanism(
        noise_multiplier=sigma, max_grad_norm=task.max_grad_norm, expected_batch_size=size, seed=seed
    )
    noise_std = mechanism.noise_std(0)
    chosen = LowPassFilter.parse(low_pass_filter)
    optimizer = DopplerOptimizer(
        network.parameters(), lr=lr, low_pass_filter=chosen, base="adam_bc", noise_std=noise_std, floor=floor * noise_std**2
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    with ClippedGradients(network, max_grad_norm=task.max_grad_norm, clipping="vanilla") as clipped:
        for step in range(steps):
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
    split = LOADERS[task_name][1]
    with torch.no_grad():
        predicted = network(task.rows(split, np.arange(len(task.labels[split])))).argmax(dim=1)
    return {
        "accuracy": (predicted == task.labels[split]).double().mean().item(),
        "sigma": sigma,
        "noise_std": noise_std,
        "max_grad_norm": task.max_grad_norm,
        "num_examples": len(labels),
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": time.perf_counter() - start,
    }
