"""The filter whose taps follow the gradients: against a plain NumPy loop, for a known autocorrelation, and resumed."""

import math

import numpy as np
import pytest
import torch

from doppler_hf.filters import moving_average
from doppler_hf.optim import DopplerOptimizer, OptimalFIR
from doppler_hf.optim.adaptive_fir import found_anew
from tests.support.optimizers import saved_and_loaded

BASES = ["sgd", "adam", "adam_bc"]
SHAPES = [(4, 5), (7,), (3, 6)]  # the last one is a group of its own
FIR = OptimalFIR(taps=4, update_gap=5)


def normal(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


def gradient(shape, *, index, step):
    """A signal that turns slowly, and noise of standard deviation 0.5."""
    angle = step / (6.0 if index < 2 else 2.0)
    signal = normal(*shape, seed=index) * np.cos(angle) + normal(*shape, seed=50 + index) * np.sin(angle)
    return signal + 0.5 * normal(*shape, seed=1000 * (index + 1) + step)


def has_gradient(index, step):
    """The second parameter begins at the third step and pauses later."""
    return index != 1 or (step >= 3 and step % 7 != 0)


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(torch.from_numpy(normal(*shape, seed=90 + i)).to(dtype)) for i, shape in enumerate(SHAPES)]


def optimizer_of(params, **options):
    constants = {"lr": 0.05, "low_pass_filter": FIR, "base": "adam_bc", "noise_std": 0.5, "weight_decay": 0.1, "beta2": 0.98}
    return DopplerOptimizer([{"params": params[:2]}, {"params": params[2:]}], **constants | options)


def run(optimizer, params, steps):
    for step in steps:
        for index, p in enumerate(params):
            p.grad = None
            if has_gradient(index, step):
                # In memory of torch's, as the order of a sum may follow from where its numbers lie.
                p.grad = torch.tensor(gradient(p.shape, index=index, step=step), dtype=p.dtype)
        optimizer.step()


def plain_loop(steps, *, base, noise_std=0.5, eps=0.01, floor=1e-3):
    """Whole histories in NumPy. Returns the weights of every step, and the taps that each group had in it."""
    weights = [normal(*shape, seed=90 + i) for i, shape in enumerate(SHAPES)]
    seen, moments = [[] for _ in SHAPES], [np.zeros(shape) for shape in SHAPES]
    taps, iterates, used = {0: np.full(4, 0.25), 1: np.full(4, 0.25)}, [], []
    groups = {0: [0, 1], 1: [2]}
    for step in steps:
        used.append({group: values.tolist() for group, values in taps.items()})
        for group, members in groups.items():
            for i in members:
                if not has_gradient(i, step):
                    continue
                seen[i].append(gradient(SHAPES[i], index=i, step=step))
                pairs = list(zip(taps[group], reversed(seen[i]), strict=False))
                m_hat = sum(tap * g for tap, g in pairs) / sum(tap for tap, _ in pairs)
                moments[i] = 0.98 * moments[i] + 0.02 * seen[i][-1] ** 2
                v = moments[i] / (1 - 0.98 ** len(seen[i]))
                if base == "adam_bc":
                    m_hat = m_hat / np.sqrt(np.maximum(v - noise_std**2, floor))
                elif base == "adam":
                    m_hat = m_hat / np.maximum(np.sqrt(v), eps)
                weights[i] = weights[i] - 0.05 * (0.1 * weights[i] + m_hat)
            if max(len(seen[i]) for i in members) % 5 == 0:
                taps[group] = estimated([seen[i] for i in members], taps[group], noise_std)
        iterates.append([weight.copy() for weight in weights])
    return iterates, used


def estimated(histories, taps, noise_std):
    sums, counts = np.zeros(4), np.zeros(4)
    for history in histories:
        for end in range(len(history)):
            for lag in range(min(4, end + 1)):
                fade = 0.998 ** (len(history) - 1 - end)
                sums[lag] += fade * (
                    np.vdot(history[end], history[end - lag]) - (lag == 0) * history[end].size * noise_std**2
                )
                counts[lag] += fade * history[end].size
    means = sums / counts
    if means[0] <= 2 * noise_std**2 * np.sqrt(2 / counts[0]):
        return taps
    correlation = np.clip(means / means[0], 0, 1)
    return correlation / correlation.sum()


@pytest.mark.parametrize("slice_size", [2**17, 3])
@pytest.mark.parametrize("base", BASES)
def test_equals_a_plain_loop(base, slice_size, monkeypatch):
    monkeypatch.setattr("doppler_hf.optim.update.CPU_SLICE", slice_size)
    expected, used = plain_loop(range(1, 24), base=base)
    params = parameters()
    optimizer = optimizer_of(params, base=base, eps=0.01, floor=1e-3 if base == "adam_bc" else None)
    for step in range(1, 24):
        taps = [group["taps"] for group in optimizer.param_groups]
        np.testing.assert_allclose(taps, [used[step - 1][0], used[step - 1][1]], rtol=1e-10, atol=1e-12)
        run(optimizer, params, [step])
        for p, weight in zip(params, expected[step - 1], strict=True):
            np.testing.assert_allclose(p.detach().numpy(), weight, rtol=1e-10, atol=1e-12)
    first, last = used[0], used[-1]
    assert all(first[group] != last[group] for group in (0, 1))
    assert last[0] != last[1]


def test_pure_noise_leaves_the_taps_as_they_are():
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    optimizer = DopplerOptimizer([p], 0.1, low_pass_filter=FIR, noise_std=2.0)
    for step in range(50):
        p.grad = torch.from_numpy(2.0 * normal(1000, seed=step))
        optimizer.step()
    # The seeds are fixed. With others one of the ten looks may well exceed two standard errors: each does in 2.3 %.
    assert optimizer.param_groups[0]["taps"] == [0.25] * 4
    zeros = torch.nn.Parameter(torch.zeros(3))
    optimizer = DopplerOptimizer([zeros], 0.1, low_pass_filter=FIR)  # nothing at all, and no noise to compare it with
    for _ in range(10):
        zeros.grad = torch.zeros(3)
        optimizer.step()
    assert optimizer.param_groups[0]["taps"] == [0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("done", [3, 10])  # before the first estimate, and right after the second
def test_resuming_is_uninterrupted_to_the_bit(dtype, done):
    params = parameters(dtype)
    whole = optimizer_of(params)
    run(whole, params, range(1, done + 1))
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = optimizer_of(resumed_params)
    resumed.load_state_dict(saved_and_loaded(whole.state_dict()))
    assert resumed.state[resumed_params[0]]["products"].dtype == torch.float64
    full = torch.float32 if dtype == torch.bfloat16 else dtype
    assert resumed.state[resumed_params[0]]["filter_states"][0].dtype == full
    for optimizer, some in ((whole, params), (resumed, resumed_params)):
        run(optimizer, some, range(done + 1, 24))
    for one, other in zip(params, resumed_params, strict=True):
        assert torch.equal(one, other)
    assert [group["taps"] for group in whole.param_groups] == [group["taps"] for group in resumed.param_groups]
    assert whole.param_groups[0]["taps"] != [0.25] * 4


@pytest.mark.parametrize(("power", "found"), [(0.98, False), (1.02, True)])
def test_taps_wait_until_the_signal_exceeds_two_standard_errors_at_every_lag(power, found):
    # The mean of n squares of noise of variance 4 has the standard deviation 4·√(2/n).
    pairs, noise_std = 200.0, 2.0
    mean = power * 2 * noise_std**2 * math.sqrt(2 / pairs)
    state = {"products": torch.tensor([mean, 0.5 * mean]) * pairs, "pairs": [pairs, pairs]}
    taps = found_anew([0.5, 0.5], [state], noise_std=noise_std)
    assert taps == pytest.approx([2 / 3, 1 / 3] if found else [0.5, 0.5])
    of_one_lag = {"products": torch.tensor([100.0, 0.0]), "pairs": [5.0, 0.0]}
    assert found_anew([0.7, 0.3], [of_one_lag], noise_std=1.0) == [0.7, 0.3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"taps": 1}, r"taps must be a whole number of at least 2, got 1\."),
        ({"taps": 4, "update_gap": 0}, "update_gap must be a whole number of at least 1, got 0"),
    ],
)
def test_what_is_no_number_of_taps_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OptimalFIR(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rank": 2},
            "rank must be None for optimal-fir:taps=4,update_gap=5, which compares gradients of different steps, got 2",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(parameters(), **options)


@pytest.mark.parametrize(
    ("saved_filter", "own_filter", "message"),
    [
        (FIR, OptimalFIR(taps=3), "filter has 4 taps that the run finds, this optimizer's 3 taps that the run finds"),
        (FIR, moving_average(4), "filter has 4 taps that the run finds, this optimizer's fixed coefficients"),
        (moving_average(4), FIR, "filter has fixed coefficients, this optimizer's 4 taps that the run finds"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_filter_is_refused(saved_filter, own_filter, message):
    params, others = parameters(), parameters()
    saving, loading = optimizer_of(params, low_pass_filter=saved_filter), optimizer_of(others, low_pass_filter=own_filter)
    run(saving, params, range(1, 7))
    with pytest.raises(ValueError, match=message):
        loading.load_state_dict(saving.state_dict())
    assert not loading.state
