"""What the tests of the optimizers share: gradients, a loop over them, and states that were saved."""

import io

import numpy as np
import torch

from doppler_hf.optim import DopplerOptimizer

OF_GROUPS = ("rank", "update_proj_gap", "scale", "orthogonal")


def doppler_optimizer(params, **options):
    """The optimizer, with options of groups in every group that has none of its own."""
    of_groups = {name: options.pop(name) for name in OF_GROUPS if name in options}
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    return DopplerOptimizer([of_groups | group for group in groups], **options)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(*shapes, dtype=torch.float64):
    return [torch.nn.Parameter(normal(*shape, seed=index, dtype=dtype)) for index, shape in enumerate(shapes)]


def gradients(steps: int = 40, size: int = 6, seed: int = 0) -> np.ndarray:
    """White noise on a slow drift, over several scales, so that neither the floor nor eps is idle nor alone."""
    rng = np.random.default_rng(seed)
    scales = np.logspace(-3, 0, size)
    return scales * (rng.standard_normal((steps, size)) + 0.5 * np.sin(np.arange(steps) / 20)[:, None])


def trajectory(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, grads: np.ndarray) -> np.ndarray:
    iterates = []
    for grad in grads:
        p.grad = torch.tensor(grad, dtype=p.dtype)
        optimizer.step()
        iterates.append(p.detach().double().numpy().copy())
    return np.stack(iterates)


def saved_and_loaded(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(left, right) -> None:
    """The same numbers to the bit, in the same containers and dtypes."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right
