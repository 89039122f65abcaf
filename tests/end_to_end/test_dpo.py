"""TRL's direct preference optimization with privacy: its data sets and arguments, our losses, sums, ledger and refusals."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, load_from_disk
from transformers import default_data_collator

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.audit import neighbour_distances
from doppler_hf.cli import main
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.pair_losses import PAIR_LOSSES, lengths_of_answers, log_ratios, references_of, side_by_side
from tests.support import chat
from tests.support.chat import LORA, chat_tokenizer, tiny_llama, whole_resumed_and_saved
from tests.support.ledgers import said
from tests.support.refusals import refused
from tests.support.tiers import further, thorough
from tests.support.tiny import tiny_bert
from tests.support.trainers import assert_trained_alike, checked_trainer_of, trained

pytest.importorskip("trl", reason="the extra trl is not installed")

from trl import DPOConfig, DPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer, DopplerSFTConfig, DopplerSFTTrainer
from tests.support.dpo import FORMATS, arguments, trainer_of

REFERENCES = "ref_chosen_logps", "ref_rejected_logps"
OF_OTHER_TRAINERS = ["cpo", "simpo", "orpo"]


@pytest.mark.parametrize("adapters", [LORA, *thorough(None)])
def test_a_chain_of_sft_dpo_and_sft_costs_all_three(tmp_path, adapters, capsys):
    """TRL adds a reference adapter between the first two."""
    sft = dict(processing_class=chat_tokenizer(), train_dataset=chat.prompts())
    common = dict(bf16=False, target_epsilon=2.0)
    first = DopplerSFTTrainer(
        model=tiny_llama(), args=arguments(tmp_path / "1", cls=DopplerSFTConfig, **common), peft_config=adapters, **sft
    )
    second = trainer_of(tmp_path / "2", model=trained(first).model, **common)
    trained(second)
    third = DopplerSFTTrainer(model=second.model, args=arguments(tmp_path / "3", cls=DopplerSFTConfig, **common), **sft)
    trained(third).save_model()
    ledgers = [trainer.privacy.ledger for trainer in (first, second, third)]
    assert [len(ledger.earlier_trainings) for ledger in ledgers] == [0, 1, 2]
    assert ledgers[2].spent.epsilon == pytest.approx(sum(ledger.epsilon() for ledger in ledgers), rel=1e-12)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "3")]) == 0
    assert f"({ledgers[2].spent.epsilon:.4g}, " in said(capsys).partition("The weights in")[0]


def in_double(folder, name="prompt", **options):
    """A trainer whose weights are no longer the reference's, in float64, so that rounding is far below what is compared."""
    trainer = trainer_of(folder, name, model=tiny_llama().double(), bf16=False, gradient_checkpointing=False, **options)
    trainer.model.double()  # the adapters too
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return trainer


@pytest.mark.parametrize("name", further([*FORMATS], quick=["prompt"]))
def test_a_data_set_of_each_format_trains_as_with_trl(tmp_path, name):
    trainer = trainer_of(tmp_path, name, eval_strategy="steps", eval_steps=1, max_tokens_per_micro_batch=400)
    read, decode = FORMATS[name][-1], trainer.processing_class.decode
    for row, (question, *answers) in zip(trainer.train_dataset, chat.pairs(), strict=True):
        for answer, ids, whole in zip(answers, (row["chosen_ids"], row["rejected_ids"]), row["input_ids"], strict=True):
            prompt, text = read(question, answer)
            assert decode(ids).removesuffix("<|end|>") in (text, f" {text}", text.lstrip())
            assert decode(whole) == f"{prompt}{text}<|end|>"
    chat.assert_trains_privately(trainer, evaluated={"eval_rewards/margins", "eval_rewards/accuracies"})


def test_several_processes_need_pairs_in_files(tmp_path, monkeypatch):
    trainer, given = trainer_of(tmp_path), chat.preferences()
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    monkeypatch.setattr(DPOTrainer, "_precompute_ref_logps", lambda self, dataset, name, batch_size: dataset)
    with refused("data-in-memory", match=r"save_to_disk\(\), and load it with load_from_disk"):
        trainer._precompute_ref_logps(given, "train", 1)
    given.save_to_disk(tmp_path / "pairs")
    loaded = load_from_disk(tmp_path / "pairs")
    assert trainer._precompute_ref_logps(loaded, "train", 1) is loaded


@pytest.mark.parametrize("evaluated", [False, True])
def test_prompts_that_are_not_read_are_named(tmp_path, evaluated):
    def made(data):
        train, held_out = (chat.implicit_preferences(), data) if evaluated else (data, None)
        return DopplerDPOTrainer(
            tiny_llama(), None, arguments(tmp_path), None, train, held_out, processing_class=chat_tokenizer()
        )

    name, whole = "eval_dataset" if evaluated else "train_dataset", chat.preferences().rename_column("prompt", "question")
    with pytest.warns(UserWarning, match=rf"^{name} has no column 'prompt'.*rename_column\('question', 'prompt'\)"):
        made(whole)
    # The mends: no warning follows.
    made(whole.rename_column("question", "prompt"))
    made(whole.remove_columns("question"))
    spoken = {column: f"spoken_{column}" for column in ("chosen", "rejected")}
    whole = whole.map(
        lambda row: {spoken[each]: chat.by("user", row["question"]) + chat.by("assistant", row[each]) for each in spoken},
        remove_columns=[*spoken],
    )
    made(whole.rename_columns({new: old for old, new in spoken.items()}))


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_missing_column_of_answers_is_named_with_its_mend(tmp_path, evaluated):
    def made(data):
        train, held_out = (chat.implicit_preferences(), data) if evaluated else (data, None)
        return DopplerDPOTrainer(
            tiny_llama(), None, arguments(tmp_path), None, train, held_out, processing_class=chat_tokenizer()
        )

    name, whole = "eval_dataset" if evaluated else "train_dataset", chat.preferences()
    for broken, missing in (
        (whole.remove_columns("rejected"), "'rejected'"),
        (whole.rename_column("chosen", "choosen"), "'chosen'"),
        (whole.rename_columns({"chosen": "good", "rejected": "bad"}), "'chosen' and no column 'rejected'"),
    ):
        with refused("no-answers", match=f"^{name} has no column {missing}; it has the columns prompt"):
            made(broken)
    made(whole)  # as advised


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *thorough(
            ("prompt", dict(loss_type="discopop", beta=0.5, discopop_tau=0.3)),
            ("implicit", dict(loss_type="robust", label_smoothing=0.1)),
        ),
        ("conversation", dict(loss_type=["sigmoid", "ipo"], loss_weights=[0.5, 2.0])),
    ],
    ids=str,
)
def test_losses_are_trls_of_each_pair_alone(tmp_path, name, options):
    trainer = in_double(tmp_path, name, max_length=40, **options)
    model, rows = trainer.model, [*trainer._remove_unused_columns(trainer.train_dataset)]
    by_length = sorted(rows, key=lambda row: max(map(len, row["input_ids"])))
    collate = trainer._training_collator()
    together, without_longest = (
        trainer.compute_per_sample_loss(model, trainer._prepare_inputs(collate(some)))
        for some in (by_length, by_length[:-5])
    )
    alone = torch.stack(
        [trainer.compute_loss(model.eval(), trainer._prepare_inputs(trainer.data_collator([row]))) for row in by_length]
    )
    assert alone.std() > 0.01 * alone.mean()
    # TRL's layer that makes log-probabilities computes in float32.
    torch.testing.assert_close(together, alone.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(without_longest, together[:-5], rtol=1e-9, atol=1e-9)


def test_each_loss_of_a_pair_is_trls(tmp_path):
    known = [kind for kind in PAIR_LOSSES if kind not in OF_OTHER_TRAINERS]
    trainer = in_double(tmp_path, max_length=40, loss_type=known, label_smoothing=0.1, discopop_tau=0.3)
    model, rows = trainer.model.eval(), [*trainer._remove_unused_columns(trainer.train_dataset)][:4]
    trainer.loss_weights = [1.0]
    for kind in known:
        trainer.loss_types = [kind]
        ours = trainer.compute_per_sample_loss(model, trainer._prepare_inputs(trainer._training_collator()(rows)))
        trls = torch.stack(
            [trainer.compute_loss(model, trainer._prepare_inputs(trainer.data_collator([row]))) for row in rows]
        )
        assert ours.unique().numel() > 1, kind
        torch.testing.assert_close(ours, trls.double(), rtol=1e-4, atol=1e-5, msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("kind", OF_OTHER_TRAINERS)
def test_losses_without_a_reference_are_those_of_trls_other_trainers(tmp_path, kind):
    """Whose functions of log-probabilities ask their trainer for numbers alone; the rest of a training is as ever."""
    trainer = in_double(
        tmp_path, max_length=40, loss_type=kind, beta=0.3, **({"simpo_gamma": 0.8} if kind == "simpo" else {})
    )
    model, rows = trainer.model.eval(), [*trainer._remove_unused_columns(trainer.train_dataset)][:4]
    inputs = trainer._prepare_inputs(trainer._training_collator()(rows))
    assert not references_of(inputs).any()
    policy, lengths = log_ratios(model, inputs), lengths_of_answers(inputs)
    other = SimpleNamespace(
        alpha=0.0, beta=0.3, simpo_gamma=0.8, label_smoothing=0.0, accelerator=trainer.accelerator,
        loss_type="simpo" if kind == "simpo" else "sigmoid",
    )  # fmt: skip
    of_trl = ORPOTrainer.odds_ratio_loss if kind == "orpo" else CPOTrainer.cpo_loss
    losses, *_ = of_trl(other, *(policy if kind == "cpo" else policy / lengths).unbind(dim=1))
    expected = -losses if kind == "orpo" else losses  # which its trainer subtracts
    torch.testing.assert_close(trainer.compute_per_sample_loss(model, inputs), expected.double(), rtol=1e-4, atol=1e-5)


def test_a_loss_without_a_reference_trains_and_is_evaluated(tmp_path):
    trainer = trainer_of(tmp_path, loss_type=["orpo", "sft"], eval_strategy="steps", eval_steps=1)
    chat.assert_trains_privately(trainer, evaluated={"eval_rewards/margins", "eval_rewards/accuracies"})
    metrics, inputs = trainer.evaluate(), trainer.data_collator([*trainer.eval_dataset])
    with torch.no_grad():
        losses = trainer.compute_per_sample_loss(trainer.model.eval(), side_by_side(inputs))
    assert metrics["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prompt", {}),
        ("prompt", dict(loss_type=["simpo"])),
        ("prompt", dict(privacy_unit_column="judge", per_device_train_batch_size=1, clip_unit_mean=True)),
    ],
)
def test_one_pair_moves_the_sum_by_at_most_c(tmp_path, name, options):
    data = FORMATS[name][0]().map(lambda row, index: {"judge": index % 12}, with_indices=True)
    trainer = in_double(tmp_path, name, data=data, clipping="vanilla", per_sample_max_grad_norm=1e-4, **options)
    result = neighbour_distances(trainer, pairs=2, tolerance=1e-6)
    assert not result.contradicts_claim
    assert 0.3 < result.distances.min() <= result.distances.max() <= 1.0 + 1e-6  # a judge's pairs are averaged
    assert result.couplings.max() < 1e-10


def test_the_reference_of_a_pair_does_not_follow_the_others(tmp_path):
    data = chat.preferences().shuffle(seed=0)
    options = dict(bf16=False, per_device_train_batch_size=8)
    whole = trainer_of(tmp_path, data=data, **options).train_dataset
    for rows in ([2, 17, 5], [9]):
        some = trainer_of(tmp_path, data=data.select(rows), **options).train_dataset
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


def test_defaults_are_those_of_trl_and_ours(tmp_path):
    def defaults(cls):
        made = {field.name: field.default_factory for field in dataclasses.fields(cls)}
        values = {field.name: field.default for field in dataclasses.fields(cls)}
        return values | {name: make() for name, make in made.items() if make is not dataclasses.MISSING}

    changed = {
        "learning_rate": None,
        "max_grad_norm": None,
        "precompute_ref_log_probs": None,
        "simpo_gamma": 0.5,
    }
    assert defaults(DopplerDPOConfig) == defaults(DopplerTrainingArguments) | defaults(DPOConfig) | changed
    private, stock = arguments(tmp_path), arguments(tmp_path, disable_dp=True)
    assert (private.learning_rate, private.precompute_ref_log_probs) == (None, True)
    assert (stock.learning_rate, stock.precompute_ref_log_probs) == (DPOConfig.learning_rate, False)


def test_without_privacy_it_is_trls(tmp_path):
    options = dict(loss_type="aot", ld_alpha=0.5)
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
    assert_trained_alike(ours, stock)
    for name in ("rewards/margins", "num_tokens"):
        assert ours.state.log_history[0][name] == stock.state.log_history[0][name]


# PEFT looks for the base model's own vocabulary where this one, made on the spot, lies nowhere.
@pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")
@pytest.mark.thorough
def test_saved_and_resumed(tmp_path):
    name = "conversation"
    whole, resumed, saved = whole_resumed_and_saved(functools.partial(trainer_of, tmp_path, name), tmp_path)
    assert_trained_alike(resumed, whole)
    assert PrivacyLedger.load(tmp_path).steps_run == 4  # of which one was released twice
    card = (tmp_path / "README.md").read_text()
    assert "DPO" in card
    assert "## Differential privacy" in card
    ids = torch.tensor([resumed.train_dataset[0]["input_ids"][0]])
    logits = [model.eval()(ids).logits for model in (saved, whole.model.cpu())]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


REFUSED = {
    "sync_ref_model": ("breaks-privacy", dict(sync_ref_model=True)),
    "ld_alpha": ("breaks-privacy", dict(ld_alpha=0.5)),
    "precompute_ref_log_probs": ("reference-in-batches", dict(precompute_ref_log_probs=False)),
    "sigmoid, sigmoid_norm, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, "
    "apo_zero, apo_down, discopop, sft, cpo, simpo, orpo; .* aot, aot_unpaired": (
        "loss-of-the-batch",
        dict(loss_type=["aot", "sigmoid", "aot_unpaired"]),
    ),
    "discopop_tau=0.1 .*'discopop'": ("no-effect", dict(discopop_tau=0.1)),
    "selective": ("selective-checkpointing", dict(gradient_checkpointing_kwargs={"selective": True})),
    r"label_smoothing=0.1 .*loss_type=\['sigmoid'\]": ("no-effect", dict(label_smoothing=0.1)),
    "label_smoothing .*0.5": ("out-of-range", dict(loss_type="robust", label_smoothing=0.5)),
    "beta .*0": ("out-of-range", dict(beta=0.0)),
}


@pytest.mark.parametrize("value", REFUSED)
def test_what_would_break_the_guarantee_or_have_no_effect_is_refused(tmp_path, value):
    code, options = REFUSED[value]
    with refused(code, match=value):
        arguments(tmp_path, **options)
    assert arguments(tmp_path, disable_dp=True, **options)


# --- TRL's other trainers --------------------------------------------------------------------------------------------------

MIXED = {
    SFTTrainer: "Use DopplerSFTTrainer.",
    DPOTrainer: "Use DopplerDPOTrainer.",
    CPOTrainer: "Use DopplerDPOTrainer with loss_type=['cpo', 'sft'].",
    ORPOTrainer: "Use DopplerDPOTrainer with loss_type=['orpo', 'sft'].",
    KTOTrainer: "Its loss compares the records of a batch. Use DopplerDPOTrainer with pairs",
    RewardTrainer: "Override compute_per_sample_loss of DopplerTrainer, with rows_per_loss = 2 "
    "(docs/guides/own-loss.md in the repository).",
    RLOOTrainer: "Use DopplerSFTTrainer or DopplerDPOTrainer.",
}


@pytest.mark.parametrize("other", MIXED, ids=lambda other: other.__name__)
def test_a_trainer_that_is_one_of_trls_too_is_refused_by_name_with_what_to_take(other):
    for bases in ((DopplerTrainer, other), (other, DopplerTrainer), (type("Own", (other,), {}), DopplerTrainer)):
        with refused("trainer-of-trl", match=f"{other.__name__} .*{re.escape(MIXED[other])}") as refusal:
            type("Mixed", bases, {})
        assert isinstance(refusal.value, TypeError)
    type("Ours", (DopplerDPOTrainer,), {})


def test_what_is_to_take_for_cpo_trains(tmp_path):
    assert trained(trainer_of(tmp_path, loss_type=["cpo", "sft"], max_steps=1)).state.global_step == 1


class OfRewards(DopplerTrainer):
    """The reward of the first answer of a pair is to be the larger one."""

    rows_per_loss = 2

    def compute_per_sample_loss(self, model, inputs):
        rewards = model(inputs["input_ids"].flatten(0, 1)).logits.unflatten(0, (-1, 2)).squeeze(-1)
        return -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])


def test_a_model_of_rewards_trains_on_pairs_of_rows(tmp_path):
    pairs = Dataset.from_list([{"input_ids": [[5 + row, 6, 7], [8, 9, 5 + row]]} for row in range(24)])
    options = dict(cls=OfRewards, model=tiny_bert(num_labels=1), data=pairs, collator=default_data_collator, max_steps=1)
    assert trained(checked_trainer_of(tmp_path, **options)).state.global_step == 1


def test_private_arguments_are_refused_by_trls_own_trainer(tmp_path):
    data = dict(train_dataset=chat.preferences(), processing_class=chat_tokenizer())
    with refused("stock-trainer", match="DopplerDPOConfig"):
        DPOTrainer(model=tiny_llama(), ref_model=tiny_llama(), args=arguments(tmp_path), **data)
    DPOTrainer(model=tiny_llama(), ref_model=tiny_llama(), args=arguments(tmp_path, disable_dp=True), **data)
