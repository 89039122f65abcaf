"""The command: its table, its help, its flags, and how mistakes end."""

import importlib
import importlib.metadata
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from doppler_hf import cli
from doppler_hf.cli import COMMANDS, main


def module_of(name):
    return importlib.import_module(f"doppler_hf.cli.{name}")


def test_installed_command_is_main():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["doppler-hf"].split(":")
    assert getattr(importlib.import_module(module), name) is main


def test_module_is_the_same_command_and_returns_its_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doppler_hf", "plan", "--num-examples", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("doppler_hf", run_name="__main__")
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: --num-examples must be at least 2 and below 1e+10; got 1. Give the size of the training set.\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_says_what_it_is_for(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert module_of(name).__doc__.strip() in shown
    assert f"usage: doppler-hf {name}" in shown


SIZE = ["plan", "--num-examples=5"]
WRONG = [[], ["nonsense"], ["plan", "--nonsense"], ["plan", "--num", "5"], ["plan"], [*SIZE, "--epsilo=3"], [*SIZE, "--q"]]


@pytest.mark.parametrize("words", WRONG)
def test_unknown_words_end_with_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "doppler-hf" in told
    assert ("unrecognized arguments: --epsilo=3" in told) == ("--epsilo=3" in words)


@pytest.mark.parametrize("flag", ["--num_examples", "--num-examples"])
@pytest.mark.parametrize(("command", "named"), [(["plan"], "plan"), ([], "COMMAND")])
def test_a_flag_before_the_command_is_told_where_it_belongs(command, named, flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main([flag, "5", *command, "--epsilon", "3"])
    assert ended.value.code == 2
    assert f"the command comes before its flags: write doppler-hf {named} --num-examples …" in capsys.readouterr().err
    assert main(["plan", flag, "5", "--epsilon=3", "--batch_size=2", "--epochs=1"]) == 0  # as advised


class Recorder:
    """Records what it is called with."""

    def add_arguments(self, parser):
        parser.add_argument("--two-words")
        parser.add_argument("word", nargs="?")

    def run(self, args):
        if args.word == "bad_word":
            raise ValueError("bad_word is bad: give another")
        if args.word == "broken":
            raise RuntimeError("a defect")
        if args.word == "stopped":
            raise KeyboardInterrupt
        self.got = (args.two_words, args.word)
        return 1


@pytest.fixture
def recorder(monkeypatch):
    command = Recorder()
    monkeypatch.setattr(cli, "COMMANDS", {"record": "Record what comes."})
    monkeypatch.setitem(sys.modules, "doppler_hf.cli.record", command)
    return command


@pytest.mark.parametrize("flag", ["--two-words", "--two_words"])
@pytest.mark.parametrize("value", ["a_b", "a--b_c"])
def test_hyphens_and_underscores_are_the_same_in_flags_alone(recorder, flag, value):
    assert main(["record", flag, value, "other_word"]) == 1
    assert recorder.got == (value, "other_word")
    assert main(["record", f"{flag}={value}=d_e"]) == 1
    assert recorder.got == (f"{value}=d_e", None)


def test_mistakes_end_with_one_line_and_defects_with_a_traceback(recorder, capsys):
    assert main(["record", "bad_word"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: bad_word is bad: give another\n"
    assert captured.out == ""
    with pytest.raises(RuntimeError):
        main(["record", "broken"])


def test_an_interruption_has_no_traceback(recorder, capsys):
    assert main(["record", "stopped"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "words", ["plan --num-examples 200 --batch-size 20 --epochs 1 --epsilon 8 --json", "filter", "--help"]
)
def test_a_reader_that_stops_ends_without_a_traceback(words):
    """As `doppler-hf plan --json | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "doppler_hf", *words.split()]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode in (0, 1, 141)  # argparse and rich have their own ways to end
