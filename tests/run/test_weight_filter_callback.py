"""Filtered weights against SciPy, the raw ones untouched, and a trainer that shows the one and goes on with the other."""

import numpy as np
import pytest
import scipy.signal
import torch
from transformers import BertForSequenceClassification

from doppler_hf import DopplerTrainer
from doppler_hf.filters import LowPassFilter
from doppler_hf.optim import WeightFilter
from doppler_hf.run.weight_filter_callback import WEIGHT_FILTER_NAME
from tests.support.optimizers import saved_and_loaded
from tests.support.trainers import trained, trainer_of, weights

FILTERS = ["momentum:beta=0.97", "butterworth:order=2,cutoff=0.1", "moving-average:taps=3", "none"]


def trajectory(steps=12, shapes=((3, 4), (5,)), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes] for _ in range(steps)
    ]


def followed(name, points):
    params = [torch.nn.Parameter(torch.zeros_like(point)) for point in points[0]]
    filtered = WeightFilter(params, LowPassFilter.parse(name))
    follow(filtered, params, points)
    return filtered, params


def follow(filtered, params, points):
    for point in points:
        for p, value in zip(params, point, strict=True):
            p.data.copy_(value)
        filtered.update()


def clones(params):
    return [p.detach().clone() for p in params]


def assert_equal(tensors, others):
    assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def applied_to(filtered, params):
    with filtered.applied():
        return clones(params)


# --- the filter -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "slice_size"), [(FILTERS[0], 2**17), (FILTERS[1], 5), (FILTERS[2], 2**17), (FILTERS[3], 5)]
)
def test_equals_scipy(name, slice_size, monkeypatch):
    monkeypatch.setattr("doppler_hf.optim.one_pass.CPU_SLICE", slice_size)
    low_pass, points = LowPassFilter.parse(name), trajectory()
    for steps in (1, 2, 12):
        filtered, params = followed(name, points[:steps])
        response = scipy.signal.lfilter(low_pass.b, low_pass.a, np.ones(steps))[-1]
        for index, result in enumerate(applied_to(filtered, params)):
            series = np.stack([point[index].numpy() for point in points[:steps]])
            expected = scipy.signal.lfilter(low_pass.b, low_pass.a, series, axis=0)[-1] / response
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_raw_weights_come_back_to_the_bit_even_after_an_error():
    filtered, params = followed(FILTERS[0], trajectory(dtype=torch.float32))
    raw = clones(params)
    seen = []

    def fail():
        with filtered.applied():
            seen.extend(clones(params))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert not torch.equal(seen[0], raw[0])
    assert_equal(params, raw)
    filtered.update()  # and it is not applied any more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_is_uninterrupted_to_the_bit(dtype):
    name = FILTERS[1]
    points = trajectory(dtype=dtype)
    whole, whole_params = followed(name, points)
    first, _ = followed(name, points[:5])
    with first.applied():
        saved = saved_and_loaded(first.state_dict())
    params = [torch.nn.Parameter(torch.zeros_like(point)) for point in points[0]]
    resumed = WeightFilter(params, LowPassFilter.parse(name))
    resumed.load_state_dict(saved)
    assert_equal(params, points[4])
    follow(resumed, params, points[5:])
    assert_equal(applied_to(resumed, params), applied_to(whole, whole_params))


# --- in a trainer ---------------------------------------------------------------------------------------------------------


class Seen(DopplerTrainer):
    """Remembers the weights that every evaluation saw."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = {}

    def prediction_step(self, *args, **kwargs):
        self.seen[self.state.global_step] = weights(self)
        return super().prediction_step(*args, **kwargs)


OPTIONS = dict(
    noise_seed=1, max_steps=6, low_pass_filter="momentum", save_strategy="steps", save_steps=2, eval_strategy="steps",
    eval_steps=1, learning_rate=0.05, report_train_loss="none",
)  # fmt: skip
FILTERED = OPTIONS | {"weight_filter": "momentum:beta=0.7"}


def saved_weights(folder):
    model = BertForSequenceClassification.from_pretrained(folder)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    stock = trained(trainer_of(tmp_path_factory.mktemp("stock"), cls=Seen, **OPTIONS))
    folder = tmp_path_factory.mktemp("filtered")
    filtered = trained(trainer_of(folder, cls=Seen, **FILTERED))
    return stock, filtered, folder / "out"


def test_evaluations_and_files_see_filtered_weights_and_training_goes_on_with_raw_ones(runs):
    stock, filtered, folder = runs
    raw = torch.stack([stock.seen[step] for step in range(1, 7)]).double().numpy()
    smooth = scipy.signal.lfilter([0.3], [1, -0.7], raw, axis=0)
    smooth /= scipy.signal.lfilter([0.3], [1, -0.7], np.ones(6))[:, None]
    for step in range(1, 7):
        np.testing.assert_allclose(filtered.seen[step], smooth[step - 1], rtol=1e-5, atol=1e-6)
    assert np.abs(smooth[5] - raw[5]).max() > 0.01
    for step in (2, 4, 6):
        assert torch.equal(saved_weights(folder / f"checkpoint-{step}"), filtered.seen[step])
        state = torch.load(folder / f"checkpoint-{step}" / WEIGHT_FILTER_NAME, weights_only=True)
        assert torch.equal(torch.cat([tensor.flatten() for tensor in state["raw"]]), stock.seen[step])
    assert torch.equal(weights(filtered), filtered.seen[6])


def test_resumed_equals_uninterrupted(runs, tmp_path):
    _, whole, folder = runs
    resumed = trainer_of(tmp_path, cls=Seen, **FILTERED)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert resumed.state.global_step == 6
    for step in (3, 6):
        assert torch.equal(resumed.seen[step], whole.seen[step])
    assert torch.equal(weights(resumed), weights(whole))


def test_a_checkpoint_without_raw_weights_is_refused(tmp_path):
    trainer_of(tmp_path, cls=Seen, **OPTIONS | {"max_steps": 2}).train()
    with pytest.raises(ValueError, match=r"There is no weight_filter\.pt in"):
        trainer_of(tmp_path, cls=Seen, **FILTERED).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
