"""What docs/reference/libraries.md says is done about other libraries, as far as no other test holds it."""

import numpy as np
import pytest
import scipy.signal
import torch
from accelerate.data_loader import DataLoaderStateMixin
from peft import get_peft_model

from doppler_hf.filters.low_pass_filter import LowPassFilter, filtered, impulse_blocks
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy.accounting import get_epsilon
from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.run.planning.filter_and_noise import learning_rates_of
from tests.support.adapters import config_of
from tests.support.refusals import refused
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import arguments, checked_trainer_of, trainer_of


@pytest.mark.parametrize("size", [5, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_weights_in_half_precision_are_moved_on_a_cpu_and_rounded_once(base, dtype, size):
    """Where torch's fused SGD leaves them."""
    start, gradient = torch.linspace(0.5, 1.0, size), torch.linspace(0.5, 1.5, size)
    weight, exact = torch.nn.Parameter(start.to(dtype)), torch.nn.Parameter(start.to(dtype).float())
    for each in (weight, exact):
        each.grad = gradient.clone().to(each.dtype)
        DopplerOptimizer([each], 0.1, base=base, low_pass_filter=LowPassFilter.parse("none")).step()
    assert bool((weight != start.to(dtype)).all())
    torch.testing.assert_close(weight.float(), exact, rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("schedule", ["greedy", "reduce_lr_on_plateau"])
def test_no_filter_and_shape_follow_from_a_schedule_of_evaluations(tmp_path, schedule):
    args = arguments(tmp_path, lr_scheduler_type=schedule, eval_strategy="steps", eval_steps=1)
    assert learning_rates_of(args, steps=6) is None
    assert learning_rates_of(arguments(tmp_path), steps=6) is not None


@pytest.mark.parametrize("name", ["butterworth:order=2,cutoff=0.01", "momentum:beta=0.99", "first-order-v1", "b=0.5,0.5"])
def test_a_filter_in_blocks_is_the_filter_of_the_whole_and_an_empty_input_is_empty(name):
    low_pass_filter = LowPassFilter.parse(name)
    b, a = low_pass_filter.b, low_pass_filter.a
    response = np.concatenate([*impulse_blocks(b, a)])
    np.testing.assert_allclose(response, scipy.signal.lfilter(b, a, np.eye(1, len(response))[0]), rtol=1e-12, atol=0.0)
    assert filtered(b, a, []).shape == (0,)


@pytest.mark.parametrize("config", [None, {"even_batches": False}, {"dispatch_batches": True}])
def test_batches_of_the_run_are_not_handled_by_accelerate(tmp_path, config):
    """It drops, fills up or repeats rows of batches of random size."""
    trainer = trainer_of(tmp_path, data=text_data(40), **({} if config is None else {"accelerator_config": config}))
    loader = trainer.get_train_dataloader()
    assert type(loader) is PrivateLoader
    handed = trainer.accelerator.prepare(loader)
    assert isinstance(handed, DataLoaderStateMixin)
    with refused("another-loader"):
        trainer.privacy.refuse_another_loader(handed)
    trainer.privacy.refuse_another_loader(loader)


@pytest.mark.parametrize("delta", [1e-11, 1e-15, 0.0])
def test_a_delta_at_which_other_accountants_fail_is_refused(delta):
    with refused("out-of-range", match="1e-10"):
        get_epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=10, delta=delta)
    assert get_epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=10, delta=1e-10) < 20


def test_an_adapter_whose_router_reads_other_rows_is_refused(tmp_path):
    model = get_peft_model(tiny_bert(), config_of("LilyConfig", task_type="SEQ_CLS", r=2, target_modules=["query"]))
    with refused("no-per-sample-gradient", match="lily"):
        checked_trainer_of(tmp_path, model=model, max_steps=1).train()
    assert not list(tmp_path.rglob("privacy_ledger.json"))
