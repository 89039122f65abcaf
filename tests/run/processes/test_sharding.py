"""What of FSDP is refused, what stays whole, and how a part of a weight is known; trainings are in end_to_end."""

import os

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from doppler_hf.privacy import ClippedGradients
from doppler_hf.run.digests import digests_of, parameters_digest, untrained_digest
from doppler_hf.run.processes.sharded_states import whole_state
from doppler_hf.run.processes.sharding import Sharding, groups_of, hidden_from_trainer, shared_by_layers
from tests.support.refusals import refused
from tests.support.tiny import tiny_bert
from tests.support.trainers import arguments

pytestmark = pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 is refused")

FIT = dict(
    fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False, activation_checkpointing=False,
    cpu_offload=False, auto_wrap_policy="TRANSFORMER_BASED_WRAP",
)  # fmt: skip


def asked(tmp_path, monkeypatch, *, world_size=2, plugin=(), **overrides):
    args = arguments(tmp_path, **overrides)
    monkeypatch.setattr(type(args), "world_size", world_size)
    args.fsdp_plugin_args = FIT | dict(plugin)
    return args


@pytest.mark.parametrize(
    ("plugin", "value"),
    [
        (dict(reshard_after_forward=False), "reshard_after_forward=True"),
        (dict(cpu_offload=True), "cpu_offload=None .*CPUOffloadPolicy"),
    ],
    ids=str,
)
def test_settings_that_a_private_run_cannot_have_are_refused(tmp_path, monkeypatch, plugin, value):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # which the plugin writes
    args = asked(tmp_path, monkeypatch, plugin=plugin)
    with refused("fsdp-option", match=value), hidden_from_trainer(args):
        pass
    assert args.fsdp_plugin_args is not None


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        (dict(world_size=1), "fsdp-in-one-process", "--num_processes"),
        (
            dict(optim_target_modules="all-linear", optim_args="rank=2", learning_rate=0.1),
            "fsdp-option",
            "optim_target_modules='all-linear'",
        ),
        (dict(bf16_full_eval=True), "fsdp-option", "bf16_full_eval=True"),
    ],
    ids=str,
)
def test_arguments_beside_it_are_refused(tmp_path, monkeypatch, options, code, value):
    with refused(code, match=value), hidden_from_trainer(asked(tmp_path, monkeypatch, **options)):
        pass


def test_transformers_is_not_told_in_the_meantime_only(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    args = asked(tmp_path, monkeypatch)
    with hidden_from_trainer(args) as plugin:
        assert isinstance(plugin, FullyShardedDataParallelPlugin)
        assert args.fsdp_plugin_args is None
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert args.fsdp_plugin_args is not None
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    with hidden_from_trainer(arguments(tmp_path)) as plugin:
        assert plugin is None


@pytest.fixture
def group(monkeypatch):
    # Where there is a GPU, torch would cut weights for it.
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lora(model, **options):
    return get_peft_model(model, LoraConfig(**(dict(r=2, target_modules=["query", "value"], task_type="SEQ_CLS") | options)))


def cut(model):
    sharding = Sharding(FullyShardedDataParallelPlugin(**FIT), device=torch.device("cpu"))
    sharding.cut(model)
    return sharding


@pytest.mark.usefixtures("group")
def test_what_is_trained_stays_whole_and_all_else_is_cut():
    model = lora(tiny_bert())
    names = {name: value.requires_grad for name, value in model.named_parameters()}
    sharding = cut(model)
    assert {name: not isinstance(value, DTensor) for name, value in model.named_parameters()} == names
    assert sharding.is_cut
    sharding.cut(model)  # nothing more
    next(value for value in model.parameters() if isinstance(value, DTensor)).requires_grad_()
    with refused("unfrozen-shards", match="'base_model.*"):
        sharding.cut(model)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("rank", [2, 8])
def test_much_that_is_trained_is_cut_too(rank):
    """Adapters of a tenth of all weights and more, or all of a model."""
    model = lora(tiny_bert(), r=rank)
    sharding = cut(model)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    is_cut = {isinstance(value, DTensor) for value in trained.values()}
    assert is_cut == {rank == 8}
    assert sharding.is_cut
    assert not any(group.reduce_grads for group in groups_of(model))  # no gradient leaves its process unclipped


def tokens():
    return {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "attention_mask": torch.ones(2, 3)}


@pytest.mark.usefixtures("group")
def test_clipped_sums_of_gathered_weights_are_those_of_whole_ones():
    def found(model):
        with ClippedGradients(model, max_grad_norm=0.1) as clipped:
            for rows in (slice(None), slice(1), slice(1, None)):  # added to what is there
                inputs = {name: value[rows] for name, value in tokens().items()}
                norms = clipped.backward(model(**inputs).logits.square().sum(dim=1))
            return norms, clipped.sums

    model = tiny_bert().double()
    expected = found(model)
    cut(model)
    torch.testing.assert_close(found(model), expected, rtol=1e-12, atol=1e-15)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("group")
def test_trained_shards_that_something_else_has_cut_are_refused():
    model = fully_shard(tiny_bert())
    with ClippedGradients(model) as clipped, refused("foreign-shards"):
        clipped.backward(model(**tokens()).logits.sum(dim=1))


@pytest.mark.usefixtures("group")
def test_trained_weights_of_several_types_are_refused():
    model = tiny_bert()
    model.bert.encoder.layer[0].output.dense.bfloat16()
    with refused("types-of-shards", match=r"torch\.bfloat16 and torch\.float32"):
        cut(model)


@pytest.mark.usefixtures("group")
def test_a_part_is_known_as_the_whole_until_it_changes():
    model = lora(tiny_bert())
    whole = digests_of(model), parameters_digest(model), untrained_digest(model)
    cut(model)
    assert (digests_of(model), parameters_digest(model), untrained_digest(model)) == whole
    value = next(value for value in model.parameters() if isinstance(value, DTensor)).to_local()
    before = value.detach().clone()
    with torch.no_grad():
        value.view(-1)[0] = torch.nextafter(value.view(-1)[0], torch.tensor(torch.inf))
    assert parameters_digest(model) != whole[1]
    assert untrained_digest(model) != whole[2]
    with torch.no_grad():
        value.copy_(before)
    assert parameters_digest(model) == whole[1]


@pytest.mark.usefixtures("group")
def test_a_whole_state_is_saved_and_loaded():
    model = tiny_bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    cut(model)
    state = whole_state(model)
    assert not any(isinstance(value, DTensor) for value in state.values())
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    other = {name: value + 1.0 for name, value in expected.items()}
    model.load_state_dict(other)
    torch.testing.assert_close(whole_state(model), other, rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_of_a_base_under_adapters_its_embeddings_are_saved_alone():
    model = lora(tiny_bert())
    names = set(model.state_dict())
    cut(model)
    frozen = [name for name in names - set(whole_state(model)) if "embeddings.word_embeddings" not in name]
    assert sorted(names - set(whole_state(model))) == sorted(frozen)
    assert {"base_model.model.bert.embeddings.word_embeddings.weight"} <= set(whole_state(model))
    assert all(".lora_" not in name and "modules_to_save" not in name for name in frozen)


def test_weights_that_more_than_the_head_shares_stay_whole():
    sizes = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(T5Config(**sizes)).requires_grad_(False)
    assert [value is t5.shared.weight for value in shared_by_layers(t5)] == [True]
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2)
    bart = BartForConditionalGeneration(BartConfig(vocab_size=50, d_model=16, decoder_attention_heads=2, **sizes))
    assert [value is bart.model.shared.weight for value in shared_by_layers(bart.requires_grad_(False))] == [True]
    assert shared_by_layers(tiny_bert().requires_grad_(False)) == []
