"""Models that are refused by their settings, and train with the fix that the message names."""

import re

import pytest
import torch
from peft import (
    AdaLoraConfig,
    EvaConfig,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from transformers import AlbertConfig, AlbertForSequenceClassification, BertForSequenceClassification

from doppler_hf import DopplerTrainer
from tests.support.adapters import config_of, takes_prefix
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import checked_trainer_of, trained


def of_eva():
    """LoRA whose first weights are the main directions of the training data."""
    eva = EvaConfig(use_label_mask=False, tau=0.5)
    lora = LoraConfig(target_modules=["query"], r=2, init_lora_weights="eva", eva_config=eva)
    model = get_peft_model(tiny_bert(), lora, low_cpu_mem_usage=True)
    rows = text_data()
    initialize_lora_eva_weights(model, [pad(rows.select(range(start, start + 8))) for start in (0, 8, 16)])
    return model


def named(kind):
    model = get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"], r=2))
    model.peft_config["default"].init_lora_weights = kind
    return model


def of_corda(name="default"):
    """LoRA whose first weights are directions of the inputs of its layers, and are taken out of the base model."""
    corda = CordaConfig(corda_method="kpm")
    config = LoraConfig(target_modules=["value"], r=2, init_lora_weights="corda", corda_config=corda, task_type="SEQ_CLS")
    model, rows = tiny_bert(), text_data()
    preprocess_corda(model, config, run_model=lambda: [model(**pad([row])) for row in rows])
    return get_peft_model(model, config, adapter_name=name)


@pytest.mark.parametrize("made", [of_eva, lambda: named("eva")])
def test_adapters_that_begin_with_weights_of_data_are_refused_unless_the_data_are_public(tmp_path, made):
    trainer = checked_trainer_of(tmp_path, model=made(), max_steps=1)
    with refused("adapters-of-data"):
        trainer.train()
    assert trainer.privacy.ledger is None
    trainer.model.peft_config["default"].init_lora_weights = True
    assert trained(trainer).state.global_step == 1


@pytest.mark.filterwarnings("ignore:`corda_config` specified but will be ignored")
@pytest.mark.parametrize(
    ("made", "folder"), [(of_corda, ""), (lambda: of_corda("mine"), "mine"), (lambda: named("lora_ga"), "")]
)
def test_of_public_data_base_and_adapter_are_saved_and_what_is_trained_is_loaded_again(tmp_path, made, folder, monkeypatch):
    """A saved adapter of CorDA or LoRA-GA alone does not fit the base model that it was trained with."""
    model = made()
    with refused("adapters-of-data") as refusal:
        checked_trainer_of(tmp_path, model=model).train()
    lines = re.search(r"train what you load: (.*)\.$", str(refusal.value))[1]
    monkeypatch.chdir(tmp_path)
    scope = dict(model=model, PeftModel=PeftModel, BertForSequenceClassification=BertForSequenceClassification)
    exec(lines, scope)
    trainer = trained(checked_trainer_of(tmp_path, model=scope["model"], max_steps=2))
    trainer.save_model()
    again = PeftModel.from_pretrained(
        BertForSequenceClassification.from_pretrained("base"), f"{trainer.args.output_dir}/{folder}"
    )
    batch = {key: value for key, value in pad(list(text_data(8))).items() if key != "labels"}
    found, expected = (each.eval()(**batch).logits for each in (again, trainer.model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("base", "rate"), [("adam_bc", None), ("sgd", 1e-2)])
def test_adalora_is_refused_once_with_what_trains(tmp_path, base, rate):
    options = dict(base_optimizer=base, learning_rate=rate, max_steps=1)
    adalora = get_peft_model(tiny_bert(), AdaLoraConfig(target_modules=["query"], total_step=6, tinit=1, tfinal=1))
    with refused("penalty-on-weights", match=r"AdaLoraConfig.* LoraConfig\."):
        checked_trainer_of(tmp_path, model=adalora, **options).train()
    lora = get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"]))
    assert trained(checked_trainer_of(tmp_path, model=lora, **options)).state.global_step == 1


def test_the_error_of_a_layer_without_a_rule_is_shown(tmp_path):
    loha = get_peft_model(tiny_bert(), LoHaConfig(target_modules=["query"], r=2))
    with refused("layer-without-rule", match=r"\(Linear\).* RuntimeError \(vmap: called random"):
        checked_trainer_of(tmp_path, model=loha, max_steps=1).train()


def trains(tmp_path, model, **options):
    return trained(checked_trainer_of(tmp_path, model=model, max_steps=1, **options)).state.global_step == 1


def lora(**options):
    return get_peft_model(tiny_bert(), LoraConfig(**(dict(target_modules=["query"], r=2) | options)))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused_and_rows_of_tokens_train_by_peft(tmp_path, register):
    model = tiny_bert()
    getattr(model.get_input_embeddings().weight, register)(lambda gradient: None)
    with refused("gradient-hook", match="TrainableTokensConfig"):
        checked_trainer_of(tmp_path, model=model, max_steps=1).train()
    tokens = [*range(40, 50)]
    config = TrainableTokensConfig(target_modules=["word_embeddings"], token_indices=tokens)
    assert trains(tmp_path / "tokens", get_peft_model(tiny_bert(), config))
    assert trains(tmp_path / "lora", lora(trainable_token_indices={"word_embeddings": tokens}))


def test_a_frozen_parameter_may_have_a_hook(tmp_path):
    model = lora()
    weight = model.get_input_embeddings().weight.requires_grad_(True)
    weight.register_hook(lambda gradient: gradient)
    weight.requires_grad_(False)
    assert trains(tmp_path, model)


def test_a_model_of_mixed_adapters_is_refused_and_one_kind_trains(tmp_path):
    config = LoraConfig(target_modules=["query"], r=2)
    with refused("mixed-adapters"):
        checked_trainer_of(tmp_path, model=get_peft_model(tiny_bert(), config, mixed=True), max_steps=1).train()
    assert trains(tmp_path, get_peft_model(tiny_bert(), config))


@pytest.mark.parametrize(("option", "kind"), [("velora_config", "VeloraConfig"), ("monteclora_config", "MontecloraConfig")])
def test_a_variant_of_lora_is_refused_by_its_option(tmp_path, option, kind):
    model = lora(**{option: config_of(kind)})
    with refused("variant-of-lora", match=option):
        checked_trainer_of(tmp_path, model=model, max_steps=1).train()
    assert trains(tmp_path, lora())


def test_alora_is_refused_by_its_option_and_trains_as_lora(tmp_path):
    model = lora()
    model.peft_config["default"].alora_invocation_tokens = [7]
    with refused("variant-of-lora", match="alora_invocation_tokens"):
        checked_trainer_of(tmp_path, model=model, max_steps=1).train()
    assert trains(tmp_path, lora(alora_invocation_tokens=None))


def test_the_weight_of_a_linear_layer_belongs_to_target_modules(tmp_path):
    with refused("weight-of-a-linear-layer", match="target_modules"):
        checked_trainer_of(tmp_path, model=lora(target_modules=[], target_parameters=["query.weight"]), max_steps=1).train()
    assert trains(tmp_path, lora())


def test_a_merged_model_is_frozen_until_it_is_told_otherwise(tmp_path):
    merged = lora().merge_and_unload()
    with refused("nothing-trained", match=r"model\.requires_grad_\(True\)"):
        checked_trainer_of(tmp_path, model=merged, max_steps=1).train()
    assert trains(tmp_path, merged.requires_grad_(True))


class GradientPenalty(DopplerTrainer):
    """Adds the size of a gradient to each loss."""

    def compute_per_sample_loss(self, model, inputs):
        outputs = model(**inputs, output_hidden_states=True)
        losses = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        (slopes,) = torch.autograd.grad(losses.sum(), outputs.hidden_states[0], create_graph=True)
        return losses + slopes.square().sum(dim=(1, 2))


class GradientPenaltyWhateverTheMode(GradientPenalty):
    def compute_per_sample_loss(self, model, inputs):
        with torch.enable_grad():
            return super().compute_per_sample_loss(model, inputs)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("cls", [GradientPenalty, GradientPenaltyWhateverTheMode])
def test_a_gradient_in_the_loss_is_refused(tmp_path, cls, is_checked):
    trainer = checked_trainer_of(tmp_path, cls=cls, max_steps=1, grad_sample_self_check=is_checked)
    with refused("gradient-in-the-loss"):
        trainer.train()


def test_counts_of_tokens_are_taken_in_each_record_and_noted(tmp_path, capsys):
    """Torch would divide by counts in the batch; the engine's gradients are those of each example alone (test_layers.py)."""
    for is_scaled in (True, False):
        model = tiny_bert()
        model.bert.embeddings.word_embeddings.scale_grad_by_freq = is_scaled
        assert trained(checked_trainer_of(tmp_path / str(is_scaled), model=model)).state.global_step == 4
        assert ("scale_grad_by_freq=True" in capsys.readouterr().out) == is_scaled


def tiny_albert():
    torch.manual_seed(0)
    sizes = dict(embedding_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = AlbertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return AlbertForSequenceClassification(config)


def with_prompt(base, config):
    return get_peft_model(base(), config(task_type="SEQ_CLS", num_virtual_tokens=2))


@pytest.mark.parametrize("base", [tiny_bert, tiny_albert])
def test_a_prefix_trains_or_is_refused_with_prompts_in_its_place(tmp_path, base):
    model = with_prompt(base, PrefixTuningConfig)
    if takes_prefix(model):
        assert trained(checked_trainer_of(tmp_path, model=model, max_steps=1)).state.global_step == 1
        return
    trainer = checked_trainer_of(tmp_path, model=model, max_steps=1)
    with refused("no-place-for-a-prefix", match="PromptTuningConfig or LoraConfig"):
        trainer.train()
    assert trainer.privacy.ledger is None
    model = with_prompt(base, PromptTuningConfig)
    assert trained(checked_trainer_of(tmp_path / "prompts", model=model, max_steps=1)).state.global_step == 1
