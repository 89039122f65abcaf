"""Mixtures of experts: fused experts of three dimensions, routers, shared experts, and adapters of these."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from doppler_hf.privacy.clipping.experts import ExpertBlock
from tests.support.per_example import TOLERANCE, book_keeping, gradients_of_each, median_norm, norm_of
from tests.support.tiers import further
from tests.support.tolerances import RAISED

VOCABULARY, BATCH, LENGTH = 40, 3, 7
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, num_experts_per_tok=2, use_cache=False,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
FOUR = dict(num_experts=4)
ARCHITECTURES = {
    "mixtral": dict(num_local_experts=4),
    "qwen2_moe": FOUR | dict(moe_intermediate_size=8, shared_expert_intermediate_size=8),
    "qwen3_moe": FOUR | dict(moe_intermediate_size=8, head_dim=8),
    "granitemoe": dict(num_local_experts=4),
    "olmoe": FOUR,
    "gpt_oss": dict(num_local_experts=4, head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    "deepseek_v3": dict(
        moe_intermediate_size=8, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, num_key_value_heads=2,
    ),
}  # fmt: skip
TRAINED = {
    "all": None,
    "adapters of experts": dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=["o_proj"]),
    "all-linear": dict(target_modules="all-linear"),
}


def built(architecture, trained, *, dtype=torch.float64, experts="eager"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(SIZES | ARCHITECTURES[architecture]))
    model = AutoModelForCausalLM.from_config(config)
    if trained is not None:
        model = get_peft_model(model, LoraConfig(r=2, **trained))
    for parameter in model.parameters():
        if not parameter.any():  # routers, or the second halves of adapters
            torch.nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation(experts)
    return model.to(dtype).train()


def losses_of(model):
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def losses(index=slice(None)):
        logits = model(input_ids=ids[index], attention_mask=torch.ones_like(ids[index])).logits
        return F.cross_entropy(logits[:, :-1].mT, ids[index, 1:], reduction="none").mean(dim=1)

    return losses


def assert_sums_are_of_each_alone(model, *, in_float32=False):
    losses = losses_of(model)
    each = gradients_of_each(model, losses, BATCH)
    bound = median_norm(each)
    with book_keeping(model, max_grad_norm=bound, clipping="vanilla") as clipped:
        clipped.backward(losses())
        assert any("one record after another" in how for how in clipped.fallbacks.values())
        assert clipped.sums.keys() == each[0].keys()
        for name, total in clipped.sums.items():
            expected = sum(min(1.0, bound / norm_of(one.values())) * one[name] for one in each)
            # Norms in float32 are raised by so much, of each example's share of the sum, which is C at most.
            tolerance = dict(rtol=0, atol=2 * BATCH * (RAISED - 1) * bound) if in_float32 else TOLERANCE
            torch.testing.assert_close(total, expected, **tolerance)
    return each


CASES = [(architecture, trained) for architecture in ARCHITECTURES for trained in TRAINED]
# Of these "all-linear" is attention alone.
CASES = [case for case in CASES if case not in {("granitemoe", "all-linear"), ("gpt_oss", "all-linear")}]


# PEFT names ranks for experts that deeper layers of the model have alone.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("architecture", "trained"),
    further(CASES, quick=[("qwen3_moe", "all"), ("qwen3_moe", "adapters of experts"), ("mixtral", "adapters of experts")]),
)
def test_clipped_sums_are_those_of_a_loop_over_examples(architecture, trained):
    each = assert_sums_are_of_each_alone(built(architecture, TRAINED[trained]))
    # Experts that one example reaches and another does not, and a gradient in each part of a block.
    of_experts = [name for name in each[0] if re.search("experts|gate|router", name)]
    assert of_experts
    assert all(sum(one[name].abs().sum() for one in each) > 0 for name in of_experts)


@pytest.mark.parametrize("experts", further(["grouped_mm", "batched_mm"], quick=["grouped_mm"]))
def test_what_computes_experts_does_not_matter(experts):
    """That of Transformers by default, in the only dtype of a CPU that it knows, and with checkpointing."""
    model = built("qwen3_moe", None, dtype=torch.float32, experts=experts)
    model.gradient_checkpointing_enable()
    assert_sums_are_of_each_alone(model, in_float32=True)


def test_frozen_blocks_stay_as_they_are():
    model = built("qwen3_moe", dict(target_modules=["q_proj", "v_proj"]))
    with book_keeping(model, max_grad_norm=1.0) as clipped:
        clipped.backward(losses_of(model)())
        assert clipped.fallbacks == {}
        assert not any(isinstance(vars(module).get("forward"), ExpertBlock) for module in model.modules())
