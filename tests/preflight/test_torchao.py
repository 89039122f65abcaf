"""Weights of torchao are refused before the first step, and what the message names trains instead."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.support.tiny import tiny_bert
from tests.support.trainers import checked_trainer_of, refused_training, trained


class Quantized(torch.Tensor):
    """As torchao's tensors, which have rules for few operations."""


Quantized.__module__ = "torchao.quantization.quantize_.workflows.int8"


class Scaled(nn.Linear):
    """As torchao's `Float8Linear`."""


Scaled.__module__ = "torchao.float8.float8_linear"


def with_adapters(model):
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


@pytest.mark.parametrize("kind", ["weights", "layers"])
def test_torchao_is_refused_and_adapters_on_bfloat16_train(tmp_path, kind):
    model = with_adapters(tiny_bert())
    layer = model.base_model.model.bert.encoder.layer[0].intermediate
    if kind == "weights":
        layer.dense.weight = nn.Parameter(layer.dense.weight.detach().as_subclass(Quantized), requires_grad=False)
    else:
        layer.dense = Scaled(16, 16).requires_grad_(False)
    said = refused_training(tmp_path, "torchao-weights", model=model, match="intermediate.dense")
    assert "dtype=torch.bfloat16" in said
    mended = with_adapters(tiny_bert().to(torch.bfloat16))
    assert trained(checked_trainer_of(tmp_path, model=mended)).state.global_step == 4
