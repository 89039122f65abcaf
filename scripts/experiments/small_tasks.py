"""Three tasks from scratch that a CPU trains in seconds, and a private training of them by the library's parts.

A CNN of 26,010 parameters and a perceptron of 269,322 on MNIST, and an MLP on the hashed words of SST-2 (their weights are
public; idf would be learnt from private data). The learning rate falls linearly to zero, or is constant where the weights
are filtered. A seed fixes initialization, draws and noise.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doppler_hf.filters import LowPassFilter, NoiseShape, auto_filter, auto_noise_shape
from doppler_hf.optim import DopplerOptimizer, WeightFilter
from doppler_hf.optim.state import Base
from doppler_hf.privacy import ClippedGradients, GaussianMechanism, PoissonSampler, default_delta, get_noise_multiplier
from doppler_hf.privacy.accounting import Releases
from doppler_hf.workloads.data_sources import load_glue, load_images

HASHED_WORDS = 4096


class Task(NamedTuple):
    """A task: `rows` of a split, by index, as the network's input; the labels of both splits; network and clip norm C."""

    rows: Callable[[str, np.ndarray], Tensor]
    labels: dict[str, Tensor]
    network: Callable[[], nn.Module]
    max_grad_norm: float


def load_mnist(data_dir: str, network: Callable[[], nn.Module]) -> Task:
    """Load MNIST for a network of 28 x 28 pixels."""
    splits = load_images("mnist", f"{data_dir}/mnist")
    pixels = {name: torch.from_numpy(np.stack([np.asarray(image) for image in splits[name]["image"]])) for name in splits}
    labels = {name: torch.tensor(splits[name]["label"]) for name in splits}
    return Task(lambda name, rows: pixels[name][rows, None].float() / 255, labels, network, max_grad_norm=1.0)


def cnn() -> nn.Module:
    """Return a small CNN, with tanh as is usual for private CNNs (Papernot et al. 2021)."""
    convolutions = (nn.Conv2d(1, 16, 8, stride=4, padding=2), nn.Tanh(), nn.Conv2d(16, 32, 4), nn.Tanh())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


def perceptron() -> nn.Module:
    """Return a network of three wide linear layers: for its accuracy it has many noisy coordinates."""
    hidden = (nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


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
    "mnist": (functools.partial(load_mnist, network=cnn), "test"),
    "mnist-perceptron": (functools.partial(load_mnist, network=perceptron), "test"),
    "sst2": (load_sst2, "validation"),
}


@functools.cache
def load(name: str, data_dir: str) -> Task:
    """Load a task, once."""
    return LOADERS[name][0](data_dir)


@functools.cache
def noise_multiplier(epsilon: float, num_examples: int, expected_batch_size: int, steps: int, bands: int) -> float:
    """Return σ for the default δ, computed once for all runs that share it."""
    turns = Releases.in_turns(1.0, expected_batch_size / num_examples, steps, groups=bands)
    delta = default_delta(num_examples)
    return get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=turns.sample_rate, steps=turns.steps)


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
    base: Base = "adam_bc",
    noise_shape: str = "white",
    floor: float = 0.3,
    weight_filter: str | None = None,
) -> dict[str, Any]:
    """Train once, and return the test accuracy and the numbers of the mechanism.

    Args:
        task_name: A key of `LOADERS`.
        data_dir: Folder with mnist/ and glue/sst2/.
        epsilon: ε, at the default δ.
        lr: The first learning rate.
        seed: Of initialization, draws and noise.
        steps: T.
        expected_batch_size: B.
        low_pass_filter: The filter, or auto.
        base: The base optimizer.
        noise_shape: The shape of the noise, or auto.
        floor: That of adam_bc, in units of the noise's variance.
        weight_filter: A filter on the weights, at a constant learning rate: a decay to zero averages by itself.
    """
    start, task = time.perf_counter(), load(task_name, data_dir)
    labels, size = task.labels["train"], expected_batch_size
    torch.manual_seed(seed)
    network = task.network()
    rates = [1 - step / steps if weight_filter is None else 1.0 for step in range(steps)]

    def noise_multiplier_of(bands: int) -> float:
        if bands > 1 and bands * size >= len(labels):
            return math.inf
        return noise_multiplier(epsilon, len(labels), size, steps, bands)

    if noise_shape == "auto":
        given = None if low_pass_filter == "auto" else LowPassFilter.parse(low_pass_filter)
        shape = auto_noise_shape(noise_multiplier_of, steps, learning_rates=rates, low_pass_filter=given)
    else:
        shape = NoiseShape.parse(noise_shape)
    if low_pass_filter == "auto":
        chosen = auto_filter(steps, learning_rates=rates, noise=shape)
    else:
        chosen = LowPassFilter.parse(low_pass_filter)
    sampler = PoissonSampler(num_examples=len(labels), expected_batch_size=size, groups=shape.bands, seed=seed)
    sigma = noise_multiplier(epsilon, len(labels), size, steps, shape.bands)
    mechanism = GaussianMechanism(
        noise_multiplier=sigma, max_grad_norm=task.max_grad_norm, expected_batch_size=size, shape=shape, seed=seed
    )
    settled = mechanism.noise_std(steps)
    optimizer = DopplerOptimizer(
        network.parameters(),
        lr=lr,
        low_pass_filter=chosen,
        base=base,
        noise_std=settled,
        floor=floor * settled**2 if base == "adam_bc" else None,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, steps - 1)])
    averaged = WeightFilter(network.parameters(), LowPassFilter.parse(weight_filter or "none"))
    with ClippedGradients(network, max_grad_norm=task.max_grad_norm, clipping="vanilla") as clipped:
        for step in range(steps):
            drawn = sampler.draw(step)
            if len(drawn):
                logits = network(task.rows("train", drawn))
                clipped.backward(nn.functional.cross_entropy(logits, labels[drawn], reduction="none"))
            gradients = mechanism.privatize(clipped.sums, step=step)
            for name, parameter in network.named_parameters():
                parameter.grad = gradients[name]
            optimizer.noise_std = mechanism.noise_std(step)
            optimizer.step()
            schedule.step()
            averaged.update()
            clipped.reset()
    split = LOADERS[task_name][1]
    with torch.no_grad(), averaged.applied():
        predicted = network(task.rows(split, np.arange(len(task.labels[split])))).argmax(dim=1)
    return {
        "accuracy": (predicted == task.labels[split]).double().mean().item(),
        "shape": str(shape),
        "filter": str(chosen),
        "sigma": sigma,
        "noise_std": settled,
        "max_grad_norm": task.max_grad_norm,
        "num_examples": len(labels),
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": time.perf_counter() - start,
    }
