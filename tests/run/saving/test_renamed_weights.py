"""Weights that Transformers saves under other names are found again, and a model whose names collide is known before."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, ViTConfig, ViTForImageClassification

from doppler_hf.run.saving.renamed_weights import colliding_names, load_renamed
from tests.support.tiny import tiny_bert

SIZES = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)


def vit(seed=0):
    torch.manual_seed(seed)
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SIZES))


def experts(seed=0):
    """The weights of its experts are one tensor here, and one each in a file."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(vocab_size=20, num_key_value_heads=1, num_local_experts=3, **SIZES))


def with_two_names_for_one():
    """Saved, its `q_proj` has the name that its `query` has already."""
    model = vit()
    model.classifier = nn.ModuleDict(dict(q_proj=nn.Linear(2, 2), attention=nn.ModuleDict(dict(query=nn.Linear(2, 2)))))
    return model


@pytest.mark.parametrize("make", [vit, experts])
def test_a_saved_model_is_loaded_into_the_tensors_of_another(tmp_path, make):
    first, second = make(1), make(2)
    own = dict(second.named_parameters())
    first.save_pretrained(tmp_path)
    load_renamed(second, tmp_path)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert all(own[name] is parameter and parameter.requires_grad for name, parameter in second.named_parameters())
    assert colliding_names(second) == []
    second.save_pretrained(tmp_path / "again")
    load_renamed(third := make(3), tmp_path / "again")
    torch.testing.assert_close(third.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_a_file_without_a_weight_changes_nothing(tmp_path):
    model = vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({"classifier.weight": torch.ones(2, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 39 weights of ViTForImage.*'classifier.bias'"):
        load_renamed(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_names_that_collide_in_a_file_are_found():
    assert colliding_names(tiny_bert()) == []
    assert colliding_names(with_two_names_for_one())
