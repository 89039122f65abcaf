"""The trainer finds the loss of each kind of model, and an example's gradient is its own."""

import functools

import pytest
import torch
import transformers as hf
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

from doppler_hf import DopplerTrainer
from doppler_hf.privacy.losses import task_of
from tests.support.adapters import prefixed
from tests.support.models import moved
from tests.support.refusals import refused
from tests.support.tiers import combined
from tests.support.tiny import tiny_bert
from tests.support.trainers import arguments

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BERT = dict(**SIZES, **DROPOUT, max_position_embeddings=16, num_labels=4)
ROBERTA = dict(**SIZES, **DROPOUT, max_position_embeddings=20, num_labels=4)
GPT2 = dict(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=1)  # fmt: skip
ROTARY = dict(**SIZES, num_key_value_heads=1, max_position_embeddings=16)
T5 = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, num_labels=2,
          decoder_start_token_id=0)  # fmt: skip
BART = dict(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, dropout=0.0,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)  # fmt: skip
M2M100 = dict(attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0)


class NamedOtherwise(hf.GPT2LMHeadModel):
    """A subclass whose name says nothing of its task."""


MODELS = {
    "causal_lm": [
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        lambda: NamedOtherwise(hf.GPT2Config(**GPT2)),
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**ROTARY, tie_word_embeddings=True)),
    ],
    "seq2seq_lm": [
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
        lambda: hf.M2M100ForConditionalGeneration(hf.M2M100Config(**BART, **M2M100)),
    ],
    "masked_lm": [lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT))],
    "token_classification": [lambda: hf.RobertaForTokenClassification(hf.RobertaConfig(**ROBERTA))],
}
ADAPTED = {  # one model of each task
    "causal_lm": ("CAUSAL_LM", ["c_attn"]),
    "seq2seq_lm": ("SEQ_2_SEQ_LM", ["q", "v"]),
    "masked_lm": (None, ["query", "value"]),
    "token_classification": ("TOKEN_CLS", ["query", "value"]),
}


def built(build, dtype=torch.float64):
    torch.manual_seed(0)
    return moved(build().to(dtype).train())


def token_rows(task, lengths=(4, 7, 3), seed=0):
    """Examples without padding, as a tokenized data set holds them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(5, 50, (length,), generator=generator).tolist()
        if task == "causal_lm":
            labels = ids
        elif task == "seq2seq_lm":
            labels = torch.randint(5, 50, (2 + length // 2,), generator=generator).tolist()
        elif task == "masked_lm":
            labels = [token if place % 2 else -100 for place, token in enumerate(ids)]
        else:
            labels = torch.randint(4, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "labels": labels})
    return rows


def pad_tokens(rows):
    """Collate with padding on the right, labels with -100."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    longest = {name: max(len(row[name]) for row in rows) for name in fill}
    return {name: torch.tensor([r[name] + [fill[name]] * (longest[name] - len(r[name])) for r in rows]) for name in fill}


def trainer_of(tmp_path, model, *, rows=None, **overrides):
    defaults = dict(max_steps=2, gradient_accumulation_steps=1, grad_sample_self_check=True)
    # The same rows are evaluated, as a list: a data set with the same fingerprint is told of.
    data, others = (None, None) if rows is None else (Dataset.from_list(rows), [*rows])
    args = arguments(tmp_path, **(defaults | overrides))
    return DopplerTrainer(model=model, args=args, train_dataset=data, eval_dataset=others, data_collator=pad_tokens)


def test_other_models_have_no_labels_per_token():
    for model in (tiny_bert(), hf.T5ForSequenceClassification(hf.T5Config(**T5)), ANSWERS[0](), torch.nn.Linear(2, 2)):
        assert task_of(model) is None
    choices = type("NamedOtherwise", (hf.BertForMultipleChoice,), {})(hf.BertConfig(**BERT))
    assert task_of(choices) == "multiple_choice"


PROMPTS = {
    "prompt": lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=3),
    "p-tuning": lambda task: PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": lambda task: PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
}


# PEFT does not lengthen the labels of token classification, so that its own forward fails there.
@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(("kind", "task"), combined(PROMPTS, ["causal_lm", "seq2seq_lm", "answers"], strength=1))
def test_a_prompt_has_no_labels_and_trains(tmp_path, task, kind):
    builds, peft_task = ([ANSWERS[0]], "QUESTION_ANS") if task == "answers" else (MODELS[task], ADAPTED[task][0])
    lengths = [4, 7, 3] * 6
    rows, collate = (answer_rows(lengths), pad_answers) if task == "answers" else (token_rows(task, lengths), pad_tokens)
    config = PROMPTS[kind](peft_task)
    attach = prefixed if (kind, task) == ("prefix", "answers") else get_peft_model
    model = built(lambda: attach(builds[0](), config), torch.float32)
    trainer = trainer_of(tmp_path, model, rows=rows)
    trainer.data_collator = collate
    losses = trainer.compute_per_sample_loss(model, collate(rows[:3]))
    alone = torch.stack([model(**collate([row])).loss for row in rows[:3]])
    torch.testing.assert_close(losses, alone, atol=1e-5, rtol=1e-5)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_decoder_inputs_of_the_collator_are_kept(tmp_path):
    model = built(MODELS["seq2seq_lm"][0])
    trainer, inputs = trainer_of(tmp_path, model), pad_tokens(token_rows("seq2seq_lm"))
    made = model.prepare_decoder_input_ids_from_labels(inputs["labels"])
    expected = trainer.compute_per_sample_loss(model, inputs)
    torch.testing.assert_close(trainer.compute_per_sample_loss(model, inputs | {"decoder_input_ids": made}), expected)
    others = trainer.compute_per_sample_loss(model, inputs | {"decoder_input_ids": made.flip(1)})
    assert torch.all(others != expected)
    assert "decoder_input_ids" not in inputs


def answer_rows(lengths=(4, 7, 3)):
    """Questions with their texts, and where the answers stand."""
    rows = token_rows("causal_lm", lengths)
    for row in rows:
        del row["labels"]
        row |= {"start_positions": 1, "end_positions": len(row["input_ids"]) - 1}
    return rows


def pad_answers(rows):
    padded = pad_tokens([row | {"labels": []} for row in rows])
    positions = {name: torch.tensor([row[name] for row in rows]) for name in ("start_positions", "end_positions")}
    return {name: padded[name] for name in ("input_ids", "attention_mask")} | positions


def choice_rows(lengths=((4, 7), (3, 5), (6, 2))):
    """Examples whose choices differ in length."""
    found = []
    for index, of_choices in enumerate(lengths):
        choices = token_rows("causal_lm", of_choices, seed=index)
        row = {name: [choice[name] for choice in choices] for name in ("input_ids", "attention_mask")}
        found.append(row | {"label": index % 2})
    return found


def pad_choices(rows):
    choices = [dict(zip(("input_ids", "attention_mask"), choice, strict=True)) | {"labels": []} for row in rows
               for choice in zip(row["input_ids"], row["attention_mask"], strict=True)]  # fmt: skip
    padded = {name: pad_tokens(choices)[name].unflatten(0, (len(rows), -1)) for name in ("input_ids", "attention_mask")}
    return padded | {"labels": torch.tensor([row["label"] for row in rows])}


ANSWERS = [
    lambda: hf.BertForQuestionAnswering(hf.BertConfig(**BERT | dict(num_labels=2))),
    lambda: hf.T5ForQuestionAnswering(hf.T5Config(**T5)),
]
CHOICES = [lambda: hf.BertForMultipleChoice(hf.BertConfig(**BERT))]
OF_TOKENS = [(build, functools.partial(token_rows, task), pad_tokens) for task in MODELS for build in MODELS[task]]
OTHERS = [
    *((build, answer_rows, pad_answers) for build in ANSWERS),
    *((build, choice_rows, pad_choices) for build in CHOICES),
]
EACH = [pytest.param(*case, id=case[0]().__class__.__name__) for case in [*OF_TOKENS, *OTHERS]]


@pytest.mark.parametrize(("build", "rows_of", "collate"), EACH)
def test_each_loss_is_the_models_own_loss_of_that_example_alone(tmp_path, build, rows_of, collate):
    model, rows = built(build, torch.float32), rows_of()
    losses = trainer_of(tmp_path, model).compute_per_sample_loss(model, collate(rows))
    assert losses.shape == (3,)
    alone = torch.stack([model(**collate([row])).loss for row in rows])
    torch.testing.assert_close(losses, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("build", "rows_of", "collate"), EACH)
def test_neighbours_and_padding_do_not_change_an_examples_gradient(tmp_path, build, rows_of, collate):
    model, rows = built(build), rows_of()
    trainer = trainer_of(tmp_path, model)

    def first_gradient(rows):
        loss = trainer.compute_per_sample_loss(model, collate(rows))[0]
        gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        return torch.cat([g.flatten() for g in gradients if g is not None])

    alone = first_gradient(rows[:1])
    assert alone.norm() > 1e-3
    longer = rows_of([(9, 12)] if rows_of is choice_rows else [12])
    for batch in (rows, rows[::2], [rows[0], *longer]):
        torch.testing.assert_close(first_gradient(batch), alone, atol=1e-12, rtol=1e-9)


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(("build", "rows_of", "collate"), [OTHERS[0], OTHERS[-1]])
def test_answers_and_choices_train(tmp_path, build, rows_of, collate):
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=["query", "value"]))
    options = dict(max_tokens_per_micro_batch=40, gradient_accumulation_steps=2)
    rows = rows_of([(5, 3), (2, 4), (6, 2)] * 6 if rows_of is choice_rows else [4, 9, 6] * 6)
    trainer = trainer_of(tmp_path, model, rows=rows, **options)
    trainer.data_collator = collate
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_the_tokens_of_all_choices_count(tmp_path):
    model = CHOICES[0]()
    trainer = trainer_of(tmp_path, model, rows=choice_rows(), max_tokens_per_micro_batch=13, per_device_train_batch_size=2)
    trainer.data_collator = pad_choices
    with refused("micro-batch-too-small", match="=13 "):
        trainer.train()


def test_a_model_without_a_rule_is_refused_by_name(tmp_path):
    model = hf.BertForPreTraining(hf.BertConfig(**BERT))
    trainer = trainer_of(tmp_path, model)
    with refused("no-loss-rule", match=f"{type(model).__name__}.*compute_per_sample_loss"):
        trainer.compute_per_sample_loss(model, pad_tokens(token_rows("causal_lm")))


def test_labels_are_needed(tmp_path):
    model = MODELS["causal_lm"][0]()
    inputs = pad_tokens(token_rows("causal_lm"))
    del inputs["labels"]
    with refused("no-labels", match="GPT2LMHeadModel.*compute_per_sample_loss"):
        trainer_of(tmp_path, model).compute_per_sample_loss(model, inputs)


def test_a_balancing_loss_over_the_batch_is_refused(tmp_path):
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**ROTARY, num_local_experts=2, output_router_logits=True))
    trainer, inputs = trainer_of(tmp_path, model), pad_tokens(token_rows("causal_lm"))
    with refused("loss-of-the-batch", match="MixtralForCausalLM.*output_router_logits=False"):
        trainer.compute_per_sample_loss(model, inputs)
    model.config.output_router_logits = False
    assert trainer.compute_per_sample_loss(model, inputs).shape == (3,)
