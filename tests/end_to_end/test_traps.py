"""The ways in which private trainers of the field have gone wrong, on the trainer as a user runs it.

Those that other tests hold: 14, noise scaled wrongly over processes, test_distributed.py; 3, a record twice in a step,
test_sampling.py; 4, gradients that follow the length of neighbours, test_transformers_losses.py; 6 and 7, noise and budget
of a resumed run, test_noise_shaping.py and test_trained_again.py; 8, uncounted steps, and 12, empty draws, test_trainer.py;
11, logs of raw gradients, and 19, generators in a checkpoint, test_what_is_written.py; 13, coins that processes share, and
18, coins that follow the public seed, test_sampling.py and test_secret_coins.py; 15, layers without a gradient of each
example, test_fixes.py; 16, arguments that couple examples, test_from_trainer.py; 17, choices that ε does not cover,
test_model_card.py.
False-alarm rates are stated.
"""

import pytest
import torch

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import AllocationSampler, PrivacyLedger, get_epsilon
from tests.support.tiny import text_data
from tests.support.trainers import NoSignal, On, Recorder, trained
from tests.support.trainers import checked_trainer_of as trainer_of


class Counting(DopplerTrainer):
    """Every example's gradient is 1 in one coordinate, so that B·p.grad there counts the examples of a step."""

    def compute_per_sample_loss(self, model, inputs):
        return model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).logits[:, 0]


def count(tmp_path, **overrides):
    """Train without noise or effective clipping, and return the number of examples of each step."""
    counts = []
    note = On(pre_optimizer_step=lambda model, **_: counts.append(8 * model.classifier.bias.grad[0].item()))
    options = dict(cls=Counting, noise_multiplier=0.0, noise_seed=7, clipping="vanilla", per_sample_max_grad_norm=1e6)
    trained(trainer_of(tmp_path, callbacks=[note], **(options | overrides)))
    return counts


def test_trap_01_ranks_share_the_data_out(tmp_path, monkeypatch):
    trainer, shards = trainer_of(tmp_path), []
    for rank in range(3):
        monkeypatch.setattr(type(trainer.args), "world_size", 3)
        monkeypatch.setattr(type(trainer.args), "process_index", rank)
        monkeypatch.setattr(trainer, "_run", None)  # the next process begins its own
        sampler = trainer.get_train_dataloader().batch_sampler
        assert (type(sampler), sampler.sample_rate) == (AllocationSampler, 1.0)  # B = 4 × 2 × 3 of 24
        shards += sampler.draw(0).tolist()
    assert sorted(shards) == list(range(24))  # all of it, and nothing twice


def test_trap_02_what_the_accountant_is_told_is_read_off_the_sampler(tmp_path, monkeypatch):
    init = AllocationSampler.__init__
    monkeypatch.setattr(
        AllocationSampler, "__init__", lambda self, **options: init(self, **options | {"expected_batch_size": 6})
    )
    trainer = trainer_of(tmp_path, max_steps=2)  # arguments that say 8, and a sampler that does otherwise
    trainer.train()
    assert PrivacyLedger.load(tmp_path / "out").statement.sample_rate == 0.25
    mechanism = dict(noise_multiplier=0.99**0.5, sample_rate=0.25, steps=2, delta=24**-1.1)
    assert trainer.privacy.epsilon() == pytest.approx(get_epsilon(**mechanism), rel=1e-9)


def test_trap_05_the_noise_does_not_follow_the_public_seed(tmp_path):
    runs, drawn = [], []
    for run in range(2):
        recorder = Recorder()
        trainer = trained(trainer_of(tmp_path / str(run), cls=NoSignal, callbacks=[recorder], seed=42, max_steps=2))
        runs.append(torch.stack(recorder.gradients))
        drawn.append([tuple(batch) for batch in trainer.get_train_dataloader().batch_sampler])
    assert drawn[0] != drawn[1]  # equal with a probability below 1e-12
    # In float32 a single equal pair has a probability below 1e-6.
    assert not torch.any(runs[0] == runs[1])


@pytest.mark.parametrize("accumulation", [1, 4])
def test_traps_09_and_10_no_piece_of_a_draw_leaks_into_the_next_step_and_nothing_scales_the_loss(tmp_path, accumulation):
    # Two epochs, whose last group a shuffling loader would leave short; each step is a whole draw.
    pieces = dict(per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation)
    counts = count(tmp_path, data=text_data(25), max_steps=8, **pieces)
    sampler = AllocationSampler(num_examples=25, expected_batch_size=8, seed=7)
    assert counts == pytest.approx([len(sampler.draw(step)) for step in range(8)], abs=1e-3)
