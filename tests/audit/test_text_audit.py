"""The audit with canaries made of text: it finds them without privacy, and what it says of them is what the model does.

At ε = 0.01 a hundred equal rows have an ε of 1 together, so that the ranks of all canaries are next to chance.
"""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from doppler_hf import DopplerTrainer
from doppler_hf.audit import audit_texts, text_audit, text_canaries
from doppler_hf.audit.lower_bounds import one_run_epsilon
from doppler_hf.audit.text_canaries import (
    CODE_TOKENS,
    CODES,
    START_TOKENS,
    Reading,
    TextCanary,
    new_canaries,
    read_canary,
    read_codes,
    with_canaries,
)
from doppler_hf.privacy import GaussianMechanism, default_delta
from tests.support.chat import chat_tokenizer, tiny_llama
from tests.support.refusals import refused
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import trainer_of

VOCABULARY, SPECIAL = 60, {0, 1, 2}


def tiny_gpt2(**overrides):
    torch.manual_seed(0)
    options = dict(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=24, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**(options | overrides)))


def texts(rows=60):
    generator = np.random.default_rng(0)
    tokens = [generator.integers(3, VOCABULARY, size=generator.integers(3, 13)).tolist() for _ in range(rows)]
    return Dataset.from_list([{"input_ids": each, "attention_mask": [1] * len(each), "labels": each} for each in tokens])


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in padding.items()
    }


def audited(tmp_path, *, model=None, num_canaries=20, confidence=0.95, **options):
    terms = dict(
        data=texts(), collator=pad, gradient_accumulation_steps=1, logging_steps=1000, max_steps=-1, learning_rate=1e-2,
        per_device_train_batch_size=32, num_train_epochs=15,
    )  # fmt: skip
    trainer = trainer_of(tmp_path, model=tiny_gpt2() if model is None else model, **(terms | options))
    return audit_texts(trainer, num_canaries=num_canaries, confidence=confidence)


def canaries_of(*insertions, seed=0, model=None):
    return new_canaries(model or tiny_gpt2(), None, insertions=insertions, generator=np.random.default_rng(seed))


def ranks(result, *insertions):
    return [each.rank for each in result.canaries if each.insertions in insertions]


def test_canaries_are_found_without_privacy(tmp_path, monkeypatch):
    monkeypatch.setattr(text_canaries, "CODES", 200)
    result = audited(tmp_path, disable_dp=True, noise_multiplier=None, num_canaries=60)
    assert [len(ranks(result, 0, 1)), len(ranks(result, 10)), len(ranks(result, 100))] == [60, 6, 1]
    assert [(each.rank, each.is_repeated) for each in result.canaries if each.insertions == 100] == [(1, True)]
    assert np.median(ranks(result, 10)) == 1
    assert np.median(ranks(result, 1)) <= 10
    # By chance, half of twenty canaries are among the first ten of 200 less than once in a million times.
    assert np.median(ranks(result, 0)) > 10
    assert [each.insertions for each in result.canaries[:60]] == result.membership.included.tolist()
    found = result.membership
    assert not found.contradicts_claim
    rows = 60 + found.included.sum() + 60 + 100
    assert (found.claimed_epsilon, found.delta) == (math.inf, default_delta(int(rows)))
    assert found.lower_bounds == {"one run": one_run_epsilon(found.scores, found.included, delta=found.delta)}
    assert found.lower_bound > 0.5
    assert not [*(tmp_path / "out").iterdir()]

    written = json.loads(result.save(tmp_path).read_text(), parse_constant=pytest.fail)
    assert (written["claimed_epsilon"], written["canaries"]) == (None, 60)
    assert written["text_canaries"][-1] == {
        "insertions": 100, "rank": 1, "is_repeated": True, "start": result.canaries[-1].start,
        "code": result.canaries[-1].code,
    }  # fmt: skip
    assert (written["codes"], len(written["text_canaries"])) == (200, 67)


def test_canaries_are_not_found_at_a_small_epsilon(tmp_path):
    result = audited(tmp_path, noise_multiplier=None, target_epsilon=0.01, num_train_epochs=3)
    found = result.membership
    assert 0.009 < found.claimed_epsilon <= 0.01
    assert not found.contradicts_claim
    assert not any(each.is_repeated for each in result.canaries)
    # More than half of a dozen ranks are among the first fifty once in a million times.
    assert np.median(ranks(result, 1, 10, 100)) > 50
    assert json.loads(result.save(tmp_path).read_text())["claimed_epsilon"] == found.claimed_epsilon


@pytest.mark.thorough
def test_a_run_without_its_noise_is_caught(tmp_path, monkeypatch):
    def without_noise(self, sums, **_):
        return {name: total / self.expected_batch_size for name, total in sums.items()}

    monkeypatch.setattr(GaussianMechanism, "privatize", without_noise)
    monkeypatch.setattr(text_canaries, "CODES", 200)
    result = audited(
        tmp_path, num_canaries=40, noise_multiplier=30.0, base_optimizer="adam", clipping="vanilla",
        per_sample_max_grad_norm=10.0, report_train_loss="none",
    )  # fmt: skip
    assert result.membership.claimed_epsilon < 0.2
    assert result.membership.contradicts_claim


def test_a_canary_is_in_as_many_rows_as_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(text_canaries, "CODES", 10)
    trained = []

    class Keeps(DopplerTrainer):
        def train(self):
            trained.extend(tuple(row) for row in self.train_dataset["input_ids"])

    trainer = trainer_of(
        tmp_path, cls=Keeps, model=tiny_gpt2(), data=texts(), collator=pad, disable_dp=True, noise_multiplier=None
    )
    before = trainer.train_dataset
    result = audit_texts(trainer, num_canaries=100)
    assert trained[:60] == [tuple(row) for row in texts()["input_ids"]]
    for canary in result.canaries:
        assert trained.count((*canary.start, *canary.code)) == canary.insertions
    assert len(trained) == 60 + sum(canary.insertions for canary in result.canaries)
    # Fair coins: outside of this range once in a million times.
    assert 26 <= result.membership.included.sum() <= 74
    # The trainer itself has neither another training set nor a run.
    assert trainer.train_dataset is before
    assert trainer.args.output_dir == str(tmp_path / "out")
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("column", ["labels", None])
def test_rows_of_canaries_are_like_other_rows(column):
    data = texts(8).add_column("stars", list(range(8))).add_column("user", [7, 7, 7, 7, 8, 8, 8, 8])
    data = data.map(lambda row: {"completion_mask": row["attention_mask"], "token_type_ids": row["attention_mask"]})
    data = data if column else data.remove_columns("labels")
    canaries = canaries_of(0, 1, 10)
    planted = with_canaries(data, canaries, unit_column="user", generator=np.random.default_rng(0))
    assert planted.features == {**data.features, "user": planted.features["user"]}
    assert planted.select(range(8)).remove_columns("user")[:] == data.remove_columns("user")[:]
    owners = planted["user"]
    assert len({*owners[:8]}) == 2
    assert len({*owners[8:]} - {*owners[:8]}) == 11  # Each row of a canary is a user of its own.
    for row, canary in zip(planted.select(range(8, 19)), [canaries[1], *[canaries[2]] * 10], strict=True):
        start, code = canary.start.tolist(), canary.codes[0].tolist()
        assert row["input_ids"] == start + code
        assert row["attention_mask"] == [1] * (START_TOKENS + CODE_TOKENS)
        assert row["completion_mask"] == [0] * START_TOKENS + [1] * CODE_TOKENS
        assert row["token_type_ids"] == [0] * (START_TOKENS + CODE_TOKENS)
        assert row["stars"] in range(8)
        assert row.get("labels") == ([-100] * START_TOKENS + code if column else None)


def test_formats_and_transforms_of_a_data_set_are_kept():
    canaries, generator = canaries_of(1), np.random.default_rng(0)
    tensors = with_canaries(texts(4).with_format("torch"), canaries, unit_column=None, generator=generator)
    assert torch.equal(tensors[4]["input_ids"][START_TOKENS:], torch.from_numpy(canaries[0].codes[0]))
    doubled = texts(4).with_transform(
        lambda rows: {"input_ids": [[2 * token for token in row] for row in rows["input_ids"]]}
    )
    found = with_canaries(doubled, canaries, unit_column=None, generator=generator)[4]
    assert found == {"input_ids": (2 * np.concatenate([canaries[0].start, canaries[0].codes[0]])).tolist()}


def test_a_model_may_have_several_tokens_that_end_a_text():
    model = tiny_gpt2()
    model.config.eos_token_id, model.config.pad_token_id = [3, 4], None
    (canary,) = new_canaries(model, None, insertions=[1], generator=np.random.default_rng(0))
    assert not {3, 4} & {*canary.codes.flatten().tolist(), *canary.start.tolist()}


def test_tokens_are_those_of_the_vocabulary_but_special_ones():
    canaries = canaries_of(*[1] * 20)
    tokens = np.concatenate([np.append(each.start, each.codes.ravel()) for each in canaries])
    assert {*tokens.tolist()} == {*range(VOCABULARY)} - SPECIAL
    tokenizer, wide = chat_tokenizer(), tiny_gpt2(vocab_size=500)
    (canary,) = new_canaries(wide, tokenizer, insertions=[1], generator=np.random.default_rng(0))
    assert {*canary.codes.ravel().tolist()} == {*range(len(tokenizer))} - {*tokenizer.all_special_ids} - SPECIAL
    assert (canary.start.shape, canary.codes.shape) == ((START_TOKENS,), (CODES, CODE_TOKENS))


def with_prompt(model):
    """A prompt that PEFT puts before the tokens of each row."""
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, lambda: with_prompt(tiny_gpt2())], ids=["gpt2", "llama", "prompt"])
def test_likelihoods_are_those_of_each_code_alone(make):
    model = make().eval()
    generator = np.random.default_rng(1)
    start, codes = torch.from_numpy(generator.integers(3, 20, 5)), torch.from_numpy(generator.integers(3, 20, (70, 4)))
    with torch.no_grad():
        written = start[None]
        for _ in range(4):
            written = torch.cat([written, model(written).logits[:, -1:].argmax(-1)], dim=1)
    codes[69] = written[0, 5:]
    losses, is_greedy = read_codes(model, start, codes)
    expected = []
    for code in codes:
        ids, logits = torch.cat([start, code]), None
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -len(ids) :].double()
        expected.append(-sum(float(logits[place].log_softmax(-1)[ids[place + 1]]) for place in range(4, 8)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert is_greedy.tolist() == [code.tolist() == written[0, 5:].tolist() for code in codes]
    assert is_greedy[69]


def test_greedy_generation_repeats_what_is_said_to_be_repeated():
    model = tiny_gpt2().eval()
    start = torch.arange(10, 10 + START_TOKENS)
    ids = model.generate(start[None], attention_mask=torch.ones(1, START_TOKENS), max_new_tokens=CODE_TOKENS,
                         min_new_tokens=CODE_TOKENS, do_sample=False)  # fmt: skip
    code = ids[0, START_TOKENS:].numpy()
    for change, is_repeated in ((0, True), (1, False)):
        codes = np.tile(np.append(code[:-1], code[-1] + change), (2, 1))
        assert read_canary(model, TextCanary(1, start.numpy(), codes)).is_repeated == is_repeated


def test_a_canary_is_read_without_dropout():
    model, (canary,) = tiny_gpt2(resid_pdrop=0.5, embd_pdrop=0.5).train(), canaries_of(1)
    first, second = (read_canary(model, canary).losses for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("losses", "rank"),
    [
        ([1.0, 2.0, 3.0], 1), ([2.0, 1.0, 3.0], 2), ([3.0, 2.0, 1.0], 3), ([1.0, 1.0, 2.0], 2),
        ([math.nan] * 3, 3), ([1.0, math.nan, 2.0], 2),
    ],
)  # fmt: skip
def test_the_likeliest_code_has_the_first_rank_and_doubts_count_against_it(losses, rank):
    assert Reading(np.array(losses), False).rank == rank


def test_scores_leave_out_what_the_model_knew_before_and_a_diverged_one_has_none():
    before = [Reading(np.array(losses), False) for losses in ([9.0, 1.0, 1.0], [1.0, 9.0, 9.0], [1.0, 2.0, 3.0])]
    after = [Reading(np.array(losses), False) for losses in ([9.0, 0.0, 2.0], [0.0, 7.0, 11.0], [math.nan, 2.0, 3.0])]
    np.testing.assert_allclose(text_audit._scores(before, after), [0.0, 0.5, 0.0])


@pytest.mark.thorough
def test_adapters_and_trls_trainer_are_audited(tmp_path, monkeypatch):
    monkeypatch.setattr(text_canaries, "CODES", 10)
    pytest.importorskip("trl", reason="the extra trl is not installed")
    from doppler_hf import DopplerSFTConfig, DopplerSFTTrainer
    from tests.support import chat

    trainer = DopplerSFTTrainer(
        model=get_peft_model(tiny_llama(), LoraConfig(r=2, task_type="CAUSAL_LM")),
        args=chat.arguments_of(tmp_path / "out", cls=DopplerSFTConfig),
        train_dataset=chat.prompts(),
        processing_class=chat_tokenizer(),
    )
    result = audit_texts(trainer, num_canaries=20)
    assert result.membership.claimed_epsilon < 10
    assert not result.membership.contradicts_claim
    assert not [*(tmp_path / "out").iterdir()]


def test_bad_input_is_refused_before_training(tmp_path, monkeypatch):
    good = dict(model=tiny_gpt2(), data=texts(), collator=pad)

    def refusal(code, *, match=None, num_canaries=20, confidence=0.95, **options):
        trainer = trainer_of(tmp_path, **(good | options))
        monkeypatch.setattr(type(trainer), "train", pytest.fail)
        with refused(code, match=match):
            audit_texts(trainer, num_canaries=num_canaries, confidence=confidence)

    refusal("out-of-range", match="num_canaries.* 19", num_canaries=19)
    refusal("out-of-range", match="confidence", confidence=1.0)
    refusal("no-language-model", match="BertForSequenceClassification", model=tiny_bert(), data=text_data())
    refusal("no-tokens-column", match="'tokens'", data=texts().rename_column("input_ids", "tokens"))
    refusal("not-a-dataset", data=list(texts()))
    positions = [list(range(len(row))) for row in texts()["input_ids"]]
    refusal("unknown-column-of-tokens", match="'position_ids'", data=texts().add_column("position_ids", positions))
    monkeypatch.setattr("doppler_hf.training_args.DopplerTrainingArguments.world_size", 2)
    refusal("audit-in-processes", match="2")
