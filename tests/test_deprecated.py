"""Every old name works as what replaces it and warns, and a value that nothing replaces is refused."""

import importlib
import sys

import numpy as np
import pytest
import scipy.signal

import doppler_hf
from doppler_hf import deprecated, filters
from doppler_hf.audit import AuditTrainer
from doppler_hf.cli import COMMANDS, main
from doppler_hf.filters import LowPassFilter
from doppler_hf.privacy import AllocationSampler
from tests.support.refusals import refused
from tests.support.trainers import arguments, trainer_of

COMMAND_LINES = {
    "plan": ["plan", "--num-examples=2000", "--batch-size=100", "--max-steps=20", "--noise-multiplier=1", "--json"],
    "estimate": ["estimate", "--model=/nowhere", "--task=causal-lm", "--length=8", "--batch-size=8"],
    "audit": ["audit", "/nowhere.yaml"],
    "filter": ["filter", "momentum"],
}
SERIES = np.random.default_rng(0).normal(size=(45, 3))


def without(tables):
    return [(owner, name) for owner, names in tables.items() for name in names]


@pytest.mark.parametrize(("package", "name"), without(deprecated.NAMES))
def test_an_old_name_is_there_and_warns(package, name):
    module = importlib.import_module(package)
    assert name not in module.__all__
    with pytest.warns(FutureWarning, match=rf"^{package}\.{name} is deprecated and .* \w.*\.$") as warned:
        found = getattr(module, name)
    assert warned[0].filename == __file__
    assert found.__name__ == deprecated.NAMES[package][name].rpartition(".")[2]
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = module.no_such_name


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_what_old_names_stand_for_is_right():
    from doppler_hf.audit import DiracAuditTrainer

    assert DiracAuditTrainer is AuditTrainer
    assert filters.from_coefficients([1, 1]) == LowPassFilter(b=(0.5, 0.5))
    b, a = scipy.signal.butter(2, 0.1)
    again = filters.from_coefficients(6 * b, 2 * a)
    np.testing.assert_allclose((again.b, again.a), (b, a), rtol=1e-12)
    assert LowPassFilter.parse(filters.write_coefficients(again)) == again
    assert filters.write_coefficients(LowPassFilter(b=(0.5, 0.5))) == "b=0.5,0.5;a=1.0"
    momentum = LowPassFilter.parse("momentum:beta=0.5")
    out, state = np.zeros_like(SERIES), np.zeros(3)
    for t, row in enumerate(SERIES):
        state = 0.5 * state + 0.5 * row
        out[t] = state / (1 - 0.5 ** (t + 1))
    np.testing.assert_allclose(filters.corrected_output(momentum, SERIES), out, rtol=1e-12)
    frequencies, density = filters.power_spectral_density(np.random.default_rng(0).normal(size=(400, 50)))
    assert (frequencies[0], frequencies[-1]) == (0.0, 1.0)
    np.testing.assert_allclose(density, 1.0, rtol=0.2)  # white noise: the mean of 8 spectra of 50 coordinates
    with refused("earlier-value", match="'autocorrelation'; 'welch'"):
        filters.power_spectral_density(SERIES, "autocorrelation")


@pytest.mark.parametrize(("owner", "name"), without(deprecated.ATTRIBUTES))
def test_an_old_attribute_is_the_new_one_and_warns(owner, name, tmp_path):
    trainer = {"DopplerTrainer": trainer_of}[owner](tmp_path)
    new = deprecated.ATTRIBUTES[owner][name]
    with pytest.warns(FutureWarning, match=rf"^{owner}\.{name} is deprecated and .* Use {new}, its new name\.$") as warned:
        found = getattr(trainer, name)
    assert warned[0].filename == __file__
    assert found is getattr(trainer, new)


@pytest.mark.parametrize(("owner", "name"), without(deprecated.PARAMETERS))
def test_an_old_parameter_is_the_new_one_and_warns(owner, name):
    assert owner == "AllocationSampler"
    new = deprecated.PARAMETERS[owner][name]
    with pytest.warns(
        FutureWarning, match=rf"^{owner}\({name}=…\) is deprecated and .* Use {new}, its new name\.$"
    ) as warned:
        sampler = AllocationSampler(num_examples=8, expected_batch_size=4, **{name: 2})
    assert warned[0].filename == __file__
    assert getattr(sampler, new) == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_parameter'"):
        AllocationSampler(num_examples=8, expected_batch_size=4, no_such_parameter=2)


@pytest.mark.parametrize(("old", "new"), deprecated.MODULES.items())
def test_a_module_that_has_moved_is_imported_by_its_old_name(old, new):
    names = [name for name, value in vars(importlib.import_module(new)).items() if getattr(value, "__module__", None) == new]
    assert names
    for name in names:
        found = {}
        with pytest.warns(FutureWarning, match=rf"^{old} is deprecated and .* Import {name} from {new}\.$") as warned:
            exec(f"from {old} import {name}", found)
        assert found[name] is getattr(importlib.import_module(new), name)
        assert warned[0].filename == "<string>"
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from {old} import no_such_name")
    assert not hasattr(sys.modules[old], "__file__")  # for whoever looks through all modules


@pytest.mark.parametrize("name", deprecated.ARGUMENTS)
@pytest.mark.parametrize("config", ["DopplerTrainingArguments", "DopplerSFTConfig", "DopplerDPOConfig"])
def test_an_old_argument_may_have_the_value_that_it_had(name, config, tmp_path):
    if config != "DopplerTrainingArguments":
        pytest.importorskip("trl", reason="the extra trl is not installed")
    cls = getattr(doppler_hf, config)
    common = dict(output_dir=str(tmp_path), noise_multiplier=1.0, use_cpu=True, report_to="none")
    value, why = deprecated.ARGUMENTS[name]
    with pytest.warns(FutureWarning, match=rf"^{name}={value!r} is deprecated and .* Leave it out\.") as warned:
        args = cls(**common, **{name: value})
    assert warned[0].filename == __file__
    assert args.noise_multiplier == 1.0
    assert not hasattr(args, name)
    with refused("earlier-value", match=rf"^{name} .*{value!r} .*'other'.* {why[:20]}"):
        cls(**common, **{name: "other"})


def test_arguments_that_there_never_were_are_refused_as_before(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_argument'"):
        arguments(tmp_path, no_such_argument=1)


@pytest.mark.parametrize(("command", "name"), without(deprecated.OPTIONS))
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_an_old_option_may_have_the_value_that_it_had(command, name, form, capsys):
    only, _ = deprecated.OPTIONS[command][name]
    code = main(COMMAND_LINES[command])
    expected = capsys.readouterr()
    assert main([*COMMAND_LINES[command], *form.format(name.replace("-", "_").replace("__", "--"), only).split()]) == code
    found = capsys.readouterr()
    assert found.out == expected.out
    warning, _, rest = found.err.partition("\n")
    assert warning.startswith(f"warning: {name} {only} is deprecated and ")
    assert rest == expected.err
    assert main([*COMMAND_LINES[command], name, "other"]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {name} is deprecated: {only} is the only value that it still accepts; got other. "
    )
    assert main([*COMMAND_LINES[command], name]) == 2
    assert "got none" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "word"), deprecated.WORDS.items())
def test_an_old_word_is_left_out(command, word, capsys):
    first, *others = COMMAND_LINES[command]
    assert main([first, *others]) == 0
    expected = capsys.readouterr().out
    assert main([first, word, *others]) == 0
    found = capsys.readouterr()
    assert found.out == expected
    assert found.err.startswith(f"warning: {command} {word} is deprecated and ")


def test_the_words_of_a_script_stay_as_they_are(tmp_path, capsys):
    script = tmp_path / "my_train.py"
    script.write_text("import sys; assert sys.argv[1:] == ['--runs', '3', 'show']\n")
    assert main(["audit", "--script", str(script), "--runs", "3", "show"]) == 2
    assert "ended without calling DopplerTrainer.train()" in capsys.readouterr().err


def test_commands_of_the_tables_are_there():
    assert {*deprecated.OPTIONS, *deprecated.WORDS} <= {*COMMANDS}
