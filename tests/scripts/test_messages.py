"""All messages are found in the source, and each code of an error names one reason."""

import ast
import builtins
import collections
import re
import subprocess
import sys

from scripts.messages import ROOT, Message, messages, messages_in

# Reasons for which several places have words of their own. Whoever adds a code here has seen that the reason is the same.
SHARED = {
    "attribute-without-effect", "callback-signature", "callbacks-removed",
    "launcher-precision", "no-such-model", "old-signature", "own-batches", "own-training-step", "weights-not-saved",
    "weights-of-losses",
    "another-optimizer", "breaks-privacy", "delta-too-large", "depends-on-others", "earlier-value",
    "epsilon-too-small", "filter-syntax",
    "forward-without-labels", "fsdp-option", "generator-of-its-own", "gradient-hook",
    "groups-with-poisson", "interrupted-checkpoint",
    "loss-of-the-batch", "method-without-effect", "no-effect", "no-privacy-to-test", "not-a-ledger", "not-a-noise-shape",
    "not-finite", "not-normalized", "not-our-arguments", "not-real", "nothing-trained", "one-of-two", "other-lengths",
    "other-number-of-losses", "out-of-range", "processes-sample-alone", "public-seed", "rows-not-numbered",
    "shared-parameters",
    "shared-random-numbers", "steps-out-of-order", "unknown-options", "unknown-value", "unstable-filter",
    "no-labels-count", "not-a-data-set",
    "no-metrics-of-users", "search-objective", "search-setting", "search-space", "values-out-of-range", "wrong-shape",
}  # fmt: skip
# An error that keeps the code of another one, of which it says more.
PASSED_ON = "{error.code}"
# Python asks for this class by name where an attribute is missing; the other one never leaves the start check.
OF_PYTHON = {"AttributeError", "FloatingPointError"}
SOURCE = """
WORDS = "All words."
logger.warning("Logged.")
print(f"Two of {1 + 1}.", "And more.")
warnings.warn(WORDS, stacklevel=2)

class OwnError(Refusal):
    def __init__(self, name):
        super().__init__("own", f"{name} is wrong.")

def refuse(name, value):
    if name:
        raise Refusal("a-code", f"{name} must be 1" + (f", got {value!r}." if value else "."))
    return OwnError("another-code", WORDS)

def note(run, found):
    what, how = f"{found} rows", 1
    fix = "Remove them" if found else ""
    run.notes.append(f"{what} are {how}. {fix}")
    run.notes += ["one", *found]
    found.append("no message")
"""


def test_every_kind_of_message_is_found_with_its_place():
    assert sorted(messages_in(SOURCE, "a.py")) == [
        Message("a.py", 3, "logged line", "", "Logged."),
        Message("a.py", 4, "printed line", "", "Two of {1 + 1}. And more."),
        Message("a.py", 5, "warning", "", "All words."),
        Message("a.py", 9, "error", "own", "{name} is wrong."),
        Message("a.py", 13, "error", "a-code", "{name} must be 1{f', got {value!r}.' if value else '.'}"),
        Message("a.py", 14, "error", "another-code", "All words."),
        Message(
            "a.py", 19, "note", "", "{what} are {how}. {fix}", (("what", "{found} rows"), ("fix", "Remove them")),
        ),
        Message("a.py", 20, "note", "", "one"),
    ]  # fmt: skip


def test_the_command_prints_them_by_file():
    printed = subprocess.run(
        [sys.executable, "-m", "scripts.messages"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.splitlines()
    placeholders = [line for line in printed if line.startswith("    {")]
    assert len(placeholders) == sum(len(message.places) for message in messages()) > 50
    assert "    {guarantee} may be \"ε = {facts['target_epsilon']}, δ = {facts['delta']}\"" in placeholders
    printed = [line for line in printed if line not in placeholders]
    assert [line.partition(":")[0] for line in printed] == [message.path for message in messages()]
    (line,) = [line for line in printed if "error budget-spent" in line]
    assert re.match(r"doppler_hf/run/planning/plan\.py:\d+: error budget-spent: ", line)


def test_a_code_names_one_reason():
    texts = collections.defaultdict(set)
    for message in messages():
        if message.kind == "error" and message.code != PASSED_ON:
            texts[message.code].add(message.text)
    assert [code for code in texts if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code)] == []
    assert {code for code, said in texts.items() if len(said) > 1} == SHARED


def test_every_error_that_is_made_has_a_code():
    """The base classes take one, so that a plain ValueError is the only way to leave it out."""
    plain = []
    for path in sorted((ROOT / "doppler_hf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=name)) if name.endswith("Error"):
                    of_python = hasattr(builtins, name) and name not in OF_PYTHON
                    plain += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}"] * of_python
    assert plain == []
