"""Masked image modeling: an example's loss is the model's own of it alone, and its gradient is clipped as a whole."""

import pytest
import torch
import transformers as hf

from doppler_hf import DopplerTrainer
from doppler_hf.privacy.losses import hidden_patch_losses, per_sample_losses
from scripts.experiments.tiny_models import padded
from tests.support.per_example import assert_equals_loop
from tests.support.refusals import refused
from tests.support.trainers import arguments

pytestmark = pytest.mark.filterwarnings("ignore:All rows of eval_dataset are also in train_dataset")

SIZES = dict(image_size=8, patch_size=2, encoder_stride=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
STACK = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
SWIN = dict(embed_dim=8, depths=[1], num_heads=[2], window_size=2, drop_path_rate=0.0)
MODELS = {
    "vit": lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(**SIZES, **STACK)),
    "deit": lambda: hf.DeiTForMaskedImageModeling(hf.DeiTConfig(**SIZES, **STACK)),
    "swin": lambda: hf.SwinForMaskedImageModeling(hf.SwinConfig(**SIZES, **SWIN)),
}


def images(number=12, *, hidden=lambda index: 3 + index % 5):
    """Images of which some have more hidden patches than others."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(number):
        mask = torch.zeros(16, dtype=torch.bool)
        mask[torch.randperm(16, generator=generator)[: hidden(index)]] = True
        found.append({"pixel_values": torch.randn(3, 8, 8, generator=generator), "bool_masked_pos": mask})
    return found


def built(build):
    torch.manual_seed(0)
    return build().train()


def in_double(rows):
    return {name: value.double() if value.is_floating_point() else value for name, value in padded(rows).items()}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_each_loss_is_the_models_own_of_that_example_alone(build):
    model, rows = built(build).double(), images(4)
    losses = per_sample_losses(model, in_double(rows), base_model=model)
    alone = torch.stack([model(**in_double([row])).loss for row in rows])
    torch.testing.assert_close(losses, alone, atol=0, rtol=1e-6)  # Transformers adds 1e-5 to the number of hidden pixels


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_clipped_sums_equal_a_loop_over_single_examples(build):
    model, rows = built(build).double(), images(4)

    def losses(index):
        return per_sample_losses(model, in_double(rows[index]), base_model=model)

    assert_equals_loop(model, losses, 4, tolerance=dict(atol=1e-9, rtol=1e-9))


@pytest.mark.parametrize("hidden", [lambda index: 6, lambda index: 3 + index % 5], ids=["as many", "of any number"])
def test_a_private_training_and_an_evaluation(tmp_path, hidden):
    args = arguments(tmp_path, grad_sample_self_check=True, max_steps=2, label_names=["bool_masked_pos"])
    rows = images(hidden=hidden)
    trainer = DopplerTrainer(built(MODELS["vit"]), args, padded, rows, eval_dataset=[*rows])
    trainer.train()
    assert trainer.privacy.ledger.steps_run == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_an_image_of_which_nothing_is_hidden_has_no_loss_and_no_gradient():
    made_up = torch.randn(2, 3, 4, 4, requires_grad=True)
    losses = hidden_patch_losses(made_up, torch.zeros(2, 3, 4, 4), torch.tensor([[True] * 4, [False] * 4]))
    torch.testing.assert_close(losses, torch.stack([made_up[0].abs().mean(), torch.zeros(())]))
    (gradient,) = torch.autograd.grad(losses.sum(), made_up)
    assert gradient[0].all()
    assert not gradient[1].any()


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(
    ("patches", "size", "named"), [(5, 4, "not a square"), (9, 4, "equal patches"), (4, 2, "another shape")]
)
def test_a_mask_that_does_not_fit_is_refused(patches, size, named):
    made_up = torch.zeros(2, 3, size, size)
    with refused("wrong-shape", match=f"{named}.* bool_masked_pos"):
        hidden_patch_losses(made_up, torch.zeros(2, 3, 4, 4), torch.zeros(2, patches, dtype=torch.bool))
