"""Models that are refused by their settings, and train with the fix that the message names."""

import pytest
from peft import AdaLoraConfig, EvaConfig, LoHaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights

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


@pytest.mark.parametrize("made", [of_eva, lambda: named("corda"), lambda: named("lora_ga")])
def test_adapters_that_begin_with_weights_of_data_are_refused_unless_the_data_are_public(tmp_path, made):
    trainer = checked_trainer_of(tmp_path, model=made(), max_steps=1)
    with refused("adapters-of-data"):
        trainer.train()
    assert trainer.privacy.ledger is None
    trainer.model.peft_config["default"].init_lora_weights = True
    assert trained(trainer).state.global_step == 1


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
