"""One unit more moves the sum that reaches the mechanism by at most C, and no other; defects that break this are seen."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from doppler_hf.audit import NeighbourResult, neighbour_distances
from doppler_hf.audit.neighbours import neighbouring_draws
from doppler_hf.cli.check import verdict
from doppler_hf.privacy.clipping import clipped_gradients as clipping
from doppler_hf.privacy.ledger.ledger import LEDGER_NAME
from tests.audit.neighbour_cases import OF_CHOICES, OF_VIEWS, SETTINGS, USUAL, VIEWS, cases, result_of
from tests.support.beside import (
    LAYERS,
    OF_ITSELF,
    OF_OTHERS,
    behind_an_adapter,
    of_losses,
    with_gate,
    with_layer,
)
from tests.support.refusals import refused
from tests.support.tiers import further
from tests.support.tiny import OwnGenerator, Rows, hidden, pad, text_data, tiny_bert
from tests.support.trainers import TokenMean, trained, trainer_of, weights


class AlwaysDropped(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.3, self.training)


class DroppedByNumPy(torch.nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * torch.from_numpy(np.random.rand(len(x), 1) > 0.3).to(x)


def name_of(case):
    return ", ".join(str(value) for name, value in case.items() if value != USUAL[name] or name == "model")


def few():
    """Cases in which every value of every setting occurs, the first of those that add one."""
    missing = {(name, value) for name, values in SETTINGS.items() for value in values}
    found = []
    for case in cases():
        if missing & set(case.items()):
            missing -= set(case.items())
            found.append(case)
    assert not missing
    return found


CASES = [
    *((case, 1) for case in [*few(), *OF_CHOICES]),
    *further([(case, VIEWS) for case in OF_VIEWS], quick=[(case, VIEWS) for case in OF_VIEWS[::2]]),
]


@pytest.mark.parametrize(("case", "views"), CASES, ids=lambda part: name_of(part) if isinstance(part, dict) else part)
def test_one_unit_moves_the_sum_by_at_most_c(case, views):
    result = result_of(case, views=views)
    assert not result.contradicts_claim
    assert result.distances.max() <= 1.0 + 1e-6
    assert result.couplings.max() < 1e-12
    assert result.distances.min() > 0.1  # the unit is there, a user with the mean of up to twelve directions


def test_it_says_if_a_model_was_compared_in_evaluation_mode(tmp_path):
    """Numbers of NumPy cannot be held fixed for each row."""
    for chance, is_of_training in ((torch.nn.Identity(), True), (AlwaysDropped(), True), (DroppedByNumPy(), False)):
        model = tiny_bert()
        model.dropout = chance
        result = neighbour_distances(trainer_of(tmp_path / type(chance).__name__, model=model), pairs=2)
        assert not result.contradicts_claim
        assert result.is_of_training == is_of_training
        assert ("in training mode alone is tested when a training starts" in verdict(result)) != is_of_training


def test_a_record_counts_whole_however_well_it_is_fitted(tmp_path):
    """Or one that counts twice, with half its length, would be within C."""
    model = tiny_bert()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.9, 0.1]).log())
    data = Dataset.from_list([{**row, "labels": 0} for row in text_data()])
    result = neighbour_distances(trainer_of(tmp_path, model=model, data=data, clipping="automatic"), pairs=3)
    assert result.distances.min() > 0.99


class Augmented(Rows):
    """Tokens of an example are hidden at random, each time others."""

    def __getitem__(self, index):
        return hidden(self.rows[index])


def test_random_augmentation_is_held_for_the_others(tmp_path):
    options = dict(clipping="vanilla", per_sample_max_grad_norm=1e-3, gradient_accumulation_steps=2)
    trainer = trainer_of(tmp_path, model=tiny_bert().double(), data=Augmented(), **options)
    result = neighbour_distances(trainer, pairs=4, tolerance=1e-6)
    assert 0.9 < result.distances.max() <= 1.0 + 1e-6
    assert result.couplings.max() < 1e-12
    assert len({str(trainer.train_dataset[0]) for _ in range(16)}) > 1  # by itself it is as random as before


DRAWN = {
    "noise on the logits": lambda l, y, z: F.cross_entropy(z + torch.randn_like(z), y, reduction="none"),
    "one vector for all rows": lambda l, y, z: F.cross_entropy(z + torch.randn(z.shape[1]), y, reduction="none"),
    "one number for all rows, of NumPy": lambda l, y, z: l * np.random.rand(),
    "a random weight": lambda l, y, z: l * torch.rand(len(l)),
}
DRAWN_OF_OTHERS = {
    "pairs of examples": lambda l, y, z: 0.7 * l + 0.3 * F.cross_entropy(z, y[torch.randperm(len(y))], reduction="none"),
    "pairs in half of the batches": lambda l, y, z: (
        DRAWN_OF_OTHERS["pairs of examples"](l, y, z) if torch.rand(()) < 0.5 else l
    ),
    "noise, divided by the number": lambda l, y, z: DRAWN["noise on the logits"](l, y, z) / len(l),
}


@pytest.mark.parametrize("name", [*DRAWN, *DRAWN_OF_OTHERS])
def test_random_numbers_of_a_loss_are_held_for_the_others(tmp_path, name):
    """A correct loss that draws numbers is not taken for a defect, and a defect is not hidden by them."""
    options = dict(clipping="vanilla", per_sample_max_grad_norm=10.0, gradient_accumulation_steps=2)
    trainer = trainer_of(
        tmp_path, cls=of_losses((DRAWN | DRAWN_OF_OTHERS)[name]), model=tiny_bert(), grad_sample_self_check=False, **options
    )
    result = neighbour_distances(trainer, pairs=6)
    assert result.contradicts_claim == (name in DRAWN_OF_OTHERS)
    assert result.is_of_training


def test_numbers_for_each_token_of_padded_texts_are_left_to_the_evaluation_mode(tmp_path):
    """One more record may pad the others further, so that they would draw other numbers."""
    model = tiny_bert()
    model.bert.embeddings.dropout = AlwaysDropped()
    result = neighbour_distances(trainer_of(tmp_path, model=model, clipping="vanilla"), pairs=6)
    assert not result.contradicts_claim
    assert not result.is_of_training
    by_token = of_losses(lambda l, y, z: l)

    class ByToken(by_token):
        def compute_per_sample_loss(self, model, inputs):
            mask = inputs["attention_mask"]
            losses = super().compute_per_sample_loss(model, dict(inputs))
            return losses * (torch.rand(mask.shape) * mask).sum(1)

    with refused("random-loss", match="padding='max_length'"):
        neighbour_distances(trainer_of(tmp_path, cls=ByToken), pairs=2)

    def to_one_length(rows):
        return {
            name: F.pad(value, (0, 12 - value.shape[1])) if value.ndim > 1 else value for name, value in pad(rows).items()
        }

    assert not neighbour_distances(trainer_of(tmp_path, cls=ByToken, collator=to_one_length), pairs=2).contradicts_claim


def test_rows_are_known_though_workers_fetch_them_in_training(tmp_path):
    trainer = trainer_of(tmp_path, cls=of_losses(DRAWN["noise on the logits"]), dataloader_num_workers=1)
    assert not neighbour_distances(trainer, pairs=2).contradicts_claim
    assert trainer.args.dataloader_num_workers == 1


def test_views_of_a_record_have_numbers_of_their_own(tmp_path):
    options = dict(augmentation_multiplicity=2, data=Augmented())
    trainer = trainer_of(tmp_path, cls=of_losses(DRAWN["noise on the logits"]), model=tiny_bert(), **options)
    assert not neighbour_distances(trainer, pairs=3).contradicts_claim


class Carried(DopplerTrainer):
    """Something of a batch enters the losses of the next one."""

    last = 1.0

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs) * self.last
        self.last = float(inputs["input_ids"].float().mean()) / 25
        return losses


def test_a_loss_that_looks_at_others_is_seen(tmp_path):
    # Far below the bound nothing is clipped, so that all of it shows.
    options = dict(clipping="vanilla", per_sample_max_grad_norm=10.0, grad_sample_self_check=False)
    trainer = trainer_of(tmp_path, cls=TokenMean, model=tiny_bert().double(), per_device_train_batch_size=8, **options)
    result = neighbour_distances(trainer, pairs=4, tolerance=1e-6)
    assert result.couplings.max() > 1e-4
    assert result.contradicts_claim


def test_a_loss_that_keeps_something_is_refused(tmp_path):
    with refused("not-repeatable"):
        neighbour_distances(trainer_of(tmp_path, cls=Carried), pairs=2)


COUPLED = {
    **{f"a loss of {name}": (lambda name=name: dict(cls=of_losses(OF_OTHERS[name]))) for name in OF_OTHERS},
    **{f"a layer of {name}": (lambda name=name: dict(model=with_layer(LAYERS[name]))) for name in LAYERS},
    "behind a closed gate": lambda: dict(model=with_gate(gate=0.0)),
    "behind an adapter of zeros": lambda: dict(model=behind_an_adapter()),
}


@pytest.mark.parametrize("kind", further([*COUPLED], quick=[*COUPLED][::4] + [*COUPLED][-2:]))
def test_ranks_counts_and_capacities_contradict_the_claim_without_the_start_check(tmp_path, kind):
    # Far below the bound nothing is clipped: automatic clipping would take a factor out again, and so hides nothing.
    options = COUPLED[kind]() | dict(clipping="vanilla", per_sample_max_grad_norm=10.0, grad_sample_self_check=False)
    # One label is rare, so that there may be few of it. A batch above its expected size has two passes, in which more shows.
    options["max_tokens_per_micro_batch"] = 16 * max(map(len, text_data(96)["input_ids"]))
    data = Dataset.from_list([row | {"labels": int(index % 20 > 0)} for index, row in enumerate(text_data(96).to_list())])
    trainer = trainer_of(tmp_path, data=data, per_device_train_batch_size=16, gradient_accumulation_steps=1, **options)
    before = weights(trainer)
    result = neighbour_distances(trainer, pairs=8)
    assert result.contradicts_claim
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("name", ["focal", "a fixed threshold"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_its_own_row_contradicts_nothing(tmp_path, name, dtype):
    """All rows have one length, as they should in bfloat16."""
    data = Dataset.from_list([row for row in text_data(300).to_list() if len(row["input_ids"]) == 6])
    trainer = trainer_of(tmp_path, cls=of_losses(OF_ITSELF[name]), model=tiny_bert().to(dtype), data=data)
    result = neighbour_distances(trainer, pairs=8, tolerance=1e-4 if dtype == torch.float32 else 1e-2)
    assert not result.contradicts_claim


def test_twice_the_clip_norm_contradicts_the_claim(tmp_path, monkeypatch):
    right = clipping.clip_factors
    monkeypatch.setattr(clipping, "clip_factors", lambda norms, **options: 2.0 * right(norms, **options))
    clipped = dict(clipping="vanilla", per_sample_max_grad_norm=0.1)  # which is shorter than any gradient here
    result = neighbour_distances(trainer_of(tmp_path, grad_sample_self_check=False, **clipped), pairs=2)
    assert result.contradicts_claim
    assert result.distances.max() == pytest.approx(2.0, rel=0.05)


def test_the_trainer_is_left_as_it_was(tmp_path):
    trainer = trained(trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=2))
    before, head, files = weights(trainer), trainer.privacy.ledger.head, sorted(tmp_path.rglob("*"))
    attributes = {name: id(value) for name, value in vars(trainer).items()}
    neighbour_distances(trainer, pairs=2)
    assert torch.equal(weights(trainer), before)
    assert trainer.privacy.ledger.head == head
    assert sorted(tmp_path.rglob("*")) == files
    assert {name: id(value) for name, value in vars(trainer).items()} == attributes
    assert trainer.model.train().training
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert trainer.privacy.ledger.steps_run == 4
    assert (tmp_path / "out" / LEDGER_NAME).exists()


def test_draws_come_in_threes_and_begin_with_the_extremes(tmp_path):
    run = trainer_of(tmp_path).privacy
    draws = neighbouring_draws(run, pairs=3, size=5)
    assert len(draws) == 9
    for others, both, alone in zip(*[iter(draws)] * 3, strict=True):
        assert len(set(others)) == 5
        assert set(both) - set(others) == set(alone)
        assert not set(alone) & set(others)
    assert run.sampler.lengths[draws[2][0]] == run.sampler.lengths.max()
    assert run.sampler.lengths[draws[5][0]] == run.sampler.lengths.min()


def test_what_is_extrapolated_counts_no_rounding():
    result = NeighbourResult(
        distances=np.array([0.9, 0.9]), couplings=np.array([1e-7, 0.02]), draw_size=10,
        expected_batch_size=100, tolerance=1e-6, rounding=1e-6,
    )  # fmt: skip
    assert result.extrapolated.tolist() == pytest.approx([0.9, 1.08])
    assert result.contradicts_claim


def drawing(examples):
    batch = pad(examples)
    return batch | {"input_ids": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.2, 4)}


def test_what_cannot_be_tested_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    with refused("out-of-range", match="pairs"):
        neighbour_distances(trainer, pairs=0)
    for size in (0, 24):
        with refused("out-of-range", match="draw_size"):
            neighbour_distances(trainer, draw_size=size)
    trainer.data_collator = drawing
    with refused("random-collator"):
        neighbour_distances(trainer)
    trainer.data_collator = pad
    drawn = trainer_of(tmp_path, cls=of_losses(lambda l, y, z: l * torch.from_numpy(np.random.rand(len(l)))))
    with refused("random-loss", match="Draw them with torch"):
        neighbour_distances(drawn)
    trainer.train_dataset = OwnGenerator()
    with refused("generator-of-its-own"):
        neighbour_distances(trainer)
    with refused("no-privacy-to-test", match="disable_dp"):
        neighbour_distances(trainer_of(tmp_path, disable_dp=True, noise_multiplier=None))
