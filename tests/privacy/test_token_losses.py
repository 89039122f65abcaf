"""The losses of many logits, a few tokens at a time: as those of all at once, in a quarter of the memory."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from doppler_hf.privacy import token_losses as module
from doppler_hf.privacy.losses import per_sample_losses, without_adapters
from doppler_hf.privacy.pair_losses import REFERENCES, log_ratios
from doppler_hf.run.planning.memory import Peak
from tests.support.devices import Asked, far_away
from tests.support.models import IGNORED, VOCABULARY, decoder_options, gpt2_lm, llama_lm, moved, qwen2_lm
from tests.support.per_example import NORM_RULES, TOLERANCE, assert_equals_loop, assert_same_sums, book_keeping, trainable
from tests.support.tiers import combined, thorough

BATCH, LENGTH = 3, 20  # no shorter than the models are wide
WIDE, LONG = 151_936, 4096


def gemma2():
    """Caps its logits, and its scores of attention."""
    options = decoder_options("eager") | dict(head_dim=8, final_logit_softcapping=0.5, sliding_window=LENGTH)
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**options))


MODELS = {
    "gpt2": gpt2_lm,
    "llama": llama_lm,
    "qwen2": qwen2_lm,
    "gemma2": gemma2,
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**decoder_options("sdpa"), logits_scaling=3.0)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**decoder_options("sdpa"), logit_scale=2.0)),
}
ADAPTED = {
    "full": lambda model: model,
    "lora": lambda model: with_lora(model, "q_proj|c_attn"),
    "head": lambda model: with_lora(model, "q_proj|c_attn|lm_head"),
    "prompt": lambda model: get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}


def with_lora(model, targets):
    is_transposed = isinstance(model, hf.GPT2LMHeadModel)
    return get_peft_model(model, LoraConfig(r=4, target_modules=f".*({targets})", fan_in_fan_out=is_transposed))


def made(name, adapted="full", dtype=torch.float64):
    torch.manual_seed(0)
    return moved(ADAPTED[adapted](MODELS[name]()).to(dtype).train())


def batch():
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 5] = ids[:, 3]
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 15])[:, None]).long()
    is_answer = (mask == 1) & (torch.arange(LENGTH) > 2)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(is_answer, IGNORED)}


def losses_of(model, index=slice(None)):
    inputs = {name: value[index] for name, value in batch().items()}
    return per_sample_losses(model, inputs, base_model=without_adapters(model))


@pytest.fixture
def heads(monkeypatch):
    """The shapes of logits, of which there are at most seven places of an example at a time."""
    shapes, of_each = [], module._per_token
    monkeypatch.setattr(module, "CHUNK", BATCH * VOCABULARY * 7)
    monkeypatch.setattr(
        module, "_per_token", lambda logits, labels: shapes.append(logits.shape[1]) or of_each(logits, labels)
    )
    return shapes


def losses_and_gradients(model):
    losses = losses_of(model)
    loss = (losses * torch.arange(1, BATCH + 1)).sum()
    return losses, torch.autograd.grad(loss, [*trainable(model).values()], allow_unused=True)


@pytest.mark.parametrize(("name", "adapted"), combined(MODELS, ["full", "lora", "head"]))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_and_gradients_are_those_of_all_logits_at_once(name, adapted, dtype, heads, monkeypatch):
    if adapted == "head" and name in ("gpt2", "qwen2", "gemma2", "cohere"):
        pytest.skip("the head is the embedding table")
    model = made(name, adapted, dtype)
    losses, gradients = losses_and_gradients(model)
    assert max(heads) == 7
    monkeypatch.setattr(module, "CHUNK", 2**40)
    heads.clear()
    expected, of_all = losses_and_gradients(model)
    assert heads == [LENGTH]
    # A loss and a gradient add up some hundred numbers.
    close = dict(rtol=200 * torch.finfo(dtype).eps, atol=200 * torch.finfo(dtype).eps)
    torch.testing.assert_close(losses, expected, **close)
    for one, other in zip(gradients, of_all, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize(
    ("name", "adapted"), [("qwen2", "full"), ("llama", "full"), ("gpt2", "lora"), ("llama", "head"), ("llama", "prompt")]
)
@pytest.mark.parametrize("norm_rule", NORM_RULES)
def test_clipped_sums_are_those_of_a_loop_over_single_examples(name, adapted, norm_rule, heads):
    model = made(name, adapted)
    assert_equals_loop(model, lambda index: losses_of(model, index), BATCH, norm_rule=norm_rule)
    assert 1 < max(heads) <= LENGTH + 3


def test_with_checkpointing_sums_are_the_same(heads):
    model = made("llama")
    sums = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with book_keeping(model) as clipped:
            clipped.backward(losses_of(model))
            sums.append(clipped.sums)
    assert_same_sums(*sums)


def test_log_ratios_of_pairs_are_those_of_all_logits_at_once(heads, monkeypatch):
    model = made("llama", "lora")
    ids = batch()["input_ids"][:2]
    inputs = {"input_ids": ids[None], "completion_mask": (torch.arange(LENGTH) > 4).expand(1, 2, -1)}
    inputs |= dict.fromkeys(REFERENCES, torch.zeros(1))
    in_chunks = log_ratios(model, inputs)
    assert max(heads) < LENGTH
    monkeypatch.setattr(module, "CHUNK", 2**40)
    torch.testing.assert_close(in_chunks, log_ratios(model, inputs), **TOLERANCE)


def test_evaluations_and_what_has_no_body_have_all_logits(heads):
    model, found = made("llama"), []
    with torch.no_grad(), model.register_forward_hook(lambda module, args, outputs: found.append(outputs.logits.shape)):
        losses_of(model)
    assert found == [(BATCH, LENGTH, VOCABULARY)]
    opt = hf.OPTForCausalLM(hf.OPTConfig(**decoder_options("sdpa") | dict(ffn_dim=16, word_embed_proj_dim=16)))
    assert losses_of(opt).isfinite().all()  # whose forward calls its decoder, and not the body
    assert heads == [LENGTH, LENGTH]


def test_a_model_is_left_as_it_was(heads):
    model = made("llama", "lora")
    base = without_adapters(model)
    before = dict(vars(base.base_model))
    losses_of(model)
    base.base_model.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses_of(model)
    assert vars(base.base_model).keys() == before.keys()
    assert "forward" not in vars(base.base_model)


def peak_of(model, *, length):
    """The most bytes in use while losses are computed and back-propagated, which waits for nothing."""
    ids = torch.zeros(1, length, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with far_away() as move:
        model, inputs = move(model), move(inputs)
        with book_keeping(model, on_accelerator=True) as clipped:
            clipped.sums  # noqa: B018 # which are kept from draw to draw
            with Asked() as asked, Peak() as peak:
                clipped.backward(per_sample_losses(model, dict(inputs), base_model=without_adapters(model)))
    assert asked.waits == []
    return peak.most


def large(vocabulary, adapted):
    """One layer of a body, and a head of this many classes that is the embedding table."""
    if adapted == "full":  # what the fakes can compare: RMSNorm has no rule, whose fallback reads numbers
        sizes = dict(n_embd=64, n_layer=1, n_head=1, n_positions=LONG, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=vocabulary, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)
        )
    options = decoder_options("sdpa") | dict(
        vocab_size=vocabulary, hidden_size=64, num_attention_heads=1, num_hidden_layers=1
    )
    return ADAPTED[adapted](hf.Qwen2ForCausalLM(hf.Qwen2Config(**options, tie_word_embeddings=True)))


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(
    ("vocabulary", "length", "chunk", "adapted"),
    [
        (WIDE, LONG, module.CHUNK, "lora"),
        *thorough((5000, 512, 5000 * 32, "full"), (WIDE, LONG, module.CHUNK, "full"), (5000, 512, 5000 * 32, "lora")),
    ],
)
def test_a_quarter_of_the_memory_is_enough(adapted, vocabulary, length, chunk, monkeypatch):
    peaks = []
    for at_once in (chunk, 2**40):
        monkeypatch.setattr(module, "CHUNK", at_once)
        peaks.append(peak_of(large(vocabulary, adapted), length=length))
    assert 4 * peaks[0] <= peaks[1]
