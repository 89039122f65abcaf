"""Random inputs are like those of a training: nothing in them repeats or cancels."""

import pytest
import torch
from transformers import BertConfig, GPT2Config, ViTConfig

from doppler_hf.workloads.lora import LoraArguments
from doppler_hf.workloads.random_model import RandomModel

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
CASES = {
    "text-classification": (BertConfig(vocab_size=500, max_position_embeddings=16, **SMALL), 12),
    "causal-lm": (GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0), 12),
    "image-classification": (ViTConfig(image_size=16, patch_size=8, **SMALL), None),
}


@pytest.mark.parametrize("task", CASES)
def test_they_are_of_all_words_but_those_that_end_a_text(task, tmp_path):
    config, length = CASES[task]
    config.save_pretrained(tmp_path)
    random = RandomModel(str(tmp_path), task=task, length=length, lora=LoraArguments(), device="cpu")
    inputs = random.batch(400)
    assert len(inputs["labels"].unique()) > 1
    if "input_ids" in inputs:
        words = set(inputs["input_ids"].flatten().tolist())
        assert words == set(range(500)) - {0}  # the padding of the one, the end of the other
        assert torch.equal(inputs["attention_mask"], torch.ones_like(inputs["input_ids"]))
