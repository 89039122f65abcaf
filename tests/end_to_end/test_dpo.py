"""TRL's direct preference optimization with privacy: its data sets and arguments, our losses, sums, ledger and refusals."""

import contextlib
import dataclasses
import functools
import itertools
import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from doppler_hf import DopplerTrainingArguments
from doppler_hf.audit import neighbour_distances
from doppler_hf.privacy import PrivacyLedger
from tests.support import chat
from tests.support.chat import BALANCED, arguments_of, chat_tokenizer, tiny_llama, tiny_mixtral, whole_resumed_and_saved
from tests.support.tiers import further, thorough
from tests.support.trainers import weights

pytest.importorskip("trl", reason="the extra trl is not installed")

from trl import DPOConfig, DPOTrainer

from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer

LORA = LoraConfig(r=2, target_modules="all-linear")
# A data set, the adapters, and what the model reads before and in the answers, without the end of the text.
FORMATS = {
    "prompt": (chat.preferences, None, lambda q, a: (q, f" {a}")),
    "implicit": (chat.implicit_preferences, None, lambda q, a: (f"{q} ", a)),
    "conversation": (chat.conversational_preferences, LORA, lambda q, a: (f"<|user|>{q}<|assistant|>", a)),
}
formats = pytest.mark.parametrize("name", further([*FORMATS], quick=["prompt"]))
REFERENCES = "ref_chosen_logps", "ref_rejected_logps"


arguments = functools.partial(arguments_of, cls=DopplerDPOConfig)


def trainer_of(folder, name="prompt", *, cls=DopplerDPOTrainer, model=None, data=None, ref_model=None, **options):
    make, adapters, _ = FORMATS[name]
    data = make() if data is None else data
    return cls(
        model=tiny_llama() if model is None else model,
        ref_model=ref_model,
        args=arguments(folder, **options),
        train_dataset=data,
        eval_dataset=data.select(range(min(4, len(data)))) if isinstance(data, Dataset) else None,
        processing_class=chat_tokenizer(),
        peft_config=adapters,
    )


def in_double(folder, name="prompt", **options):
    """A trainer whose weights are no longer the reference's, in float64, so that rounding is far below what is compared."""
    trainer = trainer_of(folder, name, model=tiny_llama().double(), bf16=False, gradient_checkpointing=False, **options)
    trainer.model.double()  # the adapters too
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return trainer


@formats
def test_a_data_set_of_each_format_trains_as_with_trl(tmp_path, name):
    trainer = trainer_of(tmp_path, name, eval_strategy="steps", eval_steps=1, max_tokens_per_micro_batch=400)
    assert (trainer.args.bf16, trainer.args.gradient_checkpointing) == (True, True)  # TRL's defaults
    read, decode = FORMATS[name][-1], trainer.processing_class.decode
    for row, (question, *answers) in zip(trainer.train_dataset, chat.pairs(), strict=True):
        for answer, ids, whole in zip(answers, (row["chosen_ids"], row["rejected_ids"]), row["input_ids"], strict=True):
            prompt, text = read(question, answer)
            assert decode(ids).removesuffix("<|end|>") in (text, f" {text}", text.lstrip())
            assert decode(whole) == f"{prompt}{text}<|end|>"
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)
    steps = [logs for logs in trainer.state.log_history if "grad_norm" in logs]
    # Neither rewards nor margins nor log-probabilities of the pairs drawn.
    assert [logs.keys() for logs in steps] == [{"loss", "grad_norm", "learning_rate", "epoch", "epsilon", "step"}] * 2
    evaluations = [logs for logs in trainer.state.log_history if "eval_loss" in logs]
    assert [{"eval_rewards/margins", "eval_rewards/accuracies", "epsilon"} <= logs.keys() for logs in evaluations] == [
        True
    ] * 2
    assert {logs["eval_num_tokens"] for logs in evaluations} == {0.0}
    assert trainer.privacy.ledger.statement.num_units == 24
    assert trainer.privacy.ledger.private


LOSSES = [
    dict(), dict(loss_type="hinge", beta=0.5), dict(loss_type="ipo"), dict(loss_type="robust", label_smoothing=0.1),
    dict(loss_type=["sigmoid", "ipo"], loss_weights=[0.5, 2.0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), further([*itertools.product(FORMATS, LOSSES)]), ids=str)
def test_losses_are_trls_of_each_pair_alone(tmp_path, name, options):
    trainer = in_double(tmp_path, name, max_length=40, **options)
    model, rows = trainer.model, [*trainer._remove_unused_columns(trainer.train_dataset)]
    by_length = sorted(rows, key=lambda row: max(map(len, row["input_ids"])))
    collate = trainer._training_collator()
    together, without_longest = (
        trainer.compute_per_sample_loss(model, collate(some)) for some in (by_length, by_length[:-5])
    )
    alone = torch.stack([trainer.compute_loss(model.eval(), trainer.data_collator([row])) for row in by_length])
    assert alone.std() > 0.01 * alone.mean()
    # TRL's layer that makes log-probabilities computes in float32.
    torch.testing.assert_close(together, alone.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(without_longest, together[:-5], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prompt", {}),
        ("conversation", dict(max_tokens_per_micro_batch=500)),
        ("prompt", dict(privacy_unit_column="judge", per_device_train_batch_size=1, clip_unit_mean=True)),
        *thorough(("prompt", dict(privacy_unit_column="judge", per_device_train_batch_size=1, loss_type="ipo"))),
    ],
)
def test_one_pair_moves_the_sum_by_at_most_c(tmp_path, name, options):
    data = FORMATS[name][0]().map(lambda row, index: {"judge": index % 12}, with_indices=True)
    trainer = in_double(tmp_path, name, data=data, clipping="vanilla", per_sample_max_grad_norm=1e-4, **options)
    result = neighbour_distances(trainer, pairs=4, tolerance=1e-6)
    assert not result.contradicts_claim
    assert 0.3 < result.distances.min() <= result.distances.max() <= 1.0 + 1e-6  # a judge's pairs are averaged
    assert result.couplings.max() < 1e-10


@pytest.mark.parametrize("bf16", [False, *thorough(True)])
@formats
def test_the_reference_of_a_pair_does_not_follow_the_others(tmp_path, name, bf16):
    data = FORMATS[name][0]().shuffle(seed=0)
    options = dict(bf16=bf16, per_device_train_batch_size=8)
    whole = trainer_of(tmp_path, name, data=data, **options).train_dataset
    for rows in (range(1, 24), [2, 17, 5], [9]):
        some = trainer_of(tmp_path, name, data=data.select(rows), **options).train_dataset
        assert [some[column] for column in REFERENCES] == [whole.select(rows)[column] for column in REFERENCES]


def watched(trainer_class):
    """Note of each call of the reference how many rows it has, and which layers are in training mode."""

    class Watched(trainer_class):
        calls = ()

        def compute_ref_log_probs(self, model, inputs):
            self.calls += ((len(inputs["input_ids"]), any(module.training for module in model.modules())),)
            return super().compute_ref_log_probs(model, inputs)

    return Watched


@pytest.mark.parametrize("kept", [False, True])
def test_a_reference_is_computed_pair_by_pair_without_dropout(tmp_path, kept):
    model = tiny_llama().train()
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    ref_model = tiny_llama().train() if kept else None
    data = chat.preferences()
    # What TRL has kept of the same data and model, in batches, is no reference here.
    trainer_of(tmp_path, data=data, model=model, ref_model=ref_model, disable_dp=True, precompute_ref_log_probs=True)
    trainer = trainer_of(tmp_path, cls=watched(DopplerDPOTrainer), data=data, model=model, ref_model=ref_model, bf16=False)
    assert trainer.calls == ((2, False),) * 24 + ((8, False),)
    assert model.training
    rows = trainer.train_dataset
    with torch.no_grad():
        ids = torch.tensor([rows[0]["input_ids"][0]])
        each = tiny_llama().eval()(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    assert each[len(rows[0]["prompt_ids"]) - 1 :].sum().item() == pytest.approx(rows[0]["ref_chosen_logps"], rel=1e-5)


def test_a_reference_of_ones_own_counts(tmp_path):
    torch.manual_seed(3)
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.normal_()
    found = [trainer_of(tmp_path, ref_model=model).train_dataset[REFERENCES[0]][:] for model in (None, other)]
    assert found[0] != found[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["prompt", "conversation"])
def test_training_raises_the_margin(tmp_path, name):
    options = dict(target_epsilon=200.0, max_steps=60, per_device_train_batch_size=8, bf16=False)
    trainer = trainer_of(tmp_path, name, **options)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert abs(before["eval_rewards/margins"]) < 1e-4
    assert after["eval_rewards/margins"] > 0.5
    assert after["eval_rewards/accuracies"] == 1.0
    assert after["eval_loss"] < before["eval_loss"] - 0.2
    assert trainer.privacy.epsilon() <= 200.0
    if name == "conversation":  # its reference is still there, beneath the adapters
        assert trainer.evaluate(FORMATS[name][0]().select(range(5, 9)))["eval_rewards/margins"] > 0.5


@pytest.mark.thorough
def test_adapters_of_ones_own_are_their_own_reference(tmp_path):
    model = get_peft_model(tiny_llama(), LORA)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(0.5)
    trainer = trainer_of(tmp_path, model=model, bf16=False)
    assert abs(trainer.evaluate()["eval_rewards/margins"]) < 1e-4
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer.train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trained
    assert not any(".ref." in name for name in trained)


@pytest.mark.thorough
def test_pairs_are_cut_and_left_out_one_by_one(tmp_path):
    data = chat.preferences()
    for options in (dict(max_length=20), dict(max_length=20, truncation_mode="keep_end"), dict(max_length=None)):
        with pytest.warns(FutureWarning) if "truncation_mode" in options else contextlib.nullcontext():
            trainer = trainer_of(tmp_path, data=data, **options)
        rows, collate = trainer.train_dataset, trainer._training_collator()
        lengths = [max(map(len, row["input_ids"])) for row in rows]
        assert trainer.private_run.sampler.lengths.tolist() == [2 * length for length in lengths]
        alone = [collate([row]) for row in rows]
        assert [inputs["attention_mask"].sum(dim=-1).max().item() for inputs in alone] == lengths
        is_kept = [len(chat_tokenizer()(row["prompt"])["input_ids"]) < 20 for row in data]
        assert len(rows) == (sum(is_kept) if options == dict(max_length=20) else 24)


# TRL shows a piece once in the life of a process.
@pytest.mark.parametrize(("pieces", "options"), [("xy", {}), ("uv", dict(disable_dp=True))])
def test_the_log_shows_no_piece_of_a_prompt(tmp_path, caplog, pieces, options):
    data = Dataset.from_list([{"prompt": f"is it {piece}", "chosen": "q", "rejected": "q no"} for piece in pieces])
    tokenizer = chat_tokenizer(*((piece, "q") for piece in pieces))
    models = [tiny_llama() for _ in range(2)]
    for model in models:
        model.resize_token_embeddings(len(tokenizer))
    DopplerDPOTrainer(*models, arguments(tmp_path, **options), train_dataset=data, processing_class=tokenizer)
    assert caplog.text.count("The tokenized prompt is not a prefix") == 2
    assert [f"{piece!r}" in caplog.text for piece in pieces] == [bool(options)] * 2


def test_defaults_are_those_of_trl_and_ours(tmp_path):
    def defaults(cls):
        made = {field.name: field.default_factory for field in dataclasses.fields(cls)}
        values = {field.name: field.default for field in dataclasses.fields(cls)}
        return values | {name: make() for name, make in made.items() if make is not dataclasses.MISSING}

    changed = {"learning_rate": None, "max_grad_norm": None, "optim": None, "precompute_ref_log_probs": None}
    assert defaults(DopplerDPOConfig) == defaults(DopplerTrainingArguments) | defaults(DPOConfig) | changed
    private, stock = arguments(tmp_path), arguments(tmp_path, disable_dp=True)
    assert (private.learning_rate, private.precompute_ref_log_probs) == (None, True)
    assert (stock.learning_rate, stock.precompute_ref_log_probs) == (DPOConfig.learning_rate, False)


@pytest.mark.parametrize("options", [dict(), dict(loss_type="aot", ld_alpha=0.5)], ids=str)
def test_without_privacy_it_is_trls(tmp_path, options):
    ours = trainer_of(tmp_path, disable_dp=True, ref_model=tiny_llama(), **options)
    stock = DPOTrainer(
        model=tiny_llama(),
        ref_model=tiny_llama(),
        args=arguments(tmp_path, cls=DPOConfig, **options),
        train_dataset=chat.preferences(),
        processing_class=chat_tokenizer(),
    )
    for trainer in (ours, stock):
        trainer.train()
    assert torch.equal(weights(ours), weights(stock))
    for name in ("rewards/margins", "num_tokens"):
        assert ours.state.log_history[0][name] == stock.state.log_history[0][name]


# PEFT looks for the base model's own vocabulary where this one, made on the spot, lies nowhere.
@pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["prompt", "conversation"])
def test_saved_and_resumed(tmp_path, name):
    whole, resumed, saved = whole_resumed_and_saved(functools.partial(trainer_of, tmp_path, name), tmp_path)
    assert torch.equal(weights(resumed), weights(whole))
    assert PrivacyLedger.load(tmp_path).steps_run == 4  # of which one was released twice
    card = (tmp_path / "README.md").read_text()
    assert "DPO" in card
    assert "## Differential privacy" in card
    ids = torch.tensor([resumed.train_dataset[0]["input_ids"][0]])
    logits = [model.eval()(ids).logits for model in (saved, whole.model)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


CANNOT = " cannot be used with differential privacy: "
REFUSED = {
    "sync_ref_model=True": dict(sync_ref_model=True),
    "use_weighting=True": dict(use_weighting=True),
    "ld_alpha=0.5": dict(ld_alpha=0.5),
    "f_divergence_type='js_divergence'": dict(f_divergence_type="js_divergence"),
    "discopop_tau=0.1": dict(discopop_tau=0.1),
    "padding_free=True": dict(padding_free=True),
    "activation_offloading=True": dict(activation_offloading=True),
    "use_liger_kernel=True": dict(use_liger_kernel=True),
}
OTHERS = {
    "precompute_ref_log_probs must be True": dict(precompute_ref_log_probs=False),
    "The loss_type must be of sigmoid, hinge, robust, ipo with differential privacy, got aot, sft.": dict(
        loss_type=["aot", "sigmoid", "sft"]
    ),
    "gradient_checkpointing_kwargs must not have 'selective'": dict(gradient_checkpointing_kwargs={"selective": True}),
    "label_smoothing=0.1 has no effect with loss_type=['sigmoid']": dict(label_smoothing=0.1),
    "label_smoothing must lie in [0, 0.5), got 0.5": dict(loss_type="robust", label_smoothing=0.5),
    "beta must be > 0, got 0": dict(beta=0.0),
}


@pytest.mark.parametrize(
    ("message", "options"), [*((name + CANNOT, options) for name, options in REFUSED.items()), *OTHERS.items()]
)
def test_what_would_break_the_guarantee_or_have_no_effect_is_refused(tmp_path, message, options):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        arguments(tmp_path, **options)
    assert arguments(tmp_path, disable_dp=True, **options)


def test_arguments_of_another_class_are_refused(tmp_path):
    for args in (None, arguments(tmp_path, cls=DPOConfig), DopplerTrainingArguments(str(tmp_path), noise_multiplier=1.0)):
        with pytest.raises(ValueError, match=rf"args must be DopplerDPOConfig, got {type(args).__name__}\. Make one"):
            DopplerDPOTrainer(tiny_llama(), args=args, train_dataset=chat.preferences(), processing_class=chat_tokenizer())


def test_a_stream_and_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="IterableDataset has no length, so it cannot be Poisson-sampled"):
        trainer_of(tmp_path, data=chat.preferences().to_iterable_dataset())
    with pytest.raises(ValueError, match="train_dataset must be of texts in a private run, got a column of images"):
        trainer_of(tmp_path, data=chat.preferences().add_column("image", ["none"] * 24))


def test_pairs_that_are_repeated_are_refused_though_trl_writes_them_anew(tmp_path):
    with pytest.raises(ValueError, match="train_dataset must have each row once, got one with rows that are repeated"):
        trainer_of(tmp_path, data=chat.preferences().repeat(2))


def test_a_loss_of_the_users_own_is_refused_unless_it_is_per_pair(tmp_path):
    class OfBatch(DopplerDPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class OfPairs(OfBatch):
        def compute_per_sample_loss(self, *args, **kwargs):
            return 2 * super().compute_per_sample_loss(*args, **kwargs)

    with pytest.raises(ValueError, match=r"OfBatch.compute_loss has no effect on a private training"):
        trainer_of(tmp_path, cls=OfBatch)
    trainer_of(tmp_path, cls=OfPairs).train()


class Mean(DopplerDPOTrainer):
    """Scales the loss of a pair by the lengths of the others."""

    def compute_per_sample_loss(self, model, inputs):
        losses, lengths = super().compute_per_sample_loss(model, inputs), inputs["attention_mask"].sum(dim=(1, 2))
        return losses * lengths / lengths.sum()


class Neighbour(DopplerDPOTrainer):
    """Compares the chosen answer of one pair with the rejected one of the next."""

    def _training_collator(self):
        collate = super()._training_collator()

        def shifted(examples):
            inputs = collate(examples)
            inputs["input_ids"][:, 1] = inputs["input_ids"][:, 1].roll(1, dims=0)
            return inputs

        return shifted


@pytest.mark.parametrize("cls", [Mean, *thorough(Neighbour)])
def test_pairs_that_are_mixed_are_refused(tmp_path, cls):
    with pytest.raises(ValueError, match="one example changes with the examples beside it"):
        trainer_of(tmp_path, cls=cls).train()


def test_a_loss_that_balances_experts_is_refused(tmp_path):
    model = tiny_mixtral()
    with pytest.raises(ValueError, match=BALANCED):
        trainer_of(tmp_path, model=model)


def test_data_in_memory_are_refused_for_several_processes(tmp_path, monkeypatch):
    """TRL's other processes would look for a file of process 0 in a folder of their own."""
    trainer = trainer_of(tmp_path / "out")
    data = Dataset.from_list(trainer.train_dataset.remove_columns(list(REFERENCES)).to_list())
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(ValueError, match=r"The train data set must lie in files for 2 processes, got one .* save_to_disk"):
        trainer._precompute_ref_logps(data, "train", 1)
    data.save_to_disk(str(tmp_path / "data"))
    again = trainer._precompute_ref_logps(Dataset.load_from_disk(str(tmp_path / "data")), "train", 1)
    assert again["ref_chosen_logps"] == pytest.approx(trainer.train_dataset["ref_chosen_logps"], rel=1e-5)
