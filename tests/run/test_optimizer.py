"""The optimizer's filter is the one of the arguments, and the start says so."""

import pytest
import torch

from doppler_hf.optim import OptimalFIR
from tests.support.trainers import arguments, trained, trainer_of


def test_the_taps_of_an_optimal_fir_are_the_optimizers(tmp_path, capsys):
    trainer = trained(trainer_of(tmp_path, low_pass_filter="optimal-fir: update_gap=7, taps=4", max_steps=3))
    assert trainer.optimizer.optimizer.low_pass_filter == OptimalFIR(taps=4, update_gap=7)
    assert "optimal-fir:taps=4,update_gap=7" in capsys.readouterr().out
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_named_filter_stands_in_the_summary_with_its_noise_gain(tmp_path, capsys):
    trainer_of(tmp_path, low_pass_filter="momentum", max_steps=3).train()
    assert "momentum, noise power × 0.0526" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["auto:order=2", "optimal-fir", "optimal-fir:taps=many", "optimal-fir:taps=1", "butterworth:order=2"]
)
def test_what_is_no_filter_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="taps must be" if name.endswith("taps=1") else name.partition(":")[0]):
        arguments(tmp_path, low_pass_filter=name)
