"""A model that was trained privately keeps its ε, whatever is added to it, merged into it or put around it."""

import copy
import math
import re

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, get_peft_model
from torch import nn
from transformers import BertForSequenceClassification

from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting.attack import percent, trade_off, trade_off_at
from doppler_hf.privacy.ledger.terms import _trade_off as trade_off_of_weights
from doppler_hf.privacy.ledger.terms import meaning_in_words
from doppler_hf.run.saving.card_sections import privacy_section
from doppler_hf.run.weights import lineage
from doppler_hf.run.weights.merges import AdaptersAtStart, merged_in, sketched
from tests.support.power import Disk
from tests.support.printed import flat
from tests.support.tiers import thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import On, at, interrupt, trained, trainer_of


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """No training of another test is known."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    forget_this_process()


def forget_this_process():
    lineage._OF_PROCESS.clear()
    lineage._BY_OBJECT.clear()


def forget_the_register(tmp_path):
    for path in (tmp_path / "state/doppler_hf/trainings").glob("*"):
        path.unlink()


def lora(**options):
    return LoraConfig(**dict(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]) | options)


def adapted(config=None, model=None):
    torch.manual_seed(1)
    return get_peft_model(tiny_bert() if model is None else model, config or lora())


def train(tmp_path, name, model, **options):
    trainer = trained(trainer_of(tmp_path / name, model=model, **options))
    trainer.save_model()
    return trainer


def assert_carries(trainer, *earlier):
    """Of each of these trainings, and of no other, the ε is in the trainer's ledger."""
    ledger, theirs = PrivacyLedger.load(trainer.args.output_dir), [other.privacy.ledger for other in earlier]
    assert set(ledger.earlier_trainings) == {other.name for other in theirs}
    total = sum(other.epsilon() for other in theirs) + ledger.epsilon()
    assert math.isclose(ledger.spent.epsilon, total, rel_tol=1e-12)
    assert math.isclose(ledger.spent.delta, (1 + len(theirs)) * ledger.statement.target_delta, rel_tol=1e-12)


def new_head(model):
    model.classifier = nn.Linear(16, 2)
    return model


def first_layers(model):
    del model.bert.encoder.layer[1:]
    return model


def with_copied_encoder(model):
    other = tiny_bert(num_labels=3)
    other.bert.load_state_dict(model.bert.state_dict())
    return other


def another_adapter(model):
    model.add_adapter("second", lora())
    model.set_adapter("second")
    return model


def in_half_precision(precision):
    """Saved in half precision, and read again."""
    return lambda model: copy.deepcopy(model).to(precision).float()


def trained_on_public_data(model):
    """Every weight has moved since, without privacy."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize(
    ("make", "then"),
    [
        (adapted, lambda model: adapted(model=model.merge_and_unload())),
        (adapted, another_adapter),
        (tiny_bert, lambda model: adapted(model=model)),
        (tiny_bert, new_head),
        (tiny_bert, with_copied_encoder),
        (tiny_bert, in_half_precision(torch.bfloat16)),
        *thorough(
            (tiny_bert, in_half_precision(torch.float16)),
            (adapted, copy.deepcopy),
            (lambda: tiny_bert(num_hidden_layers=2), first_layers),
            (adapted, lambda model: adapted(lora(r=4), model=copy.deepcopy(model).merge_and_unload())),
            (lambda: adapted(lora(use_dora=True)), lambda model: adapted(model=copy.deepcopy(model).merge_and_unload())),
            (
                lambda: adapted(IA3Config(task_type="SEQ_CLS", target_modules=["key", "value"], feedforward_modules=[])),
                lambda model: adapted(model=copy.deepcopy(model).merge_and_unload()),
            ),
            (
                lambda: adapted(OFTConfig(task_type="SEQ_CLS", oft_block_size=4, target_modules=["query"])),
                lambda model: adapted(model=copy.deepcopy(model).merge_and_unload()),
            ),
        ),
    ],
)
@pytest.mark.parametrize("same_process", [True, False], ids=["one process", "two processes"])
def test_a_chain_of_two(tmp_path, make, then, same_process):
    first = train(tmp_path, "first", make())
    model = then(first.model)
    if not same_process:
        model = copy.deepcopy(model)  # another process has other objects
        forget_this_process()
        (tmp_path / "first/out" / LEDGER_NAME).rename(tmp_path / "elsewhere.json")
    assert_carries(train(tmp_path, "second", model), first)


def test_a_model_that_was_trained_on_public_data_in_between(tmp_path):
    first = train(tmp_path, "first", tiny_bert())
    assert_carries(train(tmp_path, "second", trained_on_public_data(first.model)), first)


def test_an_adapter_read_from_a_folder(tmp_path):
    first = train(tmp_path, "first", adapted())
    forget_this_process()
    again = PeftModel.from_pretrained(tiny_bert(), first.args.output_dir, is_trainable=True)
    assert_carries(train(tmp_path, "second", again), first)


def test_an_adapter_that_is_merged_in_another_precision(tmp_path):
    first = train(tmp_path, "first", adapted(), learning_rate=0.1)
    forget_this_process()
    base = PeftModel.from_pretrained(tiny_bert().bfloat16(), first.args.output_dir)
    assert_carries(train(tmp_path, "second", adapted(model=base.merge_and_unload().float())), first)


def test_a_ledger_beside_the_output_folder_says_what_the_register_does_not(tmp_path):
    """As on another machine, to which the folders of both trainings were brought."""
    first = train(tmp_path, "first", adapted())
    (tmp_path / "runs").mkdir()
    (tmp_path / "first/out").rename(tmp_path / "runs/first")
    forget_this_process()
    forget_the_register(tmp_path)
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "runs/first", is_trainable=True)
    second = trained(trainer_of(tmp_path, model=again, output_dir=str(tmp_path / "runs/second")))
    assert_carries(second, first)


def test_one_model_in_trainers_a_b_a_c(tmp_path):
    model = tiny_bert()
    a, b, c = (trainer_of(tmp_path / name, model=model) for name in "abc")
    a.train()
    once = a.privacy.epsilon()
    b.train()
    assert_carries(b, a)
    a.train()
    assert a.privacy.epsilon() > once
    assert_carries(a, b)
    c.train()
    assert_carries(c, a, b)


def test_each_training_of_a_chain_counts_once(tmp_path):
    model, done = tiny_bert(), []
    for name in ("first", "second", "third"):
        done.append(train(tmp_path, name, model))
        model = BertForSequenceClassification.from_pretrained(done[-1].args.output_dir)
        assert_carries(done[-1], *done[:-1])


@pytest.mark.parametrize("event", ["evaluate", "epoch_end"])
@pytest.mark.parametrize("part", ["", "bert.encoder."], ids=["all", "encoder"])
def test_weights_that_a_callback_keeps_at_an_evaluation_or_an_epoch_are_known(tmp_path, event, part):
    kept = []
    keep = On(**{event: lambda model, **of: kept.append(copy.deepcopy(model.state_dict()))})
    of_evaluations = dict(eval_strategy="steps", eval_steps=1)
    first = trained(trainer_of(tmp_path / "first", max_steps=12, callbacks=[keep], **of_evaluations))
    forget_this_process()
    (tmp_path / "first/out" / LEDGER_NAME).unlink()
    model = tiny_bert()
    model.load_state_dict({name: value for name, value in kept[0].items() if name.startswith(part)}, strict=False)
    second = trained(trainer_of(tmp_path / "second", model=model))
    assert_carries(second, first)


def test_what_an_interrupted_training_left_is_known(tmp_path):
    first = trainer_of(tmp_path / "first", callbacks=[On(step_end=at(2, interrupt))])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert_carries(train(tmp_path, "second", new_head(first.model)), first)


def another_base(model):
    torch.manual_seed(7)
    return adapted(model=BertForSequenceClassification(model.config))


@pytest.mark.parametrize(
    ("make", "then"),
    [
        (tiny_bert, lambda _: tiny_bert()),
        (adapted, lambda model: adapted(model=new_head(model.unload()))),  # whose head was trained
        (adapted, another_base),
        (tiny_bert, lambda model: model.load_state_dict(tiny_bert().state_dict()) and model),
        # Its configuration names the folder, and its weights are its own.
        (tiny_bert, lambda model: BertForSequenceClassification(model.config)),
    ],
    ids=["a new model", "the adapter taken out", "another base", "put back", "from its configuration"],
)
def test_a_model_that_carries_nothing(tmp_path, make, then, capsys):
    first = train(tmp_path, "first", make())
    if make is tiny_bert:
        first.model.config._name_or_path = first.args.output_dir
    torch.manual_seed(3)
    second = train(tmp_path, "second", then(first.model))
    assert second.privacy.ledger.earlier is None
    assert "already trained" not in capsys.readouterr().out


def test_a_model_from_a_configuration_does_not_take_the_ledger_of_the_working_folder(tmp_path, monkeypatch):
    first = train(tmp_path, "first", tiny_bert())
    monkeypatch.chdir(first.args.output_dir)
    torch.manual_seed(3)
    assert train(tmp_path, "second", BertForSequenceClassification(first.model.config)).privacy.ledger.earlier is None


def test_weights_that_did_not_move_are_not_recognised(tmp_path):
    """Another model may have the same: here, the embeddings and layers under a head that was trained alone."""
    model = tiny_bert()
    model.bert.requires_grad_(False)
    train(tmp_path, "first", model)
    forget_this_process()
    assert train(tmp_path, "second", new_head(tiny_bert())).privacy.ledger.earlier is None


def ia3():
    return IA3Config(task_type="SEQ_CLS", target_modules=["key", "value"], feedforward_modules=[])


def oft():
    return OFTConfig(task_type="SEQ_CLS", oft_block_size=4, target_modules=["query"])


@pytest.mark.parametrize("config", [lora, ia3, *thorough(oft)])
def test_a_trained_adapter_of_unknown_origin_is_pointed_out(tmp_path, capsys, config):
    first = train(tmp_path, "first", adapted(config()))
    capsys.readouterr()
    forget_this_process()
    forget_the_register(tmp_path)
    (tmp_path / "first/out" / LEDGER_NAME).unlink()
    again = PeftModel.from_pretrained(tiny_bert(), first.args.output_dir, is_trainable=True)
    assert train(tmp_path, "second", again).privacy.ledger.earlier is None
    words = "(it changes the model's output), and no ledger on this machine covers it."
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "config",
    [
        lora(),
        IA3Config(task_type="SEQ_CLS", target_modules=["key", "value"], feedforward_modules=[]),
        *thorough(lora(init_lora_weights="pissa"), lora(init_lora_weights="gaussian")),
    ],
)
def test_a_new_adapter_is_not_pointed_out(tmp_path, capsys, config):
    train(tmp_path, "first", adapted(config))
    assert "already trained" not in capsys.readouterr().out


def test_the_register_keeps_the_latest_trainings(tmp_path, monkeypatch):
    monkeypatch.setattr(lineage, "_MOST_TRAININGS", 2)
    for name in ("first", "second", "third"):
        train(tmp_path, name, tiny_bert())
    assert len([*(tmp_path / "state/doppler_hf/trainings").glob("*.json")]) == 2


def test_the_register_is_on_the_disk_once_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    disk = Disk(monkeypatch)
    lineage._write("0" * 16, lineage.Record({}, frozenset(), ()))
    assert (tmp_path / "states/doppler_hf/trainings" / f"{'0' * 16}.json").exists()
    assert not disk.lost


def test_a_register_that_cannot_be_written_or_read_stops_nothing(tmp_path):
    (tmp_path / "state").write_text("no folder")
    first = train(tmp_path, "first", adapted())
    assert_carries(train(tmp_path, "second", adapted(model=first.model.merge_and_unload())), first)
    (tmp_path / "state").unlink()
    (tmp_path / "state/doppler_hf/trainings").mkdir(parents=True)
    (tmp_path / "state/doppler_hf/trainings/ffff.json").write_text('{"trainings": ')
    train(tmp_path, "third", tiny_bert())


def verified(folder, capsys):
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    return flat(capsys.readouterr().out)


@pytest.mark.parametrize(("delta", "is_large"), [(None, True), (1e-3, False)])
def test_deltas_that_add_up_to_more_than_one_of_n_are_told(tmp_path, capsys, delta, is_large):
    """By default δ = N^−1.1, and two of them are above 1/N for every N below 1,024."""
    first = train(tmp_path, "first", tiny_bert(), target_delta=delta)
    assert "δ of all runs add up" not in capsys.readouterr().out
    second = train(tmp_path, "second", first.model, target_delta=delta)
    said = flat(capsys.readouterr().out)
    words = f"All δ add up to {second.privacy.ledger.spent.delta:.3g}, which is above 1/N = 0.0417"
    for shown in (said, verified(second.args.output_dir, capsys), privacy_section(second.privacy.ledger)):
        assert (words in shown) == is_large
    assert ("the δ of all runs add up to 1/N or more" in said) == is_large


def test_the_delta_that_is_proposed_for_a_further_run_keeps_the_sum_small(tmp_path, capsys):
    first = train(tmp_path, "first", tiny_bert())
    options = dict(model=copy.deepcopy(first.model))
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "second", callbacks=[On(step_begin=interrupt)], **options).train()
    proposed = float(re.search(r"start again with target_delta=([\d.e-]+)", capsys.readouterr().out)[1])
    again = trained(trainer_of(tmp_path / "second", target_delta=proposed, **options))
    assert "of all runs add up to 1/N" not in capsys.readouterr().out
    assert first.privacy.ledger.statement.target_delta + proposed == again.privacy.ledger.spent.delta < 1 / 24


def test_more_data_than_the_earlier_delta_allows_are_told_with_what_to_do(tmp_path, capsys):
    """The default δ of the first run alone is above 1/N of the second. The mend is to begin with a smaller one."""
    for number, delta in enumerate((None, "proposed")):
        terms = dict(target_delta=delta and float(re.search(r"target_delta, such as ([\d.e-]+)", printed)[1]))
        first = trained(trainer_of(tmp_path / f"first{number}", data=text_data(24), **terms))
        second = trainer_of(tmp_path / f"second{number}", data=text_data(48), model=copy.deepcopy(first.model), **terms)
        trained(second)
        printed = capsys.readouterr().out
        assert ("no target_delta of this run changes that" in printed) == (delta is None)
    assert second.privacy.ledger.spent.delta < 1 / 48


def test_the_limits_on_attacks_of_several_runs_make_use_of_the_terms_of_the_last(tmp_path, capsys):
    options = dict(noise_multiplier=3.0, target_delta=1e-3)
    first = train(tmp_path, "first", tiny_bert(), **options)
    second = train(tmp_path, "second", first.model, **options)
    ledger, rates = second.privacy.ledger, (0.001, 0.01, 0.3)
    both = trade_off_of_weights(ledger)
    of_pair = trade_off_at(ledger.spent.epsilon, delta=ledger.spent.delta)
    # Not below the runs together, of which the terms are known here.
    exact = trade_off([*first.privacy.ledger.plans[0], *ledger.plans[0]])
    for rate in rates:
        found = [each.true_positive_rate(rate) for each in (exact, both, of_pair)]
        assert found == sorted(found)
        assert found[1] < found[2]
    assert exact.advantage <= both.advantage < of_pair.advantage
    own = percent(ledger.trade_off().true_positive_rate(0.01))
    assert (
        f"Of the others only ε and δ are known, so this limit is loose; in this run alone it is {own}."
        in meaning_in_words(ledger)
    )
    assert "others" not in meaning_in_words(first.privacy.ledger)
    assert f"at most {percent(both.advantage)} (in this run alone" in verified(second.args.output_dir, capsys)


# --- half precision, checkpoints, small steps ---


class Weights(nn.Module):
    def __init__(self, **values):
        super().__init__()
        self.values = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in values.items()})


def marks_after(model, change, tmp_path):
    """The marks of a model that a run has trained so."""
    run = lineage.Lineage(model, output_dir=tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            change(parameter)
    return run.marks_of_trained(model)


def marks_of(model):
    return frozenset().union(*(lineage._marks(parameter).all for parameter in model.parameters()))


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_base_is_not_taken_for_what_was_trained_from_it(tmp_path, rate, precision):
    """Few values of a vector cross to another number of half precision, and those of a resumed run may come back."""
    torch.manual_seed(0)
    base = {str(place): (0.3 + 0.2 * torch.rand(2048)).to(precision).float() for place in range(20)}
    base |= {"ones": torch.ones(768), "matrix": 0.04 * torch.randn(128, 256), "small": torch.randn(16, 16)}
    for _ in range(3):
        model = Weights(**base)
        marks_after(model, lambda value: value.add_(rate * 20 * torch.randn(value.shape)), tmp_path)
        found = marks_after(model, lambda value: value.add_(rate * 20 * torch.randn(value.shape)), tmp_path)
        assert found
        for copy_of in (Weights(**base), Weights(**base).bfloat16(), Weights(**base).half()):
            assert found.isdisjoint(marks_of(copy_of))


def test_vectors_that_moved_a_little_are_recognised(tmp_path):
    """As IA³ trains them: below the spacing of half precision."""
    model = Weights(scale=torch.ones(64))
    found = marks_after(model, lambda value: value.add_(1e-4 * torch.randn(64)), tmp_path)
    assert not found.isdisjoint(marks_of(copy.deepcopy(model)))


@pytest.mark.parametrize("learning_rate", [1e-3, *thorough(1e-2)])
@pytest.mark.parametrize("then", ["saved in bfloat16", "merged in bfloat16", *thorough("saved in float16")])
def test_a_small_merge_is_recognised_in_half_precision(tmp_path, learning_rate, then):
    config = dict(hidden_size=128, intermediate_size=128)
    first = train(tmp_path, "first", adapted(model=tiny_bert(**config)), learning_rate=learning_rate)
    forget_this_process()
    base = tiny_bert(**config).bfloat16() if then == "merged in bfloat16" else tiny_bert(**config)
    merged = PeftModel.from_pretrained(base, first.args.output_dir).merge_and_unload()
    merged = merged.half() if "float16" in then and "b" not in then else merged.bfloat16()
    assert_carries(train(tmp_path, "second", adapted(model=new_head_of(merged.float()))), first)


def new_head_of(model):
    model.classifier = nn.Linear(128, 2)
    return model


def test_a_checkpoint_that_is_merged_is_recognised_also_after_a_resume(tmp_path):
    options = dict(save_strategy="steps", save_steps=2, max_steps=4)
    first = trainer_of(tmp_path / "first", model=adapted(), callbacks=[On(step_end=at(3, interrupt))], **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    forget_this_process()
    resumed = trainer_of(tmp_path / "first", model=adapted(), **options)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    forget_this_process()
    early = PeftModel.from_pretrained(tiny_bert(), tmp_path / "first/out/checkpoint-2").merge_and_unload()
    assert_carries(train(tmp_path, "second", adapted(model=new_head(early))), resumed)


# --- merges in other precisions, of several adapters, and of adapters that begin elsewhere ---

WIDE = dict(hidden_size=128, intermediate_size=128)
EIGHT = dict(r=8, lora_alpha=16)


def merged_from(base, *folders, **options):
    """Merge the adapters of these folders into a base one after the other, as a user does."""
    for folder in folders:
        base = PeftModel.from_pretrained(base, folder, **options).merge_and_unload()
    return base


@pytest.mark.parametrize("learning_rate", [1e-3, *thorough(1e-4)])
@pytest.mark.parametrize("kept_in_float32", [True, *thorough(False)])
@pytest.mark.parametrize(
    ("trained_in", "precision"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        *thorough(
            (torch.float32, torch.float16),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float16),
        ),
    ],
)
def test_an_adapter_is_recognised_in_a_base_of_another_precision(
    tmp_path, trained_in, precision, kept_in_float32, learning_rate
):
    base = tiny_bert(**WIDE)
    model = adapted(lora(**EIGHT), model=copy.deepcopy(base).to(trained_in))
    first = train(tmp_path, "first", model, learning_rate=learning_rate, max_steps=10, rehearse=False)
    forget_this_process()
    merged = merged_from(base.to(precision), first.args.output_dir, autocast_adapter_dtype=kept_in_float32)
    assert_carries(train(tmp_path, "second", adapted(model=new_head_of(merged.float()))), first)


@pytest.fixture
def two_adapters(tmp_path):
    trainers = [train(tmp_path, name, adapted(lora(task_type=None), model=tiny_bert(**WIDE))) for name in ("first", "other")]
    forget_this_process()
    return trainers


def at_once(first, other):
    model = PeftModel.from_pretrained(tiny_bert(**WIDE), first, adapter_name="a")
    model.load_adapter(other, "b")
    model.base_model.set_adapter(["a", "b"])
    return model.merge_and_unload(adapter_names=["a", "b"])


def combined(kind, weights):
    def make(first, other):
        model = PeftModel.from_pretrained(tiny_bert(**WIDE), first, adapter_name="a")
        model.load_adapter(other, "b")
        model.add_weighted_adapter(["a", "b"], weights, "both", combination_type=kind)
        model.set_adapter("both")
        model.delete_adapter("a")
        model.delete_adapter("b")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".both." in name)
        return model

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda *folders: adapted(model=new_head_of(at_once(*folders))),
        lambda *folders: adapted(model=new_head_of(merged_from(tiny_bert(**WIDE), *folders))),
        combined("cat", [1.0, 1.0]),
        *thorough(
            combined("linear", [0.5, 0.5]),
            lambda *folders: adapted(model=new_head_of(merged_from(tiny_bert(**WIDE).bfloat16(), *folders).float())),
        ),
    ],
)
def test_two_adapters_in_one_model_are_both_recognised(tmp_path, two_adapters, make):
    model = make(*(trainer.args.output_dir for trainer in two_adapters))
    assert_carries(train(tmp_path, "second", model), *two_adapters)


def test_one_of_several_adapters_is_recognised_alone(tmp_path, two_adapters):
    first, _ = two_adapters
    merged = merged_from(tiny_bert(**WIDE).bfloat16(), first.args.output_dir).float()
    assert_carries(train(tmp_path, "second", adapted(model=new_head_of(merged))), first)


def test_an_adapter_trained_on_a_merge_is_recognised_in_the_bare_base(tmp_path):
    first = train(tmp_path, "first", adapted(model=tiny_bert(**WIDE)))
    stacked = adapted(model=merged_from(tiny_bert(**WIDE), first.args.output_dir))
    second = train(tmp_path, "stacked", stacked)
    forget_this_process()
    merged = merged_from(tiny_bert(**WIDE), second.args.output_dir)
    assert_carries(train(tmp_path, "second", adapted(model=new_head_of(merged))), first, second)


@pytest.mark.parametrize("start", ["pissa", *thorough("olora", True, "pissa_niter_4")])
def test_a_base_is_not_charged_for_an_adapter_that_begins_elsewhere(tmp_path, start):
    config = lora(init_lora_weights=start)
    # A rehearsal refuses what PEFT draws a second time when it loads the adapter, as it does with "pissa_niter_4".
    options = dict(rehearse=start != "pissa_niter_4")
    first, _ = (train(tmp_path, name, adapted(config, model=tiny_bert(**WIDE)), **options) for name in ("first", "other"))
    forget_this_process()
    for name, model in (("in full", tiny_bert(**WIDE)), ("adapted", adapted(config, model=tiny_bert(**WIDE)))):
        assert train(tmp_path, name, new_classes(model), **options).privacy.ledger.earlier is None
    forget_this_process()
    base = tiny_bert(**WIDE)
    torch.manual_seed(1)  # with other numbers the merged model would be another one
    merged = merged_from(base, first.args.output_dir)
    assert_carries(train(tmp_path, "second", adapted(model=new_head_of(merged))), first)


def new_classes(model):
    """A head of other values, since the run before trained the same one."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "classifier" in name and value.ndim > 1:
                value.normal_(0, 0.02)
    return model


def test_a_training_is_not_charged_for_its_continuation(tmp_path):
    first = train(tmp_path, "first", adapted(model=tiny_bert(**WIDE)), learning_rate=1e-2)
    model = PeftModel.from_pretrained(tiny_bert(**WIDE), first.args.output_dir, is_trainable=True)
    train(tmp_path, "continued", model, learning_rate=1e-4, rehearse=False)
    forget_this_process()
    merged = merged_from(tiny_bert(**WIDE), first.args.output_dir)
    assert_carries(train(tmp_path, "second", adapted(model=new_head_of(merged))), first)


@pytest.mark.parametrize("share", [0.0, 0.6, *thorough(0.9, 1.5, -0.5)])
def test_a_bare_base_is_not_taken_for_an_adapter_that_a_run_continued(share):
    """A resumed run begins with the adapter of its checkpoint, and may go back to an earlier one as the best."""
    model = adapted(model=tiny_bert(**WIDE))
    seconds = [value for name, value in model.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for value in seconds:
            value.normal_(0.0, 0.1)
        at_start = AdaptersAtStart(model)
        for value in seconds:
            value.mul_(share).add_(0.02 * torch.randn_like(value))
        known = [(0, sketched(layers)) for layers, is_sketched in at_start.merges(model) if is_sketched]
    assert len(known) == 1
    assert merged_in(tiny_bert(**WIDE), known) == set()
    assert merged_in(model.merge_and_unload(), known) == {0}


@pytest.mark.parametrize("records", [1, 2, 128])
def test_two_adapters_of_one_seed_are_both_recognised_however_different_their_sizes(records):
    """In the process that trained them each has two records, one of the process and one of the register.

    The records of all checkpoints of several runs may be more than the 128 sketched numbers. As they repeat each other, they
    must not explain everything.
    """
    known, adapters = [], []
    for owner, size in enumerate((0.02, 0.03)):
        model = adapted(model=tiny_bert(**WIDE))
        at_start = AdaptersAtStart(model)
        torch.manual_seed(10 + owner)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.normal_(0.0, size)
        known += [(owner, sketched(layers)) for layers, is_sketched in at_start.merges(model) if is_sketched]
        adapters.append({name: value for name, value in model.state_dict().items() if "lora_" in name})
    both = tiny_bert(**WIDE)
    for adapter in adapters:
        one = adapted(model=both)
        one.load_state_dict(adapter, strict=False)
        both = one.merge_and_unload()
    assert merged_in(both, known * records) == {0, 1}


# --- branches of one ledger ---


def test_branches_of_one_training_add_up_and_what_they_share_counts_once(tmp_path):
    options = dict(save_strategy="steps", save_steps=2, max_steps=4)
    trainer_of(tmp_path / "p/first", model=tiny_bert(), **options).train()
    checkpoint = tmp_path / "p/first/out/checkpoint-2"
    branches = []
    for name in ("q", "r"):
        trainer = trainer_of(tmp_path / name / "branch", model=tiny_bert(), **options)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        branches.append(trainer)
        assert trainer.privacy.ledger.earlier is None
    forget_this_process()
    model = copy.deepcopy(branches[0].model)
    model.bert.encoder.load_state_dict(branches[1].model.bert.encoder.state_dict())
    ledger = train(tmp_path, "both", model).privacy.ledger
    of_each = [trainer.privacy.ledger.trainings for trainer in branches]
    (shared,) = of_each[0].keys() & of_each[1].keys()
    total = sum(trainer.privacy.epsilon() for trainer in branches) - of_each[0][shared].epsilon
    assert math.isclose(ledger.earlier.epsilon, total, rel_tol=1e-12)
    assert ledger.earlier.epsilon > 1.2 * max(trainer.privacy.epsilon() for trainer in branches)
