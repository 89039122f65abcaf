"""A digest of parameters is the same of the same values, wherever they lie, and another of any others."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from torch import nn

from doppler_hf.linalg import sums_of_bytes
from doppler_hf.run import digests
from doppler_hf.run.digests import parameters_digest
from tests.support.adapters import add_adapter
from tests.support.tiny import tiny_bert


class Values(nn.Module):
    """One parameter, as it is given."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=values.is_floating_point())


def test_a_copy_has_the_same_and_every_change_another():
    model = tiny_bert()
    before = parameters_digest(model)
    assert len(before) == 64
    assert parameters_digest(copy.deepcopy(model)) == before
    for name, parameter in model.named_parameters():
        changed = copy.deepcopy(model)
        values = dict(changed.named_parameters())[name].data.view(-1)
        values[-1] = torch.nextafter(values[-1], torch.tensor(torch.inf))
        assert parameters_digest(changed) != before, name
        parameter.requires_grad_(False)
    assert parameters_digest(model) == before
    assert parameters_digest(model.half()) != before


@pytest.mark.parametrize(
    ("adapted", "is_saved"),
    [
        (get_peft_model, False),
        (add_adapter, False),
        (lambda model, config: inject_adapter_in_model(config, model), True),
        (lambda model, config: nn.Sequential(get_peft_model(model, config)), True),
    ],
    ids=["peft", "transformers", "injected", "wrapped"],
)
def test_a_layer_of_which_peft_trains_a_copy_is_left_out_only_where_its_weights_are_not_saved(adapted, is_saved):
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    model = adapted(tiny_bert(), config)
    before = parameters_digest(model)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("classifier.original_module.weight")).add_(1.0)
    assert (parameters_digest(model) != before) is is_saved
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "modules_to_save" in name).add_(1.0)
    assert parameters_digest(model) != before


def test_embeddings_are_read_though_peft_trains_a_copy_since_it_saves_both_where_they_were_resized():
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier", "word_embeddings"])
    model = get_peft_model(tiny_bert(), config)
    saved = get_peft_model_state_dict(model, save_embedding_layers=True)
    assert any("original_module" in name for name in saved)
    before = parameters_digest(model)
    with torch.no_grad():
        model.get_input_embeddings().original_module.weight.add_(1.0)
    assert parameters_digest(model) != before


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (3, 5)), (torch.bfloat16, (7, 8)), (torch.int8, ()), (torch.bool, (0,))]
)
def test_every_shape_and_dtype_and_place_in_memory_is_read_to_its_end(dtype, shape):
    values = torch.ones(shape, dtype=dtype)
    digest = parameters_digest(Values(values))
    within = torch.ones(values.numel() + 1, dtype=dtype)[1:].view(shape)
    backwards = values.T.contiguous().T if values.dim() > 1 else values.clone()
    assert parameters_digest(Values(within)) == parameters_digest(Values(backwards)) == digest
    if values.numel():
        values.view(-1)[-1] = 0
        assert parameters_digest(Values(values)) != digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(13, 3), (13,), (1, 5)])
def test_parts_add_up_to_the_whole_wherever_rows_end(shape, number, dtype, monkeypatch):
    """In the midst of a word of eight bytes too, and where a process has no row."""
    whole = torch.randint(-99, 99, shape).to(dtype)
    rows = -(-len(whole) // number)
    found = torch.zeros(2, dtype=torch.int64)
    for rank in range(number):
        monkeypatch.setattr(digests, "first_row", lambda value, rank=rank: min(rank * rows, len(value)))
        monkeypatch.setattr(digests, "part_here", lambda value, rank=rank: value[rank * rows : (rank + 1) * rows])
        found += digests.sums_of_rows(whole)
    assert torch.equal(found, sums_of_bytes(whole))
