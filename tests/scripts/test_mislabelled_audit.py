"""Audits with mislabelled examples: their scores, what is refused, and the command from a recipe to a file."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn

from doppler_hf.audit.canaries import CANARY_COLUMN
from scripts.experiments.mislabelled_audit import GradientAuditTrainer, LossAuditTrainer, main
from tests.audit.test_audit import arguments, corrupted
from tests.support.models import gpt2_lm
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert


def tokens(number, *, labels=4, vocabulary=2000):
    drawn = np.random.default_rng(0).integers(5, vocabulary, size=(number, 8))
    columns = {"input_ids": drawn.tolist(), "attention_mask": [[1] * 8] * number}
    return Dataset.from_dict(columns | {"labels": (drawn[:, 0] * labels // vocabulary).tolist()})


def mislabelled(cls, tmp_path, *, num_canaries=64, **overrides):
    coins = np.random.default_rng(0).integers(2, size=num_canaries)
    options = dict(
        # Every example in every step: without noise nothing is left to chance.
        per_device_train_batch_size=16 + int(coins.sum()), learning_rate=1e-2, base_optimizer="adam", noise_multiplier=4.0,
    )  # fmt: skip
    return cls(
        model=tiny_bert(vocab_size=2000, num_labels=4, hidden_size=32, initializer_range=0.1),
        args=arguments(tmp_path, **(options | overrides)), train_dataset=tokens(16 + num_canaries),
        num_canaries=num_canaries, data_collator=pad, coin_seed=0,
    )  # fmt: skip


@pytest.mark.parametrize(("clipping", "lora"), [("vanilla", False), ("automatic", False), ("vanilla", True)])
def test_natural_score_is_the_product_with_the_clipped_gradient(clipping, lora, tmp_path):
    model = tiny_bert(num_labels=3)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["query"], modules_to_save=["classifier"]))
    bound, number = 0.4, 6
    trainer = GradientAuditTrainer(
        model=model, args=arguments(tmp_path, per_sample_max_grad_norm=bound, clipping=clipping), coin_seed=0,
        train_dataset=text_data(20, labels=3), num_canaries=number, data_collator=pad,
    )  # fmt: skip
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    seen = {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in named.items()}
    rows, shifts = trainer._canary_rows, trainer._label_shifts.tolist()
    trainer.begin_attack()
    trainer.see_gradient(seen)

    expected, labels = np.zeros(number), []
    model.eval()
    for row in rows:
        inputs = pad([row])
        labels.append((row["labels"] + shifts[row[CANARY_COLUMN]]) % 3)
        assert labels[-1] != row["labels"]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits, torch.tensor(labels[-1:]))
        gradient = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        norm = float(torch.cat([g.flatten() for g in gradient.values()]).norm())
        factor = min(1.0, bound / norm) if clipping == "vanilla" else bound / max(norm, 0.01)
        expected[row[CANARY_COLUMN]] = factor * sum(float((g * seen[name]).sum()) for name, g in gradient.items())
    np.testing.assert_allclose(trainer.scores, expected, rtol=0.01, atol=0.01 * np.abs(expected).max())

    trainer.end_attack()
    for label in set(labels):  # what all canaries of a label have in common is taken off
        alike = np.array(labels) == label
        np.testing.assert_allclose(
            trainer.scores[alike], expected[alike] - expected[alike].mean(), rtol=0.01, atol=0.01 * np.abs(expected).max()
        )


@pytest.mark.parametrize(("cls", "steps"), [*thorough((GradientAuditTrainer, 10)), (LossAuditTrainer, 20)])
def test_mislabelled_canaries_show_in_a_run_without_noise(cls, steps, monkeypatch, tmp_path):
    corrupted(monkeypatch, lambda mechanism, mean, released, step: mean)
    trainer = mislabelled(cls, tmp_path, max_steps=steps)
    result = trainer.audit()
    assert set(result.lower_bounds) == {"one run"}
    assert result.right_guesses >= 48  # of 64; 59 and 53 were seen, and by chance it is 32 ± 4


def test_what_has_no_wrong_label_is_refused(tmp_path):
    good = dict(args=arguments(tmp_path), model=tiny_bert(), train_dataset=text_data(), num_canaries=5, data_collator=pad)
    with pytest.raises(ValueError, match=r"num_canaries must be less than 24, .* got 24"):
        LossAuditTrainer(**(good | {"num_canaries": 24}))
    for model in (gpt2_lm(), tiny_bert(num_labels=1), nn.Linear(2, 1)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} is not a classifier of examples"):
            LossAuditTrainer(**(good | {"model": model}))


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize("attack", ["loss", *thorough("gradient")])
def test_the_command_writes_the_outcome_beside_the_recipe_s_run(attack, tmp_path, capsys):
    flags = ["--image_size=8", "--patch_size=4", "--hidden_size=8", "--num_layers=1", "--num_heads=1", "--max_steps=2"]
    path, out = tmp_path / "recipe.yaml", tmp_path / "out"
    path.write_text("dataset_name: digits\nnoise_multiplier: 2.0\nuse_cpu: true\n")
    main([attack, str(path), "--canaries", "30", "--report_to", "none", f"--output_dir={out}", "--workload=images", *flags])
    assert "No defect found" in " ".join(capsys.readouterr().out.split())
    assert [each.name for each in out.iterdir()] == ["privacy_audit.json"]
    written = json.loads((out / "privacy_audit.json").read_text())
    assert (written["canary_kind"], written["canaries"]) == ({"loss": "loss", "gradient": "natural"}[attack], 30)
