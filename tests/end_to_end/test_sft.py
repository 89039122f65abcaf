"""TRL's supervised fine-tuning with privacy: its data sets and arguments, our losses, sums, ledger and refusals."""

import dataclasses
import functools

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting

from doppler_hf import DopplerTrainingArguments
from doppler_hf.audit import neighbour_distances
from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.losses import per_sample_losses
from doppler_hf.run.reporting.published_results import PublishedResults, published_results
from tests.support import chat
from tests.support.chat import LORA, arguments_of, chat_tokenizer, tiny_llama, tiny_mixtral
from tests.support.refusals import refused
from tests.support.tiers import further
from tests.support.trainers import assert_trained_alike

pytest.importorskip("trl", reason="the extra trl is not installed")

from trl import SFTConfig, SFTTrainer

from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer, DopplerSFTConfig, DopplerSFTTrainer


def joined(row):
    return f"{row['question']}: {row['answer']}"


# A data set, TRL's arguments of the config and of the trainer, and what is labelled of a row, without the end of the text.
FORMATS = {
    "text": (chat.texts, {}, {}, lambda q, a: f"{q} {a}"),
    "prompt": (chat.prompts, {}, {}, lambda q, a: f" {a}"),
    "whole prompt": (chat.prompts, dict(completion_only_loss=False), {}, lambda q, a: f"{q} {a}"),
    "formatted": (chat.questions, {}, dict(formatting_func=joined), lambda q, a: f"{q}: {a}"),
    "conversation": (chat.conversations, {}, {}, lambda q, a: f"<|user|>{q}<|assistant|>{a}"),
    "assistant": (chat.conversations, dict(assistant_only_loss=True), {}, lambda q, a: a),
    "conversational prompt": (chat.conversational_prompts, {}, dict(peft_config=LORA), lambda q, a: a),
}
arguments = functools.partial(arguments_of, cls=DopplerSFTConfig)


def trainer_of(folder, name="prompt", *, cls=DopplerSFTTrainer, model=None, data=None, **options):
    make, of_config, of_trainer, _ = FORMATS[name]
    data = make() if data is None else data
    return cls(
        model=tiny_llama() if model is None else model,
        args=arguments(folder, **(of_config | options)),
        train_dataset=data,
        eval_dataset=Dataset.from_list([*data.select(range(4))]) if isinstance(data, Dataset) else None,
        processing_class=chat_tokenizer(),
        **of_trainer,
    )


@pytest.mark.parametrize("name", further([*FORMATS], quick=["assistant"]))
def test_a_data_set_of_each_format_trains_as_with_trl(tmp_path, name):
    trainer = trainer_of(tmp_path, name, eval_strategy="steps", eval_steps=1)
    labelled = FORMATS[name][-1]
    for row, (question, answer) in zip(trainer.train_dataset, chat.exchanges(), strict=True):
        text = trainer.processing_class.decode([label for label in row["labels"] if label != -100])
        assert text == labelled(question, answer) + "<|end|>"
    chat.assert_trains_privately(trainer, evaluated={"eval_mean_token_accuracy"})


@pytest.mark.parametrize("name", ["text", "conversation"])
def test_the_completion_alone_is_not_asked_for_where_there_is_none(tmp_path, name):
    with refused("no-effect", match="has no columns 'prompt' and 'completion'"):
        trainer_of(tmp_path, name, completion_only_loss=True)
    trainer_of(tmp_path, name, completion_only_loss=True, disable_dp=True, target_epsilon=None)
    # The mends.
    trainer_of(tmp_path, "prompt", completion_only_loss=True)
    trainer_of(tmp_path, "assistant")


def test_texts_of_another_column_are_told_how_to_be_named(tmp_path):
    texts = chat.texts().rename_column("text", "story")
    with refused("no-texts", match="train_dataset has no column 'text'; it has the columns story.* set dataset_text_field"):
        trainer_of(tmp_path, "text", data=texts)
    trainer_of(tmp_path, "text", data=texts, dataset_text_field="story")
    with refused("no-texts", match="question, answer.* pass a formatting_func"):
        trainer_of(tmp_path, "text", data=chat.questions())
    trainer_of(tmp_path, "formatted")
    trainer_of(tmp_path, "text", data=chat.questions().rename_columns({"question": "prompt", "answer": "completion"}))


def spoken(row):
    return {"messages": chat.by("user", row["question"]) + chat.by("assistant", row["answer"])}


@pytest.mark.parametrize(
    ("columns", "options", "read"),
    [
        (lambda row: {"prompt": row["question"], "completion": row["answer"]}, {}, "the columns 'prompt' and 'completion'"),
        (
            lambda row: {"prompt": row["question"], "completion": row["answer"]}, dict(completion_only_loss=False),
            "the columns 'prompt' and 'completion'",
        ),
        (spoken, {}, "the conversations in its rows"),
        (lambda row: {"input_ids": [1, 2, 3]}, {}, "the column 'input_ids'"),
        (lambda row: {"story": row["answer"]}, dict(dataset_text_field="story"), "the column 'story', which"),
    ],
)  # fmt: skip
def test_a_formatting_function_whose_texts_are_not_read_is_refused(tmp_path, columns, options, read):
    data = chat.questions().map(columns)
    with refused("no-effect", match=f"formatting_func has no effect on train_dataset, because TRL reads {read}"):
        trainer_of(tmp_path, "formatted", data=data, **options)
    # The mends.
    field = options.get("dataset_text_field", "text")
    texts = data.map(lambda row: {field: joined(row)}, remove_columns=data.column_names)
    decode = chat_tokenizer().decode
    for row, (q, a) in zip(trainer_of(tmp_path, "text", data=texts, **options).train_dataset, chat.exchanges(), strict=True):
        assert decode(row["input_ids"]) == f"{q}: {a}<|end|>"
    trainer_of(tmp_path, "text", data=data, **options)


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_beside_texts_are_refused_and_the_texts_train_without_them(tmp_path, column):
    data = chat.texts()
    data = data.add_column(column, [[0]] * len(data))
    with refused("images-in-texts", match="Remove the column"):
        trainer_of(tmp_path, "text", data=data)
    trainer_of(tmp_path, "text", data=data.remove_columns(column))


@pytest.mark.parametrize("evaluated", [False, True, "by name"])
def test_half_of_a_prompt_and_completion_is_named_with_its_mend(tmp_path, evaluated):
    def made(data, **options):
        sets = {False: (data, None), True: (chat.texts(), data), "by name": (chat.texts(), {"odd": data})}
        train, held_out = sets[evaluated]
        return DopplerSFTTrainer(
            tiny_llama(), arguments(tmp_path), None, train, held_out, processing_class=chat_tokenizer(), **options
        )

    name = {False: "train_dataset", True: "eval_dataset", "by name": r"eval_dataset\['odd'\]"}[evaluated]
    whole = chat.prompts()
    for broken in (whole.remove_columns("completion"), whole.rename_column("completion", "complation")):
        with refused("prompt-without-completion", match=f"^{name} has a column 'prompt' and no column 'completion'"):
            made(broken)
    both = whole.map(lambda row: {"messages": chat.by("user", row["prompt"]) + chat.by("assistant", row["completion"])})
    both = both.remove_columns("completion")
    asked = {"formatting_func": lambda row: row.get("text") or row["question"]}
    for options in ({}, asked):
        with refused("prompt-without-completion", match=r"remove or rename the column 'prompt'"):
            made(both, **options)
    for broken in (whole.remove_columns("prompt"), whole.rename_column("prompt", "promt")):
        with refused("no-texts", match=f"^{name} has no column 'text'.*completion"):
            made(broken)
    speeches = chat.conversations()
    for broken in (speeches.rename_column("messages", "conversation"), speeches.rename_column("messages", "conversations")):
        with refused("no-texts", match="'messages' for conversations"):
            made(broken)
    # The mends.
    made(whole)
    made(both.remove_columns("prompt"))
    made(both.rename_column("prompt", "question").remove_columns("messages"), **asked)
    made(speeches)
    turns = [[{"from": each["role"], "value": each["content"]} for each in row["messages"]] for row in speeches]
    made(Dataset.from_list([{"conversations": each} for each in turns]))


def test_a_tokenizer_without_a_chat_template_is_told_to_have_one(tmp_path):
    tokenizer, template = chat_tokenizer(), tmp_path / "template.jinja"
    template.write_text(tokenizer.chat_template)

    def made(**options):
        args = arguments(tmp_path, assistant_only_loss=True, **options)
        return DopplerSFTTrainer(tiny_llama(), args, None, chat.conversations(), None, tokenizer)

    tokenizer.chat_template = None
    with refused("no-chat-template", match="{% generation %}.* chat_template_path"):
        made()
    made(chat_template_path=str(template))
    tokenizer.chat_template = template.read_text()
    made()


def test_rows_that_trl_leaves_out_are_told_of(tmp_path):
    lengths = sorted(len(row["input_ids"]) for row in trainer_of(tmp_path, "assistant").train_dataset)
    options = dict(assistant_only_loss=True, max_length=lengths[len(lengths) // 2] - 2)
    with pytest.warns(UserWarning, match=r"TRL left out (\d+) of the \d+ rows of train_dataset, because max_length="):
        trainer = trainer_of(tmp_path, "assistant", **options)
    assert 0 < len(trainer.train_dataset) < len(lengths)
    with refused("all-rows-left-out", match="Raise max_length"):
        trainer_of(tmp_path, "assistant", **options | dict(max_length=2))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_private_run_does_not_begin_with_a_baseline_on_the_data_that_trl_rewrites(tmp_path, kind):
    model, data = tiny_llama(), chat.prompts() if kind == "sft" else chat.preferences()
    config, cls = {"sft": (DopplerSFTConfig, DopplerSFTTrainer), "dpo": (DopplerDPOConfig, DopplerDPOTrainer)}[kind]

    def trainer(**options):
        args = arguments(tmp_path, cls=config, bf16=False, max_steps=2, learning_rate=1e-3, **options)
        more = {} if kind == "sft" else {"ref_model": tiny_llama()}  # TRL would load the reference by its name
        return cls(model=model, args=args, train_dataset=data, processing_class=chat_tokenizer(), **more)

    trainer(disable_dp=True, target_epsilon=None).train()
    with refused("trained-without-privacy"):
        trainer().train()


@pytest.mark.parametrize("name", ["text", "assistant", "conversational prompt"])
def test_losses_are_trls_of_each_example_alone(tmp_path, name):
    trainer = trainer_of(tmp_path, name, bf16=False, gradient_checkpointing=False)
    model, rows = trainer.model.eval(), [*trainer._remove_unused_columns(trainer.train_dataset)]
    by_length = sorted(rows, key=lambda row: len(row["input_ids"]))
    together, without_longest = (
        trainer.compute_per_sample_loss(model, trainer._prepare_inputs(trainer.data_collator(some)))
        for some in (by_length, by_length[:-5])
    )
    alone = torch.stack(
        [trainer.compute_loss(model, trainer._prepare_inputs(trainer.data_collator([row]))) for row in by_length]
    )
    # Some sixty tokens of the vocabulary's 99 logits each, in float32, whose matrices come in other shapes.
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    torch.testing.assert_close(without_longest, together[:-5], rtol=1e-5, atol=0)


def test_one_example_moves_the_sum_by_at_most_c(tmp_path):
    name = "conversational prompt"
    options = dict(clipping="vanilla", per_sample_max_grad_norm=1e-2, bf16=False, grad_sample_self_check=False)
    trainer = trainer_of(tmp_path, name, model=tiny_llama().double(), **options)
    trainer.model.double()  # the adapters too
    result = neighbour_distances(trainer, pairs=2, tolerance=1e-6)
    assert not result.contradicts_claim
    assert 0.99 < result.distances.min() <= result.distances.max() <= 1.0 + 1e-6
    assert result.couplings.max() < 1e-10


def test_defaults_are_those_of_trl_and_ours(tmp_path):
    expected = {field.name: field.default for field in dataclasses.fields(DopplerTrainingArguments)}
    expected |= {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    expected |= {"learning_rate": None, "max_grad_norm": None}
    assert {field.name: field.default for field in dataclasses.fields(DopplerSFTConfig)} == expected
    assert arguments(tmp_path).learning_rate is None
    assert arguments(tmp_path, disable_dp=True).learning_rate == SFTConfig.learning_rate


def test_without_privacy_it_is_trls(tmp_path):
    # Rows of unequal lengths in bfloat16 end in torch's own error where ATEN_CPU_CAPABILITY hides AVX-512 from it.
    packed = dict(packing=True, max_length=64, bf16=False)
    ours = trainer_of(tmp_path, disable_dp=True, **packed)
    stock = SFTTrainer(
        model=tiny_llama(),
        args=arguments(tmp_path, cls=SFTConfig, **packed),
        train_dataset=chat.prompts(),
        processing_class=chat_tokenizer(),
    )
    for trainer in (ours, stock):
        trainer.train()
    assert_trained_alike(ours, stock)
    assert ours.state.log_history[0]["num_tokens"] == stock.state.log_history[0]["num_tokens"] > 0


REFUSED = {
    "packing": ("breaks-privacy", True),
    "padding_free": ("breaks-privacy", True),
    "loss_type": ("breaks-privacy", "dft"),
    "use_liger_kernel": ("breaks-privacy", True),
    "gradient_checkpointing_kwargs": ("selective-checkpointing", {"selective": True}),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_would_break_the_guarantee_is_refused(tmp_path, argument):
    code, value = REFUSED[argument]
    options = {argument: value}
    with refused(code, match=argument):
        arguments(tmp_path, **options)
    assert arguments(tmp_path, disable_dp=True, **options)


def test_rows_that_are_repeated_are_refused_though_trl_writes_them_anew(tmp_path):
    twice = chat.prompts().repeat(2)
    with refused("repeated-rows"):
        trainer_of(tmp_path, data=twice)
    with_units = twice.add_column("user", [*range(24)] * 2)
    assert len(trainer_of(tmp_path, data=with_units, privacy_unit_column="user").train_dataset) == 48


def test_a_loss_that_balances_experts_is_refused(tmp_path):
    model = tiny_mixtral()
    with refused("loss-of-the-batch", match=r"Set router_aux_loss_coef=0\.0\."):
        trainer_of(tmp_path, model=model)
    assert not trainer_of(tmp_path, model=model, router_aux_loss_coef=0.0).aux_loss_enabled


def test_without_the_float32_copies_of_peft_gradients_are_the_same_to_the_last_bit():
    """Under autocast products are of bfloat16 anyway: docs/guides/language-models.md names the context."""
    found = []
    for casts in (True, False):
        model = get_peft_model(
            tiny_llama().to(torch.bfloat16), LoraConfig(target_modules="all-linear", init_lora_weights=False)
        )
        ids = torch.randint(1, 50, (6, 20), generator=torch.Generator().manual_seed(0))
        with ClippedGradients(model) as clipped, disable_input_dtype_casting(model, active=not casts):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inputs = {"input_ids": ids, "labels": ids}
                losses = per_sample_losses(model, inputs, base_model=model.get_base_model())
            norms = clipped.backward(losses)
            found.append([losses.detach(), norms, *clipped.sums.values()])
    assert all(map(torch.equal, *found))
    assert float(found[0][1].min()) > 0.0


def test_private_arguments_are_refused_by_trls_own_trainer(tmp_path):
    with refused("stock-trainer", match="DopplerSFTConfig"):
        trainer_of(tmp_path, cls=SFTTrainer)
    trainer_of(tmp_path, cls=SFTTrainer, disable_dp=True)


@pytest.mark.parametrize(
    ("cls", "config", "make"),
    [(DopplerSFTTrainer, DopplerSFTConfig, chat.prompts), (DopplerDPOTrainer, DopplerDPOConfig, chat.preferences)],
)
@pytest.mark.parametrize(
    ("evaluated_in", "said"),
    [
        (lambda data: data, r"^eval_dataset is train_dataset.*NOT PRIVATE"),
        (lambda data: data.select([3, 1]), r"^All rows of eval_dataset are also in train_dataset.*NOT PRIVATE"),
        (lambda data: {"a": data.select(range(4))}, r"^All rows of eval_dataset\['a'\] are also in train_dataset"),
    ],
)
def test_training_rows_in_an_evaluation_set_warn_once_although_trl_makes_new_rows(
    tmp_path, cls, config, make, evaluated_in, said
):
    data = make()
    options = dict(train_dataset=data, eval_dataset=evaluated_in(data), processing_class=chat_tokenizer())
    with pytest.warns(UserWarning, match=said) as caught:
        trainer = cls(model=tiny_llama(), args=arguments_of(tmp_path, cls=config), **options)
    trainer.state.log_history.append({"eval_loss": 1.0, "step": 1})
    assert published_results(trainer) == PublishedResults()
    assert sum("NOT PRIVATE" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize(
    ("cls", "config", "make"),
    [(DopplerSFTTrainer, DopplerSFTConfig, chat.prompts), (DopplerDPOTrainer, DopplerDPOConfig, chat.preferences)],
)
def test_copies_of_training_rows_are_told_when_training_starts(tmp_path, cls, config, make, capsys):
    options = dict(train_dataset=make(), eval_dataset=Dataset.from_list([*make()][:6]), processing_class=chat_tokenizer())
    cls(model=tiny_llama(), args=arguments_of(tmp_path, cls=config, max_steps=1), **options).train()
    assert "many rows of eval_dataset are equal to rows of train_dataset" in capsys.readouterr().out
