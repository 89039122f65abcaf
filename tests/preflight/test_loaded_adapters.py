"""A saved adapter, once it is loaded, gives the trained model back, or the run is refused before its first step."""

import copy
import importlib

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from doppler_hf.preflight import loaded_adapters
from doppler_hf.preflight.loaded_adapters import EXACT, difference_when_loaded, refuse_adapters_that_load_differently
from tests.support.adapters import add_adapter, config_of
from tests.support.refusals import refused
from tests.support.tiers import further, thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import trained, trainer_of
from tests.support.unspent import refusal_unspent

QUERY = dict(target_modules=["query"])
PISSA = "pissa_niter_4"


def lora(start=True, **options):
    return LoraConfig(r=2, task_type="SEQ_CLS", init_lora_weights=start, **QUERY | options)


def by_transformers():
    return add_adapter(tiny_bert(), lora(PISSA, modules_to_save=["classifier"]))


MODELS = {
    "peft": lambda start: get_peft_model(tiny_bert(), lora(start)),
    "of another name": lambda start: get_peft_model(tiny_bert(), lora(start), adapter_name="mine"),
    "all linear layers": lambda start: get_peft_model(tiny_bert(), lora(start, target_modules="all-linear")),
    "beside a table": lambda start: get_peft_model(tiny_bert(), lora(start, target_modules=["query", "word_embeddings"])),
}


@pytest.mark.parametrize("start", [PISSA, *thorough("pissa_niter_16")])
@pytest.mark.parametrize("made", MODELS)
def test_an_adapter_that_is_loaded_with_other_random_numbers_is_refused_before_the_first_step(tmp_path, made, start):
    said = refusal_unspent(trainer_of(tmp_path, model=MODELS[made](start)), "adapter-loads-differently")
    assert "init_lora_weights='pissa'" in said


def test_an_adapter_that_transformers_attached_is_refused_too(tmp_path):
    refusal_unspent(trainer_of(tmp_path, model=by_transformers()), "adapter-loads-differently")


def logits(model):
    batch = {name: value for name, value in pad(list(text_data(8))).items() if name != "labels"}
    with torch.no_grad():
        return model.eval()(**batch).logits


def loaded(folder):
    base = tiny_bert()
    torch.manual_seed(7)
    return PeftModel.from_pretrained(base, folder)


def base_weight(model):
    return next(value for name, value in model.named_parameters() if name.endswith("query.base_layer.weight"))


@pytest.mark.parametrize(("start", "is_equal"), [("pissa", True), (PISSA, False)])
def test_what_is_refused_loads_another_model_and_the_mend_loads_the_trained_one(tmp_path, start, is_equal):
    trainer = trainer_of(tmp_path, model=get_peft_model(tiny_bert(), lora(start)), rehearse=is_equal)
    trained(trainer).save_model()
    again = loaded(trainer.args.output_dir)
    norms = [float(value.norm()) for value in (base_weight(again) - base_weight(trainer.model), base_weight(again))]
    assert (norms[0] < 1e-6 * norms[1]) == is_equal
    assert is_equal or norms[0] > 0.1 * norms[1]
    if is_equal:
        torch.testing.assert_close(logits(again), logits(trainer.model), rtol=0, atol=1e-6)


def test_code_of_the_users_own_may_save_more(tmp_path):
    class Whole(PeftModel):
        def save_pretrained(self, folder, **_):
            torch.save(self.state_dict(), f"{folder}/weights.pt")

    model = get_peft_model(tiny_bert(), LoraConfig(r=2, init_lora_weights=PISSA, **QUERY))
    model.__class__ = Whole
    trained(trainer_of(tmp_path, model=model, save_strategy="no"))


# --- measured kinds of adapters ---

CONFIGS = {
    "AdaLoraConfig": dict(init_r=4, target_r=2, total_step=10),
    "AdamssConfig": dict(r=4),
    "BOFTConfig": dict(boft_block_size=4),
    "C3AConfig": dict(block_size=4),
    "DeloraConfig": dict(r=2),
    "FourierFTConfig": dict(n_frequency=10),
    "HRAConfig": dict(r=2),
    "IA3Config": dict(feedforward_modules=[]),
    "LNTuningConfig": dict(target_modules=["LayerNorm"]),
    "LoHaConfig": dict(r=2),
    "LoKrConfig": dict(r=2),
    "MissConfig": dict(r=2),
    "OFTConfig": dict(r=0, oft_block_size=4),
    "OSFConfig": {},
    "PsoftConfig": dict(r=2, psoft_svd="lowrank"),
    "RandLoraConfig": dict(r=2, save_projection=False),
    "RoadConfig": dict(group_size=4),
    "ShiraConfig": dict(r=2),
    "VBLoRAConfig": dict(num_vectors=8, vector_length=8, topk=2, save_only_topk_weights=True),
    "VeraConfig": dict(r=2, save_projection=False, projection_prng_key=5),
    "WaveFTConfig": dict(n_frequency=10),
}
VARIANTS = {
    "dora": dict(use_dora=True),
    "rank-stabilized": dict(use_rslora=True),
    "embeddings": dict(target_modules=["query", "word_embeddings"]),
    "all linear": dict(target_modules="all-linear"),
    "ranks by name": dict(rank_pattern={"query": 1}, alpha_pattern={"query": 3}),
    "some layers": dict(layers_to_transform=[0]),
    "a pattern": dict(target_modules=r".*layer\.0.*query"),
    "tokens": dict(trainable_token_indices=[3, 4]),
}


@pytest.mark.filterwarnings("ignore")  # PEFT warns of several of these options
@pytest.mark.parametrize("name", further([*CONFIGS], quick=["VeraConfig", "FourierFTConfig"]))
def test_other_kinds_of_adapters_load_exactly(tmp_path, name):
    model = get_peft_model(tiny_bert(), config_of(name, **QUERY | CONFIGS[name]))
    assert difference_when_loaded(model, "default", folder=tmp_path) < 1e-6
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", [*EXACT])
def test_the_first_values_that_are_not_tried_load_exactly(tmp_path, start):
    try:
        model = get_peft_model(tiny_bert(), lora(start))
    except ValueError as error:
        pytest.skip(f"the installed PEFT does not know {start!r}: {error}")
    assert difference_when_loaded(model, "default", folder=tmp_path) < 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_tried_as_they_are(tmp_path, variant):
    for start, is_equal in ((True, True), (PISSA, False)):
        model = get_peft_model(tiny_bert(), lora(start, **VARIANTS[variant]))
        difference = difference_when_loaded(model, "default", folder=tmp_path)
        assert (difference < 1e-6) == is_equal, difference


def test_layers_of_gpt2_are_tried(tmp_path):
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    for start, is_equal in ((True, True), (PISSA, False)):
        adapter = LoraConfig(r=2, init_lora_weights=start, target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(GPT2LMHeadModel(config), adapter)
        assert (difference_when_loaded(model, "default", folder=tmp_path) < 1e-6) == is_equal


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.LayerNorm(8), nn.Linear(8, 2)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_convolutions_and_norms_are_tried(tmp_path):
    for config in (LoraConfig(r=2, target_modules=["first"]), peft.LNTuningConfig(target_modules=["norm"])):
        assert difference_when_loaded(get_peft_model(Images(), config), "default", folder=tmp_path) == 0.0


def test_a_layer_that_is_too_large_or_of_an_unknown_kind_is_not_tried(tmp_path, monkeypatch):
    model = get_peft_model(tiny_bert(), lora(PISSA))
    monkeypatch.setattr(loaded_adapters, "_MOST_WEIGHTS", 100)
    assert difference_when_loaded(model, "default", folder=tmp_path) is None


def test_nothing_of_the_model_and_of_its_random_numbers_changes(tmp_path):
    model = get_peft_model(tiny_bert(), lora(PISSA))
    config, state, generator = (
        model.peft_config["default"].to_dict(),
        copy.deepcopy(model.state_dict()),
        torch.get_rng_state(),
    )
    assert difference_when_loaded(model, "default", folder=tmp_path) > 1e-3
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.peft_config["default"].to_dict() == config
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_another_kind_whose_frozen_part_is_drawn_again_is_refused_and_lora_trains(tmp_path, monkeypatch):
    """AdaMSS of PEFT 0.19 drew its projection without a seed."""
    try:
        layer = importlib.import_module("peft.tuners.adamss.layer")
    except ImportError:
        pytest.skip("the installed PEFT has no AdaMSS")
    seeded = layer.slice_pca

    def unseeded(*args, **options):
        given = {"random_seed": int(torch.randint(2**31, ()))} if "random_seed" in options else {}
        return seeded(*args, **options | given)

    monkeypatch.setattr(layer, "slice_pca", unseeded)
    trainer = trainer_of(tmp_path, model=get_peft_model(tiny_bert(), peft.AdamssConfig(r=4, **QUERY)))
    with refused("adapter-loads-differently", match=r"AdamssConfig.* use LoraConfig\."):
        refuse_adapters_that_load_differently(trainer)
    trained(trainer_of(tmp_path, model=get_peft_model(tiny_bert(), lora())))
