"""One loss for a pair of answers, of two rows: its values, and its gradient, which is clipped as a whole."""

import functools

import pytest
import torch
from torch.nn import functional as F

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.pair_losses import (
    PAIR_LOSSES,
    PairTerms,
    collate_pairs,
    lengths_of_answers,
    log_ratios,
    pair_losses,
    references_of,
)
from tests.support.models import VOCABULARY, build
from tests.support.pairwise import pairwise
from tests.support.per_example import (
    CLIPPINGS,
    GRANULARITIES,
    NORM_RULES,
    TOLERANCE,
    assert_same_sums,
    clip_and_sum,
    gradients_of_each,
    median_norm,
    norms_of,
)
from tests.support.refusals import refused
from tests.support.tiers import further

pytest.importorskip("trl", reason="the extra trl is not installed")

from trl.trainer.dpo_trainer import DataCollatorForPreference

BETA, NUMBER = 0.7, 5


def some_pairs(number=NUMBER, seed=0):
    """Pairs of unequal lengths, with what a reference has said of each."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(most):
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    return [
        {name: tokens(most) for name, most in (("prompt_ids", 6), ("chosen_ids", 9), ("rejected_ids", 5))}
        | {name: -10 * float(torch.rand((), generator=generator)) for name in ("ref_chosen_logps", "ref_rejected_logps")}
        for _ in range(number)
    ]


collate = functools.partial(collate_pairs, collator=DataCollatorForPreference(pad_token_id=0, max_length=11))


def losses_of(model, rows, *, kind="sigmoid"):
    inputs = collate(rows)
    of_rows = log_ratios(model, inputs), references_of(inputs), lengths_of_answers(inputs)
    return pair_losses(*of_rows, weights=[(kind, 1.0)], terms=PairTerms(BETA, label_smoothing=0.2))


def plainly(model, row):
    """The loss of one pair as it is written, without a batch, padding or a mask."""

    def log_probability(answer):
        tokens = torch.tensor(row["prompt_ids"] + answer)[:11]
        each = model(input_ids=tokens[None]).logits[0].log_softmax(dim=-1)
        return sum(each[place - 1, tokens[place]] for place in range(max(1, len(row["prompt_ids"])), len(tokens)))

    references = torch.tensor([row["ref_chosen_logps"], row["ref_rejected_logps"]])  # in float32, as they are kept
    chosen, rejected = log_probability(row["chosen_ids"]), log_probability(row["rejected_ids"])
    return -F.logsigmoid(BETA * ((chosen - references[0]) - (rejected - references[1])))


def test_two_rows_stand_side_by_side():
    rows = some_pairs()
    inputs = collate(rows)
    assert {len(value) for value in inputs.values()} == {NUMBER}
    for row, ids, mask in zip(rows, inputs["input_ids"], inputs["attention_mask"], strict=True):
        for answer, of_answer, own in zip(("chosen_ids", "rejected_ids"), ids, mask, strict=True):
            assert of_answer[own == 1].tolist() == (row["prompt_ids"] + row[answer])[:11]
            assert own.tolist() == sorted(own.tolist(), reverse=True)  # padded on the right


@pytest.mark.parametrize("name", ["llama-lm", "gpt2-lm", "llama-lora"])
def test_a_loss_is_that_of_its_definition(name):
    model, rows = build(name), some_pairs()
    torch.testing.assert_close(losses_of(model, rows), torch.stack([plainly(model, row) for row in rows]), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "norm_rule", "clipping", "granularity", "engine"),
    further(
        pairwise(
            ["llama-lm", "qwen2-lm", "gpt2-lm", "llama-lora", "llama-dora"], NORM_RULES, CLIPPINGS, GRANULARITIES,
            ["book_keeping", "opacus"],
        )
    ),
)  # fmt: skip
def test_sums_are_those_of_a_loop_over_single_pairs(name, norm_rule, clipping, granularity, engine):
    if engine == "opacus":
        name, norm_rule = name.replace("dora", "lora"), "auto"
    model, rows = build(name), some_pairs()
    gradients = gradients_of_each(model, lambda index: plainly(model, rows[index][0])[None], NUMBER)
    chosen = dict(max_grad_norm=median_norm(gradients), clipping=clipping, granularity=granularity)
    with ClippedGradients(model, rows_per_loss=2, engine=engine, norm_rule=norm_rule, **chosen) as clipped:
        norms = clipped.backward(losses_of(model, rows))
        torch.testing.assert_close(norms, norms_of(gradients), **TOLERANCE)
        assert_same_sums(clipped.sums, clip_and_sum(gradients, **chosen))


def test_another_number_of_losses_is_refused():
    model, rows = build("llama-lm"), some_pairs(4)
    for number, of_losses in ((1, slice(4)), (2, slice(3)), (3, slice(4))):
        with (
            ClippedGradients(model, rows_per_loss=number) as clipped,
            refused("other-number-of-losses"),
        ):
            clipped.backward(losses_of(model, rows)[of_losses])


def test_rows_of_a_pair_that_do_not_stand_side_by_side_are_found():
    model = build("llama-lm")
    inputs = {name: value.transpose(0, 1) for name, value in collate(some_pairs(2)).items() if "ref" not in name}
    inputs |= dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps"), torch.zeros(2))
    with ClippedGradients(model, rows_per_loss=2) as clipped:
        ratios = log_ratios(model, inputs)  # of the rows chosen, chosen, rejected, rejected
        assert clipped.coupled(ratios[0] - ratios[1], examined=torch.tensor([True, False]))


def test_an_answer_that_was_cut_off_has_a_finite_loss():
    row = some_pairs(1)[0] | {"prompt_ids": [3] * 12}
    for kind in PAIR_LOSSES:
        losses = losses_of(build("llama-lm"), [row], kind=kind)
        assert losses.isfinite().all()
