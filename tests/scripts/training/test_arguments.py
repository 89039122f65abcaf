"""Recipe and flags: types, precedence, and the refusal of names that do not exist."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from scripts.training.arguments import one_line_errors, parse_args, read_recipe
from tests.support.refusals import refused


@dataclass
class Model:
    name: str
    hidden: int = 4
    modules: list[str] = field(default_factory=list)


@dataclass
class Training:
    learning_rate: float = 1e-3
    save_strategy: str = "steps"
    shuffle: bool = True
    fp16: bool = False
    extra: dict[str, Any] | str | None = None
    target_epsilon: float | None = 3.0


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_recipe_values_have_the_types_of_the_fields(tmp_path):
    # 5e-4 is a string and no a boolean to YAML 1.1, 1 is no float to it.
    path = recipe(
        tmp_path, "name: 007\nlearning_rate: 5e-4\nsave_strategy: no\nshuffle: no\nfp16: true\ntarget_epsilon: 1\n"
    )
    model, training = parse_args(Model, Training, argv=[path])
    assert model.name == "007"
    assert training == Training(5e-4, save_strategy="no", shuffle=False, fp16=True, target_epsilon=1.0)
    assert isinstance(training.target_epsilon, float)


def test_flags_override_the_recipe(tmp_path):
    path = recipe(tmp_path, "name: vit\nlearning_rate: 5e-4\nshuffle: true\nhidden: 8\n")
    model, training = parse_args(Model, Training, argv=[path, "--learning_rate", "1e-2", "--no_shuffle", "--name=bert"])
    assert model == Model("bert", hidden=8)
    assert training == Training(learning_rate=1e-2, shuffle=False)


def test_lists_and_mappings(tmp_path):
    text = "name: -x\nmodules: [query, value]\nextra:\n  min_lr: 1\n"
    model, training = parse_args(Model, Training, argv=[recipe(tmp_path, text)])
    assert model == Model("-x", modules=["query", "value"])
    assert training.extra == {"min_lr": 1}
    model, training = parse_args(Model, Training, argv=[recipe(tmp_path, text), "--modules", "key", "--target_epsilon", "8"])
    assert model.modules == ["key"]
    assert training.target_epsilon == 8.0


def test_unknown_names_are_refused_with_close_ones(tmp_path):
    path = recipe(tmp_path, "name: a\nlerning_rate: 1\nzzz: [1]\n")
    with refused("unknown-arguments", match=r"yaml.*'lerning_rate'.* learning_rate\?\), 'zzz'"):
        parse_args(Model, Training, argv=[path])
    with refused("unknown-arguments", match=r"'fp-16'.* fp16\?"):
        parse_args(Model, Training, argv=["--name", "a", "--fp-16", "true"])
    with refused("unknown-arguments", match="'stray'"):
        parse_args(Model, Training, argv=["--name", "a", "stray"])


@pytest.mark.parametrize(("text", "found"), [("- a\n- b\n", "list"), ("a: [", "line 1"), ("just words", "str")])
def test_recipes_that_are_none(tmp_path, text, found):
    with refused("recipe-not-yaml", match=found):
        parse_args(Model, argv=[recipe(tmp_path, text)])


@pytest.mark.parametrize("word", ["None", "'null'", "null", ""])
def test_no_value_is_refused(tmp_path, word):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"learning_rate: {word}\n")
    with refused("recipe-without-value", match="^learning_rate"):
        read_recipe(path)


def test_wrong_type_and_missing_field_end_the_program(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_args(Model, argv=[recipe(tmp_path, "name: a\nhidden: many\n")])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith("[recipe.yaml] [--field value ...]")
    assert error.endswith("argument --hidden: invalid int value: 'many'")
    with pytest.raises(SystemExit):
        parse_args(Model, argv=[])
    assert "--name" in capsys.readouterr().err


def test_one_line_errors():
    with pytest.raises(SystemExit, match=r"^error: no such thing$"), one_line_errors():
        raise ValueError("no such thing")
    with pytest.raises(ZeroDivisionError), one_line_errors():
        _ = 1 / 0
