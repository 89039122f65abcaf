"""The default bound of the private training loss is above the loss of an untrained model."""

import math

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from doppler_hf import DopplerTrainer
from doppler_hf.privacy.loss_bounds import GUESS, default_bound
from doppler_hf.privacy.losses import per_sample_losses
from doppler_hf.privacy.pair_losses import PAIR_LOSSES, PairTerms, loss_of_untrained
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import OfLogits, changing, trainer_of

LORA = LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS")
SIZES = dict(vocab_size=30_522, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
GPT2 = dict(vocab_size=50_257, n_embd=16, n_layer=2, n_head=2, n_positions=32)
T5 = dict(vocab_size=32_128, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
SPEECH = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
    conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, mask_time_prob=0.0,
    ctc_loss_reduction="mean",
)  # fmt: skip
SCENES = dict(
    num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[2, 2],
    num_attention_heads=[1, 1], mlp_ratios=[2, 2], decoder_hidden_size=8,
)  # fmt: skip


def bert(kind, **options):
    return lambda: kind(hf.BertConfig(**SIZES, **options))


def tokens(classes=None, *, shape=(8, 12)):
    ids = torch.randint(5, 30_000, shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids if classes is None else classes}


def classes(count, *shape):
    return torch.randint(count, shape or (8,))


TASKS = {
    "classes": (bert(hf.BertForSequenceClassification, num_labels=2), lambda: tokens(classes(2)), 2 * math.log(2)),
    "many classes": (bert(hf.BertForSequenceClassification, num_labels=77), lambda: tokens(classes(77)), 2 * math.log(77)),
    "several labels": (
        bert(hf.BertForSequenceClassification, num_labels=9, problem_type="multi_label_classification"),
        lambda: tokens(classes(2, 8, 9).float()), 2 * math.log(2),
    ),
    "a number": (bert(hf.BertForSequenceClassification, num_labels=1), lambda: tokens(torch.randn(8)), GUESS),
    "tokens": (bert(hf.BertForTokenClassification, num_labels=9), lambda: tokens(classes(9, 8, 12)), 2 * math.log(9)),
    "masked words": (bert(hf.BertForMaskedLM), tokens, 2 * math.log(30_522)),
    "next words": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), tokens, 2 * math.log(50_257)),
    "sequences": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), tokens, 2 * math.log(32_128)),
    "choices": (bert(hf.BertForMultipleChoice), lambda: tokens(classes(5), shape=(8, 5, 12)), 2 * math.log(4)),
    "answers": (
        bert(hf.BertForQuestionAnswering),
        lambda: {k: v for k, v in tokens(shape=(8, 384)).items() if k != "labels"}
        | {"start_positions": classes(300), "end_positions": classes(384)},
        2 * math.log(512),
    ),
    "pixels": (
        lambda: hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**SCENES, num_labels=150)),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": classes(150, 4, 16, 16)}, 2 * math.log(150),
    ),
    "speech": (
        lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)),
        lambda: {"input_values": torch.randn(4, 1000), "labels": 1 + classes(31, 4, 12)}, 10 * math.log(32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_an_untrained_model_is_below_the_bound_and_near_half_of_it(task):
    torch.manual_seed(0)
    build, batch, expected = TASKS[task]
    model = build()
    bound = default_bound(model)
    assert bound.value == pytest.approx(expected)
    losses = per_sample_losses(model, batch(), base_model=model)
    if bound.value == GUESS:
        assert losses.mean() < bound.value
    else:
        assert losses.max() < bound.value
        assert 0.2 * bound.value < losses.mean() < 0.75 * bound.value


def test_speech_whose_losses_are_sums_has_a_bound_of_a_hundred_labels():
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH | {"ctc_loss_reduction": "sum"}))
    assert default_bound(model).value == pytest.approx(1000 * math.log(32))


def test_one_class_counts_as_two():
    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**SCENES, num_labels=1))
    assert default_bound(model).value == pytest.approx(2 * math.log(2))
    assert default_bound(bert(hf.BertForTokenClassification, num_labels=1)()).value == pytest.approx(2 * math.log(2))


def test_a_regression_that_is_named_so_is_a_guess():
    model = bert(hf.BertForSequenceClassification, num_labels=3, problem_type="regression")()
    assert default_bound(model).value == GUESS
    assert "a guess" in default_bound(model).words


def test_a_loss_of_ones_own_takes_the_bound_of_a_classifier_or_a_language_model_or_a_guess():
    assert default_bound(nn.Linear(2, 2)).value == GUESS
    for build, _, expected in (TASKS["many classes"], TASKS["next words"], TASKS["a number"]):
        assert default_bound(build(), has_own_loss=True).value == pytest.approx(expected)
    assert default_bound(hf.BertModel(hf.BertConfig(**SIZES)), has_own_loss=True).value == GUESS


def test_each_loss_of_a_pair_has_a_bound_above_what_it_begins_with():
    for name in PAIR_LOSSES:
        loss = loss_of_untrained(weights=[(name, 1.0)], terms=PairTerms(0.1, 0.001), vocabulary=151_936)
        assert 0.0 < loss < math.inf, name
    both = [("sigmoid", 0.5), ("sft", 2.0)]
    loss = loss_of_untrained(weights=both, terms=PairTerms(0.1), vocabulary=151_936)
    assert loss == pytest.approx(0.5 * math.log(2) + 2.0 * math.log(151_936), rel=1e-6)


class Doubled(changing(lambda losses, inputs: 2 * losses)):
    pass


@pytest.mark.parametrize(
    ("cls", "model", "options", "expected"),
    [
        (DopplerTrainer, lambda: tiny_bert(num_labels=5), {}, 2 * math.log(5)),
        (DopplerTrainer, lambda: get_peft_model(tiny_bert(num_labels=5), LORA), {}, 2 * math.log(5)),
        (DopplerTrainer, lambda: tiny_bert(num_labels=5), {"per_sample_max_loss": 7.5}, 7.5),
        (Doubled, lambda: tiny_bert(num_labels=5), {}, 2 * math.log(5)),
        (OfLogits, lambda: nn.Linear(2, 2), {}, GUESS),
        (DopplerTrainer, lambda: tiny_bert(num_labels=5), {"report_train_loss": "none"}, None),
    ],
)
def test_the_statement_of_a_run_has_the_bound(tmp_path, cls, model, options, expected):
    run = trainer_of(tmp_path, cls=cls, model=model(), data=text_data(labels=5), **options).privacy
    found = run.statement.per_sample_max_loss
    assert found == (None if expected is None else pytest.approx(expected))
    assert run.private_loss is None or run.private_loss.mechanism.max_grad_norm == found


def test_a_pair_has_the_bound_of_its_loss(tmp_path):
    pytest.importorskip("trl", reason="the extra trl is not installed")
    from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer
    from tests.support.chat import arguments_of, chat_tokenizer, preferences, tiny_llama

    def bound_of(cls=DopplerDPOTrainer, **options):
        args = arguments_of(tmp_path / "out", cls=DopplerDPOConfig, bf16=False, beta=0.1, **options)
        trainer = cls(model=tiny_llama(), args=args, train_dataset=preferences(), processing_class=chat_tokenizer())
        return trainer.privacy.statement.per_sample_max_loss

    assert bound_of() == pytest.approx(2 * math.log(2), rel=1e-6)
    assert bound_of(loss_type=["ipo"]) == pytest.approx(2 * 25.0, rel=1e-6)
    assert bound_of(changing(lambda losses, inputs: 2 * losses, of=DopplerDPOTrainer)) == GUESS
