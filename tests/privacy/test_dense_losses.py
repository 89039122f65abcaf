"""Segmentation and CTC: an example's loss is the model's own of it alone, and its gradient is clipped as a whole."""

import pytest
import torch
import transformers as hf
from opacus.validators import ModuleValidator
from peft import LoraConfig, get_peft_model

from doppler_hf import DopplerTrainer
from doppler_hf.audit import neighbour_distances
from doppler_hf.linalg import cross_entropies
from doppler_hf.privacy.dense_losses import ctc_losses, pixel_losses
from doppler_hf.privacy.losses import per_sample_losses, task_of
from scripts.experiments.tiny_models import padded
from tests.support.per_example import assert_equals_loop
from tests.support.refusals import refused
from tests.support.trainers import arguments

pytestmark = pytest.mark.filterwarnings("ignore:All rows of eval_dataset are also in train_dataset")

AUDIO = dict(
    vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
    conv_kernel=(4, 3), conv_stride=(4, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
    pad_token_id=0, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
    final_dropout=0.0, layerdrop=0.0,
)  # fmt: skip
SEGFORMER = dict(
    num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 12], patch_sizes=[3, 3], strides=[2, 2],
    num_attention_heads=[1, 2], mlp_ratios=[1, 1], decoder_hidden_size=8, hidden_dropout_prob=0.0, drop_path_rate=0.0,
    attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
)  # fmt: skip
BEIT = dict(image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8,
            out_indices=[1, 2, 3, 4])  # fmt: skip


def wav2vec2(kind="layer", **overrides):
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**AUDIO, feat_extract_norm=kind, **overrides))
    model.wav2vec2.encoder.pos_conv_embed.requires_grad_(False)
    return model


def hubert(**overrides):
    model = hf.HubertForCTC(hf.HubertConfig(**AUDIO, feat_extract_norm="layer", **overrides))
    model.hubert.encoder.pos_conv_embed.requires_grad_(False)
    return model


def segformer(classes=3):
    return ModuleValidator.fix(hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=classes, **SEGFORMER)))


def voices(number=12, *, longest=None):
    """Waves and transcripts of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(number):
        length = 150 + 40 * (index % 5)
        wave = torch.randn(length, generator=generator)
        mask = torch.ones(length, dtype=torch.long)
        if longest is not None:
            wave, mask = (torch.nn.functional.pad(x, (0, longest - length)) for x in (wave, mask))
        labels = torch.randint(1, 9, (3 + index % 4,), generator=generator)
        found.append({"input_values": wave, "attention_mask": mask, "labels": labels})
    return found


def pictures(number=12, *, classes=3):
    """Images whose pixels have labels, the fewer the later in the list."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(number):
        labels = torch.randint(classes, (16, 16), generator=generator)
        labels[: index % 5 * 3] = 255
        found.append({"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": labels})
    return found


def trainer_of(tmp_path, model, data, **options):
    # In one piece: transformers before 5.23 draws a coin for all rows at each layer, also where none is ever left out.
    args = arguments(tmp_path, grad_sample_self_check=True, gradient_accumulation_steps=1, **options)
    return DopplerTrainer(model=model, args=args, train_dataset=data, eval_dataset=[*data], data_collator=padded)


def in_double(batch):
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


MODELS = {
    "wav2vec2, mean": (lambda: wav2vec2(ctc_loss_reduction="mean"), voices),
    "hubert, sum": (lambda: hubert(ctc_loss_reduction="sum"), voices),
    "segformer": (segformer, pictures),
    "segformer of one class": (lambda: segformer(1), lambda number=12: pictures(number, classes=2)),
}


def built(build):
    torch.manual_seed(0)
    return build().double().train()


@pytest.mark.parametrize(("build", "data"), MODELS.values(), ids=MODELS)
def test_each_loss_is_the_models_own_of_that_example_alone(build, data):
    model, rows = built(build), data(5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = per_sample_losses(model, in_double(padded(rows)), base_model=model)
    for row, loss in zip(rows, losses, strict=True):
        alone = model(**in_double(padded([row]))).loss
        # Transformers computes CTC in float32, whose rounding follows the number of frames.
        torch.testing.assert_close(loss, alone, atol=1e-6, rtol=1e-5, check_dtype=False)
        expected = torch.autograd.grad(alone, trained, allow_unused=True)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
        largest = max(gradient.norm() for gradient in expected if gradient is not None)
        assert largest > 1e-3
        for gradient, of_alone in zip(gradients, expected, strict=True):
            if of_alone is not None:
                assert (gradient - of_alone).norm() < 1e-5 * largest


@pytest.mark.parametrize(("build", "data"), MODELS.values(), ids=MODELS)
def test_clipped_sums_equal_a_loop_over_single_examples(build, data):
    model, rows = built(build), data(4)

    def losses(index):
        return per_sample_losses(model, in_double(padded(rows[index])), base_model=model)

    assert_equals_loop(model, losses, 4, tolerance=dict(atol=1e-5, rtol=1e-5) if task_of(model) == "ctc" else None)


@pytest.mark.parametrize(("build", "data"), [*MODELS.values()][1:3], ids=[*MODELS][1:3])
def test_one_example_moves_the_sum_by_at_most_c(tmp_path, build, data):
    trainer = trainer_of(tmp_path, build(), data(), clipping="vanilla", per_sample_max_grad_norm=1e-3)
    result = neighbour_distances(trainer, pairs=2)
    assert not result.contradicts_claim
    assert 0.99 < result.distances.min() <= result.distances.max() < 1.0 + 1e-5


@pytest.mark.parametrize(("build", "data"), [*MODELS.values()][1:3], ids=[*MODELS][1:3])
def test_adapters_train_for_two_private_steps_and_are_evaluated(tmp_path, build, data):
    model = get_peft_model(build(), LoraConfig(r=2, target_modules="all-linear"))
    trainer = trainer_of(tmp_path, model, data(), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == trainer.privacy.ledger.steps_run == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_norm_over_time_needs_waves_of_one_length(tmp_path):
    with refused("depends-on-others", match=r"\(GroupNorm\) depends on the length"):
        trainer_of(tmp_path, wav2vec2("group"), voices(), max_steps=1).train()
    trainer = trainer_of(tmp_path / "padded", wav2vec2("group"), voices(longest=320), max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def test_layers_that_cannot_be_trained_are_named_with_what_to_do(tmp_path):
    model = wav2vec2()
    model.requires_grad_(True)
    with refused("no-per-sample-gradient", match=r"pos_conv_embed\.conv\.parametrizations"):
        trainer_of(tmp_path, model, voices()).train()
    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**SEGFORMER))
    with refused("layer-mixes-examples", match=r"'decode_head\.batch_norm' \(BatchNorm2d\).*ModuleValidator\.fix"):
        trainer_of(tmp_path, model, pictures()).train()


def test_an_auxiliary_head_is_refused():
    inputs = padded(pictures(2))
    pixels = (inputs["labels"] != 255).sum(dim=(1, 2)).float()
    config = hf.BeitConfig(**BEIT, drop_path_rate=0.0, num_labels=3, use_auxiliary_head=True)
    model = ModuleValidator.fix(hf.BeitForSemanticSegmentation(config))
    with refused("logits-not-returned", match="BeitForSemanticSegmentation.*use_auxiliary_head=False"):
        per_sample_losses(model, inputs, base_model=model)
    config.use_auxiliary_head = False
    model = ModuleValidator.fix(hf.BeitForSemanticSegmentation(config))
    losses = per_sample_losses(model, inputs, base_model=model)
    torch.testing.assert_close(losses @ pixels / pixels.sum(), model(**inputs).loss)


def test_an_example_without_labels_or_with_too_many_of_them():
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    labels = torch.full((2, 8, 8), 255)
    labels[0, 0, 0] = 1
    losses = pixel_losses(logits, labels, ignored=255)
    assert losses[0] > 0
    assert losses[1] == 0
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()
    assert torch.all(gradient[1] == 0)
    rows = voices(3)
    rows[1]["labels"] = torch.ones(200, dtype=torch.long)
    batch, model = padded(rows), wav2vec2()
    labels = batch.pop("labels")
    losses = ctc_losses(model, batch, labels, base_model=model)
    assert losses.isinf().tolist() == [False, True, False]
    assert model.config.ctc_loss_reduction == hf.Wav2Vec2Config().ctc_loss_reduction


@pytest.mark.usefixtures("unchecked_arrays")
def test_labels_of_another_shape_are_refused():
    for labels in (torch.zeros(2, dtype=torch.long), torch.zeros(3, 8, 8, dtype=torch.long)):
        with refused("wrong-shape", match=f"4 and {labels.ndim} dimensions"):
            pixel_losses(torch.zeros(2, 3, 4, 4), labels, ignored=255)


def test_a_label_that_is_no_class_is_refused_without_its_value():
    for label in (17, -3):
        with refused("label-without-class", match="from 0 to 2") as caught:
            cross_entropies(torch.zeros(2, 3), torch.tensor([1, label]), ignored=-100)
        assert caught.value.__suppress_context__
        assert str(label) not in str(caught.value)


@pytest.mark.parametrize("label", [-1, 9])
def test_a_transcript_with_a_label_that_is_no_class_is_refused(label):
    """torch reads it from the frames of another example, and writes its gradient there."""
    model, rows = wav2vec2(), voices(3)
    model.config.vocab_size = 1000  # Transformers looks at this, and at the largest label alone
    rows[1]["labels"][0] = label
    batch = padded(rows)
    labels = batch.pop("labels")
    with refused("label-without-class", match="from 0 to 8") as caught:
        ctc_losses(model, batch, labels, base_model=model)
    assert str(label) not in str(caught.value).replace("-100", "")
