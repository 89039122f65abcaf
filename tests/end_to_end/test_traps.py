"""The ways in which private trainers of the field have gone wrong, one test each, on the trainer as a user runs it.

Trap 4, gradients that follow the length of neighbours, is in tests/privacy/test_transformers_losses.py; 8, uncounted steps,
and 12, empty draws, in test_trainer.py; 14, noise scaled wrongly over processes, in test_distributed.py; 16, arguments
that couple examples, in test_from_trainer.py.
False-alarm rates are stated.
"""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback, set_seed

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import AllocationSampler, PrivacyLedger, get_epsilon
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from doppler_hf.run.model_card import privacy_section
from tests.support.tiny import numbered, pad, text_data, tiny_bert
from tests.support.trainers import NoSignal, Recorder, trained
from tests.support.trainers import checked_trainer_of as trainer_of


class Counting(DopplerTrainer):
    """Every example's gradient is 1 in one coordinate, so that B·p.grad there counts the examples of a step."""

    def compute_per_sample_loss(self, model, inputs):
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"][:, 0].tolist()]
        return model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).logits[:, 0]


class Counts(Recorder):
    """Keeps what each step's gradient says about the number of its examples."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(8 * model.classifier.bias.grad[0].item())


def count(tmp_path, **overrides):
    """Train without noise or effective clipping; return the trainer and the number of examples of each step."""
    counts = Counts()
    options = dict(cls=Counting, noise_multiplier=0.0, noise_seed=7, clipping="vanilla", per_sample_max_grad_norm=1e6)
    return trained(trainer_of(tmp_path, callbacks=[counts], **(options | overrides))), counts.gradients


def sizes(steps, **overrides):
    """What the sampler draws under the same test seed, without the trainer."""
    sampler = AllocationSampler(**(dict(num_examples=24, expected_batch_size=8, seed=7) | overrides))
    return [len(sampler.draw(step)) for step in range(steps)]


def test_trap_01_the_loader_never_passes_through_prepare_and_ranks_share_the_data_out(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    prepared = []
    prepare = trainer.accelerator.prepare
    monkeypatch.setattr(trainer.accelerator, "prepare", lambda *objects, **options: (prepared.extend(objects), prepare(*objects, **options))[1])  # noqa: E501  # fmt: skip
    trainer.train()
    assert prepared
    assert not any(isinstance(item, torch.utils.data.DataLoader) for item in prepared)
    shards = []
    for rank in range(3):
        monkeypatch.setattr(type(trainer.args), "world_size", 3)
        monkeypatch.setattr(type(trainer.args), "process_index", rank)
        monkeypatch.setattr(trainer, "_run", None)  # the next process begins its own
        sampler = trainer.get_train_dataloader().batch_sampler
        assert (type(sampler), sampler.sample_rate) == (AllocationSampler, 1.0)  # B = 4 × 2 × 3 of 24
        shards.append(sampler.draw(0).tolist())
    assert sorted(itertools.chain(*shards)) == list(range(24))  # all of it, and nothing twice


def test_trap_02_what_the_accountant_is_told_is_read_off_the_sampler_and_the_sampler_is_random(tmp_path, monkeypatch):
    _, counts = count(tmp_path / "a", max_steps=12)
    assert counts == pytest.approx(sizes(12), abs=1e-3)
    assert len(set(sizes(12))) > 3  # a shuffle would give eight each time
    init = AllocationSampler.__init__
    monkeypatch.setattr(
        AllocationSampler, "__init__", lambda self, **options: init(self, **options | {"expected_batch_size": 6})
    )
    trainer = trainer_of(tmp_path / "b", max_steps=2)  # arguments that say 8, and a sampler that does otherwise
    trainer.train()
    assert PrivacyLedger.load(tmp_path / "b" / "out").statement.sample_rate == 0.25
    mechanism = dict(noise_multiplier=1.0, sample_rate=0.25, steps=2, delta=24**-1.1)
    assert trainer.privacy.epsilon() == pytest.approx(get_epsilon(**mechanism), rel=1e-9)


def test_trap_03_an_example_contributes_at_most_once_a_step_however_a_step_is_cut(tmp_path):
    trainer = trainer_of(
        tmp_path, cls=Counting, data=numbered(), max_steps=10, per_device_train_batch_size=3, gradient_accumulation_steps=4,
        grad_sample_self_check=False,
    )  # fmt: skip
    steps, boundaries = [], []

    class Boundary(Recorder):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            boundaries.append(len(trainer.seen))

    trainer.add_callback(Boundary())
    trainer.train()
    start = 0
    for stop in boundaries:
        steps.append(list(itertools.chain(*trainer.seen[start:stop])))
        start = stop
    # Four draws of 3 of 24 each would repeat one of their examples in a step with probability 0.93.
    assert len(steps) == 10
    assert all(len(set(step)) == len(step) for step in steps)


def test_trap_05_the_noise_does_not_follow_the_public_seed(tmp_path):
    runs, drawn = [], []
    for run in range(2):
        recorder = Recorder()
        trainer = trained(trainer_of(tmp_path / str(run), cls=NoSignal, callbacks=[recorder], seed=42, max_steps=2))
        runs.append(torch.stack(recorder.gradients))
        drawn.append([tuple(batch) for batch in trainer.get_train_dataloader().batch_sampler])
    assert drawn[0] != drawn[1]  # equal with a probability below 1e-12
    # In float32 a single equal pair has a probability below 1e-6. What an attacker may replay is in test_noise_attack.py.
    assert not torch.any(runs[0] == runs[1])


def test_trap_06_resuming_draws_new_noise_and_keeps_the_account(tmp_path):
    options = dict(cls=NoSignal, max_steps=4, save_strategy="steps", save_steps=2)
    first, second = Recorder(), Recorder()
    trainer_of(tmp_path, callbacks=[first], **options).train()
    resumed = trainer_of(tmp_path, callbacks=[second], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert len(second.gradients) == 2
    assert not torch.any(torch.stack(second.gradients) == torch.stack(first.gradients[2:]))
    assert resumed.privacy.ledger.steps_run == 6  # four of the first run, two once more
    spent = get_total_epsilon([Releases(1.0, 1 / 3, 4), Releases(1.0, 1 / 3, 2)], delta=24**-1.1)
    assert resumed.privacy.epsilon() == pytest.approx(spent, rel=1e-9)


def test_trap_07_training_stops_before_the_budget_is_overrun(tmp_path, capsys):
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=8, save_strategy="steps", save_steps=4)
    trainer = trainer_of(tmp_path, **options)

    class Crash(Recorder):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    trainer.add_callback(Crash())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    last = tmp_path / "out" / "checkpoint-4"
    assert f"trainer.train(resume_from_checkpoint=True) goes on from {last}." in capsys.readouterr().out
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    ledger = resumed.privacy.ledger
    sigma = resumed.private_run.statement.noise_multiplier
    unclamped = get_epsilon(noise_multiplier=sigma, sample_rate=1 / 3, steps=ledger.steps_run, delta=24**-1.1)
    assert ledger.epsilon_of_fixed_length() == pytest.approx(unclamped, rel=1e-9)
    assert resumed.privacy.epsilon() == 3.0
    assert (
        unclamped <= 3.0 < get_epsilon(noise_multiplier=sigma, sample_rate=1 / 3, steps=ledger.steps_run + 1, delta=24**-1.1)
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_traps_09_and_10_no_piece_of_a_draw_leaks_into_the_next_step_and_nothing_scales_the_loss(tmp_path, accumulation):
    # Two epochs, whose last group a shuffling loader would leave short; each step is a whole draw.
    pieces = dict(per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation)
    _, counts = count(tmp_path, data=text_data(25), max_steps=8, **pieces)
    assert counts == pytest.approx(sizes(8, num_examples=25), abs=1e-3)


def test_trap_11_the_logged_norm_is_that_of_the_private_gradient(tmp_path):
    recorder = Recorder()
    trainer = trained(trainer_of(tmp_path, callbacks=[recorder], max_steps=3))
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx([gradient.norm().item() for gradient in recorder.gradients], rel=1e-4)


def test_trap_13_every_process_flips_its_own_coins(tmp_path, monkeypatch):
    masks, trainer = [], trainer_of(tmp_path, data=text_data(400), seed=42)
    for rank in range(2):
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        monkeypatch.setattr(type(trainer.args), "process_index", rank)
        monkeypatch.setattr(trainer, "_run", None)  # the next process begins its own
        sampler = trainer.get_train_dataloader().batch_sampler
        drawn = [sampler.draw(step) for step in range(100)]
        masks.append(np.array([np.isin(np.arange(rank, 400, 2), draw) for draw in drawn]))
    assert abs(np.corrcoef(masks[0].ravel(), masks[1].ravel())[0, 1]) < 6 / math.sqrt(masks[0].size)  # 2e-9


def test_trap_15_what_has_no_per_sample_gradient_is_refused_by_name_and_adapters_move(tmp_path):
    class Borrowing(type(tiny_bert())):
        def forward(self, input_ids, attention_mask, labels=None):
            output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
            output.logits = output.logits + self.bert.pooler.dense.bias[:2]  # which no layer rule sees
            return output

    model = Borrowing(tiny_bert().config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"pooler\.dense"):
        trainer_of(tmp_path, model=model).train()
    assert all(map(torch.equal, before, model.parameters()))
    adapted = get_peft_model(tiny_bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    start = {name: p.detach().clone() for name, p in adapted.named_parameters() if "lora_" in name}
    trainer_of(tmp_path, model=adapted).train()
    assert start
    assert not any(torch.equal(p, start[name]) for name, p in adapted.named_parameters() if name in start)


def test_trap_17_ledger_and_card_say_that_choices_on_evaluation_data_are_not_covered(tmp_path):
    trainer_of(tmp_path, max_steps=2).train()
    ledger = PrivacyLedger.load(tmp_path / "out")
    for text in ("\n".join(ledger.not_covered), privacy_section(ledger)):
        for choice in ("best checkpoint", "early stopping", "hyper-parameter search"):
            assert choice in text


def drawing(examples):
    """Draw a number from each generator for every batch, where the collator runs."""
    numbers = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)
    return pad(examples) | {"drawn": numbers}


class Drawn(DopplerTrainer):
    """Keeps what the collator and the training step have drawn."""

    def compute_per_sample_loss(self, model, inputs):
        inputs = dict(inputs)
        here = [torch.rand(()).item(), np.random.rand(), random.random()]
        self.numbers = [*getattr(self, "numbers", []), *inputs.pop("drawn").tolist(), *here]
        return super().compute_per_sample_loss(model, inputs)


@pytest.mark.parametrize("workers", [0, 1])
def test_trap_18_dropout_and_random_collators_do_not_follow_the_public_seed(tmp_path, workers):
    in_training = []
    for _ in range(2):
        trainer = trainer_of(
            tmp_path, cls=Drawn, seed=11, max_steps=4, gradient_accumulation_steps=1, dataloader_num_workers=workers
        )
        trainer.data_collator = drawing
        set_seed(11)
        trainer.train()
        in_training += trainer.numbers[-12:]
    assert len(set(in_training)) == len(in_training)


def test_trap_18_the_callers_generators_come_back(tmp_path):
    trainer = trainer_of(tmp_path, model=tiny_bert(hidden_dropout_prob=0.1), max_steps=2)
    set_seed(11)
    before = torch.get_rng_state(), random.getstate()
    trainer.train()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Generators(TrainerCallback):
    """Keeps the state of each global generator at every step."""

    def __init__(self):
        self.states = []

    def on_step_begin(self, args, state, control, **kwargs):
        numpy_words = np.random.get_state()[1].tobytes()
        self.states.append((torch.get_rng_state().numpy().tobytes(), numpy_words, random.getstate()))


def test_trap_19_no_checkpoint_tells_how_many_numbers_were_drawn(tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=2, noise_multiplier=1.0)
    trainer_of(tmp_path, **options).train()
    saved = tmp_path / "out" / "checkpoint-2"
    assert not list(saved.glob("rng_state*"))
    states = []
    for _ in range(2):
        resumed = trainer_of(tmp_path, callbacks=[watch := Generators()], **options)
        resumed.train(resume_from_checkpoint=str(saved))
        states.append(watch.states[0])
    assert all(one != other for one, other in zip(*states, strict=True))
