"""`optim_args` and `optim_target_modules` mean what they mean to Transformers, and nothing in them is passed over."""

import dataclasses
import sys
import types

import pytest
from torch import nn
from transformers import TrainingArguments, trainer_optimizer
from transformers.pytorch_utils import Conv1D

from doppler_hf.training_args.galore import GaloreArguments, target_parameters
from tests.support.models import MODELS
from tests.support.refusals import refused
from tests.support.tiny import tiny_bert

EVERYTHING = "rank=64, update_proj_gap=100, scale=0.10"


def test_a_line_is_read():
    assert GaloreArguments.parse(EVERYTHING) == GaloreArguments(64, 100, 0.1)
    assert GaloreArguments.parse("scale=1e-2,proj_type=std") == GaloreArguments(scale=0.01)


@pytest.mark.parametrize("line", [None, EVERYTHING])
def test_transformers_reads_the_same(line, tmp_path, monkeypatch):
    received = {}
    fake = types.SimpleNamespace(GaLoreAdafactor=None, GaLoreAdamW=None, GaLoreAdamW8bit=None)
    monkeypatch.setitem(sys.modules, "galore_torch", fake)
    monkeypatch.setattr(trainer_optimizer, "is_galore_torch_available", lambda: True)
    monkeypatch.setattr(
        trainer_optimizer, "_setup_low_rank_optimizer",
        lambda args, model, name, mapping, galore, kwargs: received.update(galore) or (None, kwargs),
    )  # fmt: skip
    args = TrainingArguments(output_dir=str(tmp_path), optim="galore_adamw")
    options = trainer_optimizer._parse_optim_args(line)
    trainer_optimizer._get_galore_optimizer(trainer_optimizer.OptimizerContext(args, None, {}, {}, options))
    own = dataclasses.asdict(GaloreArguments.parse(line))
    assert received.pop("proj_type") == "std"
    assert received == {name: own[name] for name in received}
    assert len(received) == 3


REFUSED_LINES = [
    ("rank=4,lr=1", "unknown-option"),
    ("rank", "unknown-option"),
    ("rank=0", "out-of-range"),
    ("rank=4.0", "filter-syntax"),
    ("update_proj_gap=0", "out-of-range"),
    ("scale=0", "out-of-range"),
    ("scale=nan", "out-of-range"),
    ("scale=1/4", "filter-syntax"),
    ("proj_type=reverse_std", "unknown-option"),
]


@pytest.mark.parametrize(("line", "code"), REFUSED_LINES, ids=[line for line, _ in REFUSED_LINES])
def test_refused_lines(line, code):
    with refused(code, match=line.split("=")[0]):
        GaloreArguments.parse(line)


def linear_weights(model, *kinds):
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}


def transformers_targets(model, optim_target_modules, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), optim="galore_adamw", optim_target_modules=optim_target_modules)
    try:
        _, kwargs = trainer_optimizer._setup_low_rank_optimizer(args, model, "galore_adamw", {"galore_adamw": None}, {}, {})
    except ValueError:  # Transformers' way to say that there is none
        return []
    targets = {id(p) for p in kwargs["params"][1]["params"]}
    return [name for name, p in model.named_parameters() if id(p) in targets]


@pytest.mark.parametrize(
    "targets",
    ["all-linear", "all_linear", ["query", "value"], r".*layer\.1.*\.query", [r".*\.0\..*", "classifier"]],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert", "llama-lm"])
def test_transformers_chooses_the_same_matrices(name, targets, tmp_path):
    model = MODELS[name]("sdpa")
    expected = transformers_targets(model, targets, tmp_path)
    if not expected:
        assert name != "bert"
        with refused("no-galore-target"):
            target_parameters(model, targets)
        return
    chosen = target_parameters(model, targets)
    assert list(chosen) == expected
    assert all(chosen[name] is p for name, p in model.named_parameters() if name in chosen)


@pytest.mark.parametrize("targets", ["all-linear", [".*"]], ids=str)
@pytest.mark.parametrize("name", ["gpt2-lm", "t5-lm"])
def test_embedding_tables_are_never_projected(name, targets):
    """Also where the head is the table: its gradient is one of rows that were looked up."""
    model = MODELS[name]("sdpa")
    chosen = target_parameters(model, targets)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    assert tables
    assert not any(p is table for p in chosen.values() for table in tables)
    assert set(chosen) <= linear_weights(model, nn.Linear, Conv1D)


def test_of_adapters_only_what_is_trained():
    model = MODELS["roberta-lora"]("sdpa")
    chosen = target_parameters(model, "all-linear")
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2}
    assert set(chosen) == trainable
    assert {name.split(".")[-3] for name in chosen} >= {"lora_A", "lora_B"}
    assert set(target_parameters(model, ["query"])) == {name for name in trainable if "query" in name}


def test_no_match_says_what_there_is():
    bert = tiny_bert()
    with refused("no-galore-target", match=r"\['c_attn'\]") as refusal:
        target_parameters(bert, ["c_attn"])
    assert "are: bert.encoder.layer.0.attention.self.query, bert.encoder" in str(refusal.value)
