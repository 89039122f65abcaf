"""A unit of several examples is drawn whole or not at all, and contributes at most C. False-alarm rates are stated."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_hf.privacy import ClippedGradients, PoissonSampler, PrivacyLedger, get_epsilon
from doppler_hf.privacy.batching.columns import lengths_of, units_of
from doppler_hf.privacy.batching.fetching import DrawnExamples
from doppler_hf.privacy.batching.micro_batches import PrivateLoader, collate_piece
from doppler_hf.privacy.batching.sampling import OfStep, share_of
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.tolerances import RAISED
from tests.support.trainers import Recorder, arguments, trained, trainer_of

UNITS = [0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 5, 5, 6, 7]  # eight units of one to four examples
SIZES = np.bincount(UNITS)


def sampler_of(**overrides):
    return PoissonSampler(**(dict(num_examples=len(UNITS), expected_batch_size=2, units=UNITS) | overrides))


def users(num_examples=24, seed=0):
    """Texts of users who have one to five of them."""
    names = [f"user {number}" for number in (0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)]
    return text_data(num_examples, seed=seed).add_column("user_id", names[:num_examples])


def numbered(examples):
    return pad(examples) | {"number": torch.tensor([example["number"] for example in examples])}


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


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 100])
def test_the_shares_of_a_unit_add_up_to_at_most_one(limit):
    sampler = sampler_of(max_examples_per_unit=limit, expected_batch_size=8)
    drawn = sampler.draw(0)
    for unit in range(8):
        counts = sampler.counts[drawn[np.array(UNITS)[drawn] == unit]].tolist()
        assert counts == [len(counts)] * len(counts)
        assert 1 - 1e-6 < sum(map(share_of, counts)) <= 1.0


def test_the_shares_are_rounded_down():
    for count in range(1, 200):
        share = share_of(count)
        assert share == np.float32(share)  # as the engine has it
        assert 1 - 1e-6 < count * share <= 1.0


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


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whole_units_are_not_cut(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    units = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    lengths = np.random.default_rng(1).integers(1, 50, size=len(units)) if data.draw(st.booleans()) else None
    pieces = data.draw(st.integers(1, 5))
    sampler = PoissonSampler(
        num_examples=len(units), expected_batch_size=len(sizes), units=units, lengths=lengths, keeps_units_whole=True,
        micro_batches=pieces, max_examples_per_unit=data.draw(st.sampled_from([None, 1, 3])),
    )  # fmt: skip
    (drawn,) = [list(sampler)]
    assert len(drawn) == pieces
    assert max(len(set(units[piece])) for piece in drawn) - min(len(set(units[piece])) for piece in drawn) <= 1
    together = np.concatenate(drawn).astype(int)
    assert len(set(together)) == len(together) == np.minimum(sizes, sampler.max_examples_per_unit or 4).sum()
    for piece in drawn:  # each unit in one run of rows, as long as its count says, in one piece
        runs = [list(rows) for _, rows in itertools.groupby(piece, key=lambda index: units[index])]
        assert len(runs) == len(set(units[piece]))
        assert all(len(rows) == sampler.counts[rows[0]] for rows in runs)
    counts = sampler.counts[together]
    assert np.all(np.diff(counts) >= 0)
    if lengths is not None:
        for count in np.unique(counts):
            longest = lengths[together[counts == count]].reshape(-1, count).max(axis=1)
            assert np.all(np.diff(longest) >= 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(units=[0, 1]), r"one entry for each of 15 examples, got shape \(2,\)"),
        (dict(units=[1 + unit for unit in UNITS]), "without gaps, got no 0"),
        (dict(units=None, max_examples_per_unit=2), "needs units, got 2"),
        (dict(max_examples_per_unit=0), "at least 1 and needs units, got 0"),
        (dict(expected_batch_size=9), "the number of units of privacy, 8, got 9"),
    ],
)
def test_bad_units_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        sampler_of(**overrides)


# --- the column -----------------------------------------------------------------------------------------------------------


def test_equal_values_of_a_column_are_a_unit():
    data = Dataset.from_dict({"user": ["b", "a", "b", "c"], "text": ["1", "2", "3", "4"]})
    assert units_of(data, column="user").tolist() == [0, 1, 0, 2]
    assert units_of(data.select([3, 2, 0]), column="user").tolist() == [0, 1, 1]
    hidden = data.with_transform(lambda rows: {"size": [len(text) for text in rows["text"]]})
    assert units_of(hidden, column="user").tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("values", "column", "message"),
    [
        (["a", None], "user", "has no value for some examples"),
        ([1.0, math.nan], "user", "has no value for some examples"),
        (["a", "b"], "owner", "must be a column of train_dataset, got user. Give a datasets.Dataset"),
        ([["a"], ["b"]], "user", "must hold numbers or strings"),
    ],
)
def test_a_column_that_names_no_units_is_refused(values, column, message):
    with pytest.raises(ValueError, match=message):
        units_of(Dataset.from_dict({"user": values}), column=column)


def test_a_plain_list_has_no_column():
    with pytest.raises(ValueError, match="column of train_dataset, got a list"):
        units_of([{"user": 1}], column="user")


@pytest.mark.parametrize("max_tokens", [None, 16])
def test_shares_stay_with_their_examples(max_tokens):
    data = text_data(10)
    counts = np.array([4] * 4 + [2] * 4 + [1] * 2)
    order = sorted(range(10), key=lambda index: (counts[index], len(data[index]["input_ids"])))
    for examples in (data, data.to_list()):
        drawn = DrawnExamples(examples, counts, numbers=set())
        batches = collate_piece(drawn.__getitems__(OfStep(order, step=5)), collator=pad, max_rows=24, max_tokens=max_tokens)
        assert batches.step == 5
        shares = [share_of(count) for count in counts[order].tolist()]
        assert [batch.weight for batch in batches for _ in range(batch.size)] == shares
        assert {batch.rows_each for batch in batches} == {1}
        assert torch.cat([batch.inputs["labels"] for batch in batches]).tolist() == [data[i]["labels"] for i in order]
        assert len(batches) == 3 if max_tokens is None else len(batches) > 3
    assert collate_piece(OfStep([], step=0), collator=pad, max_rows=24, max_tokens=max_tokens) == []


@pytest.mark.parametrize("max_tokens", [None, 40, 80])
@pytest.mark.parametrize("views", [1, 2])
def test_a_unit_whose_mean_is_clipped_is_in_one_micro_batch(max_tokens, views):
    data, users_of = text_data(24).add_column("number", list(range(24))), np.array([*range(8), *range(8, 12), *range(12)])
    sampler = PoissonSampler(
        num_examples=24, expected_batch_size=12, micro_batches=2, lengths=lengths_of(data), units=users_of, seed=0,
        keeps_units_whole=True,
    )  # fmt: skip
    loader = PrivateLoader(data, sampler=sampler, collator=numbered, max_rows=9, max_tokens=max_tokens, views=views)
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


@pytest.mark.parametrize("clip_unit_mean", [False, True])
@pytest.mark.parametrize("engine", ["book_keeping", "opacus"])
@pytest.mark.parametrize("granularity", ["flat", "per_layer"])
@pytest.mark.parametrize("clipping", ["vanilla", "automatic"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_adding_a_whole_user_changes_the_sum_by_at_most_c(engine, granularity, clipping, clip_unit_mean, data):
    units = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=12))
    units = np.unique(units, return_inverse=True)[1]
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e4]))
    limit = data.draw(st.sampled_from([None, 1, 3]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = scale * torch.randn(len(units), 3, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    sampler = PoissonSampler(num_examples=len(units), expected_batch_size=1, units=units, max_examples_per_unit=limit)

    def total(examples):
        options = dict(max_grad_norm=0.7, clipping=clipping, granularity=granularity, engine=engine)
        with ClippedGradients(model, **options) as clipped:
            for count in set(sampler.counts[examples].tolist()):
                some = examples[sampler.counts[examples] == count]
                losses = scale * model(x[some]).squeeze(1)
                if clip_unit_mean:
                    clipped.backward(losses, views=count)
                else:
                    clipped.backward(losses, weights=torch.full((len(some),), share_of(count)))
            return torch.cat([value.flatten() for value in clipped.sums.values()]).double()

    chosen = sampler._examples_of(np.arange(sampler.num_units), step=0)
    without = chosen[units[chosen] != units[0]]
    # Rounding of float32 sums, relative to what is in them: at most as many times C as there are units.
    assert torch.linalg.vector_norm(total(chosen) - total(without)) <= 0.7 * (1 + 1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_a_weighted_sum_is_the_sum_of_weighted_clipped_gradients():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 1), torch.randn(5, 3)
    weights, expected = torch.tensor([1.0, 0.5, 0.25, 0.0, 0.75]), 0.0
    for row, weight in zip(x, weights):
        gradient = torch.cat([row, torch.ones(1)]).double()  # of the output with respect to weight and bias
        expected = expected + weight.double() * gradient * min(1.0, 0.8 / (gradient.norm() * RAISED))
    for engine in ("book_keeping", "opacus"):
        with ClippedGradients(model, max_grad_norm=0.8, clipping="vanilla", engine=engine) as clipped:
            clipped.backward(model(x).squeeze(1), weights=weights)
            total = torch.cat([value.flatten() for value in clipped.sums.values()]).double()
        torch.testing.assert_close(total, expected, atol=1e-6, rtol=1e-5)


def test_examples_without_a_finite_gradient_keep_their_weights_apart():
    model, x = torch.nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [math.nan], [1.0]])
    with ClippedGradients(model, max_grad_norm=1.0, clipping="vanilla") as clipped:
        clipped.backward(model(x).squeeze(1), weights=torch.tensor([0.5, 1.0, 0.25]))
        assert clipped.sums["weight"].item() == pytest.approx(0.75 / RAISED)


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize("weights", [[0.5], [0.5, 1.1], [-0.1, 0.5], [0.5, math.nan]])
def test_bad_weights_are_refused(weights):
    model = torch.nn.Linear(1, 1)
    with (
        ClippedGradients(model) as clipped,
        pytest.raises(ValueError, match=r"weights must be one number in \[0, 1\] per example"),
    ):
        clipped.backward(model(torch.ones(2, 1)).squeeze(1), weights=torch.tensor(weights))


# --- the trainer ----------------------------------------------------------------------------------------------------------


def everything_drawn(monkeypatch):
    monkeypatch.setattr(PoissonSampler, "drawn_units", lambda self, step: np.arange(self.num_units))
    monkeypatch.setattr(PoissonSampler, "coins", lambda self, count, *, step: np.zeros(count))


@pytest.mark.parametrize(
    ("max_tokens", "limit", "clip_unit_mean"),
    [(None, 2, False), (60, None, True), *thorough((30, None, False), (None, None, False), (30, 2, False), (60, 2, True))],
)
def test_a_user_changes_the_private_sum_of_the_trainer_by_at_most_c(
    tmp_path, monkeypatch, limit, max_tokens, clip_unit_mean
):
    everything_drawn(monkeypatch)
    gradients = []
    for run, data in enumerate((users(), users().filter(lambda row: row["user_id"] != "user 4"))):
        recorder = Recorder()
        trainer = trained(trainer_of(
            tmp_path / str(run), data=data, callbacks=[recorder], noise_multiplier=0.0, clipping="vanilla", max_steps=1,
            per_sample_max_grad_norm=1e-3, privacy_unit_column="user_id", max_examples_per_unit=limit, noise_seed=0,
            max_tokens_per_micro_batch=max_tokens, clip_unit_mean=clip_unit_mean,
        ))  # fmt: skip
        assert trainer.private_run.statement.num_units == 14 - run
        gradients.append(8 * recorder.gradients[0])
    change = torch.linalg.vector_norm(gradients[0] - gradients[1])
    assert 0.1e-3 < change <= 1e-3 * (1 + 1e-4)  # five examples of much the same direction, not five times C


@pytest.mark.parametrize("clip_unit_mean", [False, True])
@pytest.mark.parametrize("max_grad_norm", [1e-3, *thorough(0.5)])
def test_a_user_contributes_the_mean_of_its_clipped_gradients_or_its_clipped_mean(
    tmp_path, monkeypatch, clip_unit_mean, max_grad_norm
):
    everything_drawn(monkeypatch)
    recorder, data = Recorder(), users()
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
    torch.testing.assert_close(recorder.gradients[0], sum(contributions) / 8, atol=max_grad_norm * 1e-7, rtol=1e-4)


def test_a_private_loss_is_that_of_users_too(tmp_path):
    """Of a user of several examples it bounds the mean of their losses."""
    added = {}
    for clip_unit_mean in (False, True):
        trainer = trainer_of(
            tmp_path / str(clip_unit_mean), data=users(), privacy_unit_column="user_id", clip_unit_mean=clip_unit_mean,
            report_train_loss="private", max_steps=1, noise_seed=0, learning_rate=0.0,
        )  # fmt: skip
        new_run, of_run = trainer._new_run, added.setdefault(clip_unit_mean, [])

        def watched(*args, new_run=new_run, of_run=of_run, **options):
            run = new_run(*args, **options)
            add = run.private_loss.add

            def noted(losses, *, weights):
                of_run.append((losses * (1.0 if weights is None else weights)).double())
                add(losses, weights=weights)

            run.private_loss.add = noted
            return run

        trainer._new_run = watched
        trainer.train()
    # The same users are drawn, each with the mean of its losses, once or as a sum of shares.
    assert torch.cat(added[True]).sum().item() == pytest.approx(torch.cat(added[False]).sum().item(), rel=1e-5)
    assert len(torch.cat(added[True])) < len(torch.cat(added[False]))


def test_the_accountant_the_ledger_and_the_summary_count_users(tmp_path, capsys):
    trainer = trainer_of(tmp_path, data=users(), privacy_unit_column="user_id", max_examples_per_unit=3, max_steps=3)
    trainer.train()
    statement = PrivacyLedger.load(tmp_path / "out").statement
    assert (statement.num_units, statement.sample_rate, statement.max_examples_per_unit) == (14, 8 / 14, 3)
    assert "user_id" in statement.unit_of_privacy
    mechanism = dict(noise_multiplier=1.0, sample_rate=8 / 14, steps=3, delta=14**-1.1)
    assert trainer.privacy.epsilon() == pytest.approx(get_epsilon(**mechanism), rel=1e-9)
    assert "user_id" in capsys.readouterr().out


def test_the_guarantee_is_the_same_and_the_ledger_says_what_is_clipped(tmp_path):
    ledgers = []
    for clip_unit_mean in (False, True):
        trained(trainer_of(
            tmp_path / str(clip_unit_mean), data=users(), privacy_unit_column="user_id", clip_unit_mean=clip_unit_mean,
            max_steps=2,
        ))  # fmt: skip
        ledgers.append(PrivacyLedger.load(tmp_path / str(clip_unit_mean) / "out"))
    assert ledgers[0].epsilon() == ledgers[1].epsilon()
    assert ledgers[1].statement.clipping_in_words == "1 (automatic, flat, the mean gradient over a unit's examples)"
    assert ledgers[0].statement.clipping_in_words == "1 (automatic, flat)"


def of_two_lengths():
    """Sixty short texts and four long ones, of users who have both."""
    sizes = [3] * 60 + [9] * 4
    rows = [{"input_ids": [index % 20 + 5] * size, "attention_mask": [1] * size} for index, size in enumerate(sizes)]
    rows = [row | {"labels": index % 2, "user_id": f"user {index % 16}"} for index, row in enumerate(rows)]
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("data", "key"),
    [(users(), lambda row: row["input_ids"][0]), (of_two_lengths(), lambda row: -len(row["input_ids"]))],
    ids=["token", "length"],
)
def test_a_collator_that_reorders_the_rows_of_users_is_refused(tmp_path, data, key):
    trainer = trainer_of(
        tmp_path, data=data, privacy_unit_column="user_id", gradient_accumulation_steps=1, grad_sample_self_check=False
    )
    trainer.data_collator = lambda examples: pad(sorted(examples, key=key))
    with pytest.raises(ValueError, match="return for each example, in their order, the row that it makes"):
        trainer.train()


def test_steps_per_epoch_follow_the_users(tmp_path):
    trainer = trained(trainer_of(tmp_path, data=users(), privacy_unit_column="user_id", max_steps=-1, num_train_epochs=3))
    assert trainer.state.global_step == 3 * math.ceil(14 / 8) == trainer.privacy.ledger.steps_run


def test_the_column_does_not_reach_the_collator(tmp_path):
    seen = set()

    def collator(examples):
        seen.update(name for example in examples for name in example)
        return pad(examples)

    trainer = trainer_of(tmp_path, data=users(), privacy_unit_column="user_id", remove_unused_columns=False, max_steps=1)
    trainer.data_collator = collator
    trainer.train()
    assert seen == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(max_examples_per_unit=3), "has no effect if every example is a unit"),
        (dict(clip_unit_mean=False), "clip_unit_mean=False has no effect if every example is a unit"),
        (dict(privacy_unit_column="user_id", max_examples_per_unit=0), "at least 1, got 0"),
        (dict(privacy_unit_column="user_id", disable_dp=True, noise_multiplier=None), "has no effect with disable_dp=True"),
    ],
)
def test_arguments_about_units_are_checked(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **overrides)


def test_a_missing_column_is_refused_before_the_first_step(tmp_path):
    trainer = trainer_of(tmp_path, privacy_unit_column="user_id")
    with pytest.raises(ValueError, match=r"privacy_unit_column='user_id' must be a column of train_dataset, got input_ids"):
        trainer.train()
