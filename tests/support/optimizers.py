"""What the tests of the optimizers share: gradients, a loop over them, and states that were saved."""

import io

import numpy as np
import torch


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


def assert_resumes_to_the_bit(optimizer_of, start: torch.nn.Parameter, grads: np.ndarray) -> None:
    """Interrupt a loop after 17 steps, save, load into a new optimizer, and go on: nothing differs from the whole."""
    whole, half = (torch.nn.Parameter(start.detach().clone()) for _ in range(2))
    uninterrupted, interrupted = optimizer_of(whole), optimizer_of(half)
    expected = trajectory(uninterrupted, whole, grads)
    trajectory(interrupted, half, grads[:17])

    resumed_p = torch.nn.Parameter(half.detach().clone())
    resumed = optimizer_of(resumed_p)
    resumed.load_state_dict(saved_and_loaded(interrupted.state_dict()))
    assert_same(resumed.state_dict(), interrupted.state_dict())
    np.testing.assert_array_equal(trajectory(resumed, resumed_p, grads[17:]), expected[17:])
    assert_same(resumed.state_dict(), uninterrupted.state_dict())


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
