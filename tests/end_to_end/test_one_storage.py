"""Two parameters of one storage, as PEFT ties the adapters of tied embeddings: each has its gradient, noise and step."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from doppler_hf import DopplerTrainer
from tests.support.per_example import assert_equals_loop
from tests.support.tiny import pad
from tests.support.tolerances import of_optimizer_steps
from tests.support.trainers import OfLogits, On, assert_trained_alike, changing, checked_trainer_of, trained

MOMENTUM = dict(base_optimizer="adam", low_pass_filter="momentum", lr_scheduler_type="constant", weight_decay=0.1)


def with_adapters():
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "lm_head", "q_proj"], ensure_weight_tying=True)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)), config)


class Plain(nn.Module):
    """Has a table, and two layers of its numbers: one as they lie, and one turned."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16, dtype=dtype)
        self.back, self.head = (nn.Linear(*sizes, bias=False) for sizes in ((16, 50), (50, 16)))
        numbers = self.table.weight.data
        self.back.weight, self.head.weight = nn.Parameter(numbers), nn.Parameter(numbers.T)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.head(self.back(self.table(input_ids[:, 0])).tanh())


def pad_tokens(rows):
    batch = pad(rows)
    return batch | {"labels": batch["input_ids"].where(batch["attention_mask"] == 1, -100)}


CASES = {"adapters": (with_adapters, DopplerTrainer, pad_tokens), "plain": (Plain, OfLogits, pad)}


def trainer_of(tmp_path, case, **options):
    new, cls, collator = CASES[case]
    return checked_trainer_of(tmp_path, model=new(), collator=collator, **dict(cls=cls) | options)


def keeping(steps):
    """Return a callback that keeps the private gradient of each step by name."""

    def keep(model, **_):
        steps.append({name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.requires_grad})

    return On(pre_optimizer_step=keep)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("case", CASES)
def test_both_steps_are_made_as_by_torch_and_a_resumed_run_is_uninterrupted(tmp_path, case):
    options = MOMENTUM | dict(max_steps=4, save_strategy="steps", save_steps=2, noise_seed=1)
    trainer = trained(trainer_of(tmp_path, case, callbacks=[keeping(steps := [])], **options))
    model = CASES[case][0]()
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(expected.values(), lr=1e-2, weight_decay=0.1, foreach=False)
    for gradients in steps:
        for name, parameter in expected.items():
            parameter.grad = gradients[name]
        optimizer.step()
    atol = of_optimizer_steps(4, largest=max(p.abs().max().item() for p in expected.values()), dtypes=[torch.float32])
    for name, parameter in expected.items():
        torch.testing.assert_close(trainer.model.get_parameter(name).cpu(), parameter, rtol=0, atol=atol)
    resumed = trainer_of(tmp_path, case, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert_trained_alike(resumed, trainer)


def test_the_gradients_of_both_are_clipped_together(tmp_path):
    model, ids = Plain(torch.float64), torch.arange(30).view(5, 6)
    losses = lambda index: F.cross_entropy(model(ids[index]), ids[index][:, 0] % 16, reduction="none")  # noqa: E731
    assert_equals_loop(model, losses, 5)


def test_each_has_noise_of_its_own(tmp_path):
    trainer = trained(
        trainer_of(
            tmp_path,
            "plain",
            cls=changing(lambda losses, inputs: 1e-12 * losses, of=OfLogits),
            callbacks=[keeping(steps := [])],
        )
    )
    table, back, head = (
        torch.stack([step[f"{name}.weight"] for step in steps]).double() / trainer.privacy.settled_noise_std
        for name in ("table", "back", "head")
    )
    for first, second in ((table, back), (table, head.mT), (back, head.mT)):
        for both in (first + second, first - second):
            # χ² of 3,200 degrees of freedom, within five standard deviations.
            assert abs(both.square().sum() / 2 - 3200) < 5 * (2 * 3200) ** 0.5
