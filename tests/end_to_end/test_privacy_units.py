"""A unit of several examples is drawn whole or not at all, and contributes at most C. False-alarm rates are stated."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_hf.privacy import AllocationSampler, ClippedGradients, PrivacyLedger, get_epsilon
from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.cutting import Cut
from doppler_hf.privacy.batching.micro_batches import DrawnExamples, PrivateLoader, collate_piece
from doppler_hf.privacy.batching.sampling import Piece, example_weight
from tests.support.refusals import refused
from tests.support.tiny import pad, pad_numbered, text_data, tiny_bert
from tests.support.tolerances import RAISED
from tests.support.trainers import Recorder, trainer_of

UNITS = [0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 5, 5, 6, 7]  # eight units of one to four examples
SIZES = np.bincount(UNITS)


def sampler_of(**overrides):
    return AllocationSampler(**(dict(num_examples=len(UNITS), expected_batch_size=2, units=UNITS) | overrides))


def users(num_examples=24, seed=0):
    """Texts of users who have one to five of them."""
    names = [f"user {number}" for number in (0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)]
    return text_data(num_examples, seed=seed).add_column("user_id", names[:num_examples])


# --- the sampler ----------------------------------------------------------------------------------------------------------


def test_a_unit_comes_whole_and_units_are_independent():
    sampler, steps = sampler_of(), 4000
    member = np.zeros((steps, len(UNITS)), dtype=bool)
    for step in range(steps):
        member[step, sampler.draw(step)] = True
    first = member[:, [UNITS.index(unit) for unit in range(8)]]
    for unit in range(8):
        assert np.all(member[:, np.array(UNITS) == unit] == first[:, [unit]])
    # Binomial(4000, 2/8) counts, and correlations between units; z beyond 6 has probability 2e-9, 36 of them 7e-8.
    assert np.all(np.abs(first.sum(axis=0) - steps / 4) < 6 * math.sqrt(steps * 3 / 16))
    correlations = np.corrcoef(first.T)[np.triu_indices(8, 1)]
    assert np.all(np.abs(correlations) < 6 / math.sqrt(steps))


def test_what_the_accountant_is_told_counts_units():
    sampler = sampler_of(expected_batch_size=3)
    assert (sampler.num_units, sampler.sample_rate, sampler.steps_per_epoch) == (8, 3 / 8, 3)


def test_a_limit_takes_that_many_of_a_unit_at_random():
    sampler, steps = sampler_of(max_examples_per_unit=2, expected_batch_size=8), 3000
    counts = np.zeros(len(UNITS), dtype=int)
    for step in range(steps):
        drawn = sampler.draw(step)
        assert len(set(drawn.tolist())) == len(drawn)
        assert np.array_equal(np.bincount(np.array(UNITS)[drawn]), np.minimum(SIZES, 2))
        counts[drawn] += 1
    for unit in (2, 5):  # four and three examples, two at a time; χ² at 1e-6 each
        expected = np.full(SIZES[unit], steps * 2 / SIZES[unit])
        # Two of k at a time are less spread than independent picks, so the χ² statistic shrinks by (k - 2)/(k - 1).
        statistic = np.sum((counts[np.array(UNITS) == unit] - expected) ** 2 / expected) / (1 - 1 / (SIZES[unit] - 1))
        assert statistic < scipy.stats.chi2.ppf(1 - 1e-6, SIZES[unit] - 1)
    assert np.all(counts[SIZES[UNITS] <= 2] == steps)


def test_processes_share_the_units_out():
    shards = [sampler_of(expected_batch_size=8, rank=rank, world_size=3).draw(0).tolist() for rank in range(3)]
    assert sorted(sum(shards, [])) == list(range(len(UNITS)))
    owners = [{UNITS[index] for index in shard} for shard in shards]
    assert sum(map(len, owners)) == 8  # each unit has one owner


def test_a_draw_of_units_keeps_equal_shares_together_and_is_sorted_by_length():
    lengths = np.random.default_rng(0).integers(1, 50, size=len(UNITS))
    sampler = sampler_of(expected_batch_size=8, lengths=lengths)
    drawn = sampler.draw(0)
    counts = sampler.counts[drawn]
    assert np.all(np.diff(counts) >= 0)
    assert len(np.unique(counts)) > 2
    assert all(np.all(np.diff(lengths[drawn[counts == count]]) >= 0) for count in np.unique(counts))


# --- the column -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 16])
def test_shares_stay_with_their_examples(max_tokens):
    data = text_data(10)
    counts = np.array([4] * 4 + [2] * 4 + [1] * 2)
    order = sorted(range(10), key=lambda index: (counts[index], len(data[index]["input_ids"])))
    cut = Cut(24, max_tokens)
    passes = cut.passes(10, lengths=lengths_of(data)[order], counts=counts[order])
    for examples in (data, data.to_list()):
        drawn = DrawnExamples(examples, counts, numbers=None)
        batches = collate_piece(drawn.__getitems__(Piece(order, step=5, passes=passes)), collator=pad, cut=cut)
        assert batches.step == 5
        shares = [example_weight(count) for count in counts[order].tolist()]
        assert [batch.weight for batch in batches for _ in range(batch.size)] == shares
        assert {batch.rows_each for batch in batches} == {1}
        assert torch.cat([batch.inputs["labels"] for batch in batches]).tolist() == [data[i]["labels"] for i in order]
        assert len(batches) == 3 if max_tokens is None else len(batches) > 3
    assert collate_piece(Piece([], step=0), collator=pad, cut=cut) == []


@pytest.mark.parametrize(("max_tokens", "views"), [(None, 1), (80, 2)])
def test_a_unit_whose_mean_is_clipped_is_in_one_micro_batch(max_tokens, views):
    data, users_of = text_data(24).add_column("number", list(range(24))), np.array([*range(8), *range(8, 12), *range(12)])
    sampler = AllocationSampler(
        num_examples=24, expected_batch_size=12, pieces=2, lengths=lengths_of(data), units=users_of, seed=0,
        keeps_units_whole=True,
    )  # fmt: skip
    loader = PrivateLoader(data, sampler=sampler, collator=pad_numbered, cut=Cut(9, max_tokens, views))
    seen = []
    for batch in itertools.chain.from_iterable(loader):
        assert batch.weight == 1.0
        assert max_tokens is None or batch.inputs["input_ids"].numel() <= max_tokens
        numbers = batch.inputs["number"].view(-1, batch.rows_each)  # each row a clipped gradient
        for rows in users_of[numbers.numpy()]:
            assert len(set(rows)) == 1
        for rows in numbers.tolist():
            assert len(rows) == views * len(set(rows)) == views * np.sum(users_of == users_of[rows[0]])
            seen.append(users_of[rows[0]])
    assert sorted(seen) == list(range(12))  # each user is one clipped gradient


# --- sensitivity ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_adding_a_whole_user_changes_the_sum_by_at_most_c(data):
    clipping, clip_unit_mean = data.draw(st.sampled_from(["vanilla", "automatic"])), data.draw(st.booleans())
    engine = data.draw(st.sampled_from(["book_keeping", "opacus"]))
    granularity = data.draw(st.sampled_from(["flat", "per_layer"]))
    units = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=12))
    units = np.unique(units, return_inverse=True)[1]
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e4]))
    limit = data.draw(st.sampled_from([None, 1, 3]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = scale * torch.randn(len(units), 3, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    sampler = AllocationSampler(num_examples=len(units), expected_batch_size=1, units=units, max_examples_per_unit=limit)

    def total(examples):
        options = dict(max_grad_norm=0.7, clipping=clipping, granularity=granularity, engine=engine)
        with ClippedGradients(model, **options) as clipped:
            for count in set(sampler.counts[examples].tolist()):
                some = examples[sampler.counts[examples] == count]
                losses = scale * model(x[some]).squeeze(1)
                if clip_unit_mean:
                    clipped.backward(losses, views=count)
                else:
                    clipped.backward(losses, weights=torch.full((len(some),), example_weight(count)))
            return torch.cat([value.flatten() for value in clipped.sums.values()]).double()

    chosen = sampler._examples_of(np.arange(sampler.num_units), step=0)
    without = chosen[units[chosen] != units[0]]
    # Rounding of float32 sums, relative to what is in them: at most as many times C as there are units.
    assert torch.linalg.vector_norm(total(chosen) - total(without)) <= 0.7 * (1 + 1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
def test_shares_of_a_user_keep_their_precision_whatever_torchs_default_is(tmp_path, monkeypatch, precision):
    """In bfloat16, three shares of a third would add up to 1.002."""
    everything_drawn(monkeypatch)
    found = []
    backward = ClippedGradients.backward

    def noting(self, losses, *, weights=None, **options):
        found.append(weights)
        backward(self, losses, weights=weights, **options)

    monkeypatch.setattr(ClippedGradients, "backward", noting)
    data = text_data(24).add_column("user_id", [number // 3 for number in range(24)])
    trainer = trainer_of(tmp_path, data=data, max_steps=1, privacy_unit_column="user_id", clip_unit_mean=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(precision)
    try:
        trainer.train()
    finally:
        torch.set_default_dtype(default)
    shares = torch.cat([each for each in found if each is not None])
    assert shares.dtype == torch.float32
    assert len(shares) >= 24
    assert (3 * shares.double() <= 1.0).all()


@pytest.mark.usefixtures("unchecked_arrays")
def test_weights_are_one_for_each_example_and_none_is_above_1():
    model = torch.nn.Linear(1, 1, bias=False)
    with ClippedGradients(model, clipping="vanilla") as clipped:
        clipped.backward(model(torch.full((3, 1), 9.0)).squeeze(1), weights=torch.tensor([0.5, 1.1, math.nan]))
        assert clipped.sums["weight"].item() == pytest.approx(1.5, rel=2e-3)
        with refused("wrong-shape", match="weights"):
            clipped.backward(model(torch.ones(2, 1)).squeeze(1), weights=torch.tensor([0.5]))


# --- the trainer ----------------------------------------------------------------------------------------------------------


def everything_drawn(monkeypatch):
    monkeypatch.setattr(AllocationSampler, "drawn_units", lambda self, step: np.arange(self.num_units))
    monkeypatch.setattr(AllocationSampler, "coins", lambda self, count, *, step: np.zeros(count))


@pytest.mark.parametrize("clip_unit_mean", [False, True])
def test_a_user_contributes_the_mean_of_its_clipped_gradients_or_its_clipped_mean(tmp_path, monkeypatch, clip_unit_mean):
    everything_drawn(monkeypatch)
    recorder, data, max_grad_norm = Recorder(), users(), 1e-3
    trainer = trainer_of(
        tmp_path, data=data, callbacks=[recorder], noise_multiplier=0.0, clipping="vanilla", max_steps=1, noise_seed=0,
        per_sample_max_grad_norm=max_grad_norm, privacy_unit_column="user_id", clip_unit_mean=clip_unit_mean,
    )  # fmt: skip
    model, of_users = tiny_bert().train(), {}
    for row in data:
        inputs = pad([{name: row[name] for name in ("input_ids", "attention_mask", "labels")}])
        gradients = torch.autograd.grad(model(**inputs).loss, list(model.parameters()))
        of_users.setdefault(row["user_id"], []).append(torch.cat([g.flatten() for g in gradients]).double())

    def clipped(gradient):
        return gradient * min(1.0, max_grad_norm / (gradient.norm() * RAISED))

    if clip_unit_mean:
        contributions = [clipped(torch.stack(gradients).mean(dim=0)) for gradients in of_users.values()]
    else:
        contributions = [torch.stack([*map(clipped, gradients)]).mean(dim=0) for gradients in of_users.values()]
    trainer.train()
    # Norms of products are raised by some millionths more.
    torch.testing.assert_close(recorder.gradients[0], sum(contributions) / 8, atol=max_grad_norm * 1e-5, rtol=1e-4)


def test_the_accountant_the_ledger_and_the_summary_count_users(tmp_path, capsys):
    trainer = trainer_of(tmp_path, data=users(), privacy_unit_column="user_id", max_examples_per_unit=3, max_steps=3)
    trainer.train()
    statement = PrivacyLedger.load(tmp_path / "out").statement
    assert (statement.num_units, statement.sample_rate, statement.max_examples_per_unit) == (14, 8 / 14, 3)
    assert "user_id" in statement.unit_of_privacy
    # The loss is released beside the gradient, and takes a hundredth of the budget.
    mechanism = dict(noise_multiplier=0.99**0.5, sample_rate=8 / 14, steps=3, delta=14**-1.1)
    assert trainer.privacy.epsilon() == pytest.approx(get_epsilon(**mechanism), rel=1e-9)
    assert "user_id" in capsys.readouterr().out


@pytest.mark.parametrize("options", [dict(data=users(), privacy_unit_column="user_id"), dict(augmentation_multiplicity=2)])
def test_a_collator_that_reorders_the_rows_of_users_is_refused(tmp_path, options):
    """And of the views of an example."""
    reordering = lambda examples: pad(sorted(examples, key=lambda row: row["input_ids"][0]))  # noqa: E731
    trainer = trainer_of(tmp_path, collator=reordering, gradient_accumulation_steps=1, **options)
    with refused("rows-reordered"):
        trainer.train()
