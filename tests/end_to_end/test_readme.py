"""What README, docs and results say holds: snippets run, commands and links lead somewhere, figures stand on their page."""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from datasets import Dataset, DatasetDict
from markdown_it import MarkdownIt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForTokenClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

import doppler_hf
from doppler_hf import DopplerTrainer, DopplerTrainingArguments, audit, filters, optim, privacy
from doppler_hf.cli import main, planned_runs
from doppler_hf.filters import __all__ as filter_names
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import AllocationSampler, PrivacyStatement
from doppler_hf.run.search import search, search_space
from doppler_hf.training_args.checks import added_fields
from doppler_hf.training_args.galore import GaloreArguments
from scripts.synthesize import SynthesisArguments
from scripts.training.arguments import parse_args
from scripts.training.lora import LoraArguments
from scripts.training.recipe import KINDS
from tests.support.chat import chat_tokenizer, conversations, preferences, tiny_llama
from tests.support.models import MODELS
from tests.support.source import ERRORS
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert

ROOT = Path(__file__).parents[2]
README, DOCS, RESULTS = ROOT / "README.md", ROOT / "docs", ROOT / "recipes" / "results"
INDEX = ROOT / "recipes" / "RESULTS.md"
SECURITY = ROOT / "SECURITY.md"
PAGES = [README, SECURITY, *sorted(DOCS.rglob("*.md")), INDEX, *sorted(RESULTS.glob("*.md"))]
RECIPE_TYPES = (
    DopplerTrainingArguments,
    LoraArguments,
    SynthesisArguments,
    *(arguments for _, arguments in KINDS.values()),
)
PLACEHOLDERS = {"FILTER": "momentum", "LR": "1e-3", "SEED": "1"}
LAUNCHERS = {"config_file", "num_processes", "nproc_per_node", "cpu", "signal"}  # of accelerate, torchrun and SLURM
RECIPE_FIELDS = {field.name for types in RECIPE_TYPES for field in dataclasses.fields(types)}
OTHER_PAGES = {"reference/api", "reference/arguments"}  # made of the code
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def prose(page):
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def links(text):
    return re.findall(r"\]\((?!https?:)([^)]+)\)", text)


def commands(page):
    """Every line of a shell block, without its comment, and every piece of code in the prose."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0] for line in lines] + re.findall(r"`([^`]+)`", prose(page))


def linked_pages(page):
    return {(page.parent / target.partition("#")[0]).resolve() for target in links(prose(page))}


SNIPPETS = [
    pytest.param(
        page, snippet, id=f"{page.name}-{number}",
        marks=[pytest.mark.thorough] if ".train()" in snippet and page != README else [],
    )
    for page in PAGES
    if page.name != "your-trainer.md"  # tests/end_to_end/test_other_trainers.py runs its snippets
    for number, snippet in enumerate(blocks(page, "python"))
]  # fmt: skip


# Opacus says that its own noise is not from a secure generator, and that its hooks see no gradient of the inputs.
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning", "ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_python_snippet_runs_as_it_stands(page, snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    y = (x.sum(dim=1) > 0).long()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]")
    names = {
        "model": tiny_bert(), "train": text_data(1100), "dev": text_data(8), "tokenizer": tokenizer, "metrics": lambda p: {},
        "args": DopplerTrainingArguments(output_dir="out", target_epsilon=3.0, max_steps=3, report_to="none"),
        "x": x, "y": y, "network": torch.nn.Linear(4, 2),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50),
    }  # fmt: skip
    if page.name in ("images.md", "users.md"):
        names["images"] = Dataset.from_dict({"pixel_values": torch.randn(500, 1, 8, 8).tolist(), "labels": y.tolist()})
        names["train_of_users"] = text_data(1100).add_column("user", [row // 2 for row in range(1100)])
    if page.name == "own-loss.md":
        answers = torch.arange(5, 25).repeat(60).view(300, 2, 2).tolist()
        names["pairs"] = Dataset.from_dict({"input_ids": answers, "attention_mask": [[[1, 1], [1, 1]]] * 300})
        names["other_pairs"] = Dataset.from_dict({name: names["pairs"][name][:8] for name in names["pairs"].column_names})
        names["reward_model"] = tiny_bert(num_labels=1)
        names["scored_pairs"] = names["pairs"].add_column("labels", [row % 5 / 4 for row in range(300)])
        names["encoder"] = BertModel(tiny_bert().config, add_pooling_layer=False)
        rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in text_data(1100)]
        tags = [[-100, *(token % 3 for token in row["input_ids"][1:])] for row in rows]
        names["tagged"] = Dataset.from_list(rows).add_column("labels", tags)
        names["tagger"] = BertForTokenClassification(tiny_bert(num_labels=3).config)
    if page == README:  # as it stands, but without the hub
        words = Dataset.from_dict({"sentence": ["good", "bad"] * 600, "label": [1, 0] * 600, "idx": range(1200)})
        monkeypatch.setattr(
            "datasets.load_dataset", lambda *names: DatasetDict(train=words, validation=words.select(range(8)))
        )
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
        monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", lambda name: tiny_bert())
    if page.name == "language-models.md":
        pytest.importorskip("trl", reason="the extra trl is not installed")
        rows_of = preferences if "DPO" in snippet else conversations
        names |= {"model": tiny_llama(), "train": rows_of(600), "dev": rows_of(8), "tokenizer": chat_tokenizer()}
        if 'row["text"]' in snippet:
            names["train"] = Dataset.from_dict({"text": [f"The moon is {word}." for word in ("round", "old", "far") * 200]})
    if "hyperparameter_search" in snippet:  # with two trials, each of one epoch
        names |= {"make_model": lambda: tiny_bert(), "dev": text_data(8, seed=1)}  # other rows than in train
        monkeypatch.setattr(search, "another_trial", lambda trials, begun: begun < 2)
        monkeypatch.setattr(search_space.Draw, "suggest_int", lambda draw, name, low, high: low)
    if "BitsAndBytesConfig" in snippet:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        tiny_llama().save_pretrained("base")
    exec(snippet, names)
    if "trainer" in names:
        assert (tmp_path / "out" / "privacy_ledger.json").exists()
        assert 0.0 < names["trainer"].privacy.epsilon() <= names["trainer"].args.target_epsilon
    if "optimizer.step()" in snippet and "loader" in snippet:  # a linear rule: 500 examples, 10 steps, ε = 3
        assert (names["network"](x).argmax(dim=1) == y).float().mean() > 0.7
    if page.name == "one-screen.md":
        assert names["accuracy"] > 0.9
    classes = (each for each in names.values() if isinstance(each, type) and not each.__module__.startswith("doppler_hf."))
    for task in (each for each in classes if issubclass(each, DopplerTrainer)):
        if (
            "patchify" in snippet or "tagger" in snippet or task.rows_per_loss > 1
        ):  # tests/run/test_told.py, and the snippet itself, train it
            continue
        trainer = task(model=tiny_bert(), args=names["args"], train_dataset=text_data(1100), data_collator=pad)
        returned = trainer.compute_per_sample_loss(trainer.model, pad(text_data(3)))
        assert all(each.shape == (3,) for each in (returned if isinstance(returned, tuple) else [returned]))


def flags(text):
    return {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", text)}


def script_of(command):
    """The script of ours that a command starts, as a path, or None."""
    found = re.search(r"-m (scripts[\w.]+)|(scripts/\w+\.py)", command)
    return found and (found[2] or found[1].replace(".", "/") + ".py")


@functools.cache
def help_of(script, words):
    """What a script says to --help, or `doppler-hf` with these words."""
    argv = mock.patch.object(sys, "argv", [script, *words, "--help"])
    with argv, contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()


@pages
def test_commands_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in commands(page):
        if make := re.match(r"make ([a-z-]+)", command):
            assert make[1] in targets, command
        if script := script_of(command):
            assert (ROOT / script).exists(), command


@pages
def test_flags_are_those_of_the_commands_of_the_page(page):
    known = RECIPE_FIELDS | LAUNCHERS
    for command in commands(page):
        if flags(command) and script_of(command):
            # Some results have a command of their own.
            known |= flags(help_of(script_of(command), tuple(re.findall(r"scripts\.reproduce ([a-z-]+)", command))))
        elif ours := re.search(r"doppler-hf((?: [a-z]+(?![\w/.-]))+)", command):
            known |= flags(help_of("doppler_hf/__main__.py", tuple(ours[1].split())))
    for command in commands(page):
        assert flags(command) <= known, command


@pages
def test_flags_fit_the_recipe_that_they_follow(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        if found := re.search(r"scripts/\w+\.py (recipes/(image|glue|causal_lm)/\S+\.yaml[^#]*)", command):
            words = [PLACEHOLDERS.get(word, word) for word in shlex.split(found[1])]
            _, arguments = KINDS["image_classification" if found[2] == "image" else found[2]]
            fixed = ["--use_cpu=true", f"--output_dir={tmp_path}"]
            assert parse_args(arguments, LoraArguments, DopplerTrainingArguments, argv=[*words, *fixed]), command


@pages
def test_paths_in_the_text_exist(page):
    text = re.sub(r"\]\([^)]+\)", "]", page.read_text())  # links have a test of their own
    for path in re.findall(r"(?<![\w/.])(?:doppler_hf|docs|recipes|scripts|tests)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


def anchor_of(heading):
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def anchors(page):
    return {anchor_of(heading) for heading in re.findall(r"^#+ .+$", prose(page), flags=re.MULTILINE)}


@pages
def test_links_resolve(page):
    for target in links(prose(page)):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pages
def test_symbols_of_formulas_are_not_taken_for_italics(page):
    """`C′_t … C′_u` in a sentence is read as Markdown's emphasis, and loses its underscores."""
    inline = [token for token in MarkdownIt().parse(page.read_text()) if token.type == "inline"]
    # Our own emphasis has asterisks.
    assert [token.content for token in inline for part in token.children if "_" in part.markup] == []


def test_no_page_and_no_picture_is_an_orphan():
    assert linked_pages(INDEX) == set(RESULTS.glob("*.md"))
    assert set((ROOT / "recipes" / "figures").iterdir()) <= set.union(*map(linked_pages, PAGES))


def test_the_site_lists_every_page_once():
    trees = blocks(DOCS / "index.md", re.escape("{toctree}"))
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    notebooks = {f"gallery/{path.stem}" for path in (DOCS / "gallery").glob("*.ipynb")}
    assert notebooks <= set(listed)
    named = [name for name in listed if name not in notebooks]
    pages = [(ROOT / name[1:] if name.startswith("/") else DOCS / name).with_suffix(".md") for name in named]
    others = {(DOCS / name).with_suffix(".md") for name in OTHER_PAGES} | {
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        SECURITY,
    }
    assert len(pages) == len(set(pages))
    assert set(pages) == {*DOCS.rglob("*.md"), INDEX, *others} - {DOCS / "index.md"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("sphinx_design", reason="the extra docs is not installed")
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-b", "html", "-c", "docs", ".", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    pages = sorted(tmp_path.rglob("*.html"))
    fetched = r"<(?:script|img|iframe)[^>]*src=\"https?:|<link[^>]*rel=\"(?:stylesheet|preload|preconnect)\"[^>]*https?:"
    assert not [page for page in pages if re.search(fetched, page.read_text())]
    assert not [sheet for sheet in tmp_path.rglob("*.css") if re.search(r"@import|url\(.?https?:", sheet.read_text())]
    reference = "".join((tmp_path / "docs" / "reference" / f"{page}.html").read_text() for page in ("api", "arguments"))
    facades = doppler_hf, filters, optim, privacy, audit
    public = {f"{module.__name__}.{name}" for module in facades for name in module.__all__} - {"doppler_hf.__version__"}
    assert {name for name in public if f'id="{name}"' not in reference} == set()
    assert all(field.name in reference for field in added_fields(DopplerTrainingArguments))


def test_notation_names_what_there_is():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "method" / "notation.md").read_text(), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    statement = {field.name for field in dataclasses.fields(PrivacyStatement)}
    galore = {field.name for field in dataclasses.fields(GaloreArguments)}
    code = {*DopplerOptimizer.__init__.__code__.co_varnames, *AllocationSampler.__init__.__code__.co_varnames}
    coefficients = {"a", "b", "max_grad_norm", "noise_std"}
    assert len(named) > 25
    assert named <= RECIPE_FIELDS | statement | galore | code | coefficients | set(filter_names)


def figures_of(cell):
    """The mean and the standard error in a cell of a table, each with one digit; the error of one run is None."""
    mean, _, error = cell.replace("*", "").replace(" ", "").partition("±")
    return f"{float(mean):.1f}", f"{float(error):.1f}" if error else None


def test_the_accuracies_of_the_readme_are_those_of_their_pages():
    """Each has the standard error over seeds that its page states, or is one run, if its page says so."""
    table = README.read_text().partition("a number without it is a single run.")[2].partition("**Time and memory**")[0]
    rows = re.findall(r"^\| \[[^]]*\]\(([^)#]+)[^)]*\)[^|]* \|(.+)\|$", table, flags=re.MULTILINE)
    assert len(rows) == 3
    for path, cells in rows:
        page = (ROOT / path).read_text()
        assert re.search(r"± (is )?the\s+standard\s+error", page), path
        of_page = {figures_of(found) for found in re.findall(r"\d+\.\d+ ± \d+\.\d+", page)}
        for cell in cells.split("|"):
            mean, error = figures_of(cell)
            if error is None:
                assert re.search(rf"seed 1 alone[^|]*\| {re.escape(mean)} \|", page), cell
            else:
                assert (mean, error) in of_page, cell


def decimals(text):
    """Return the decimal fractions of a text, as they are written, without versions."""
    return [found.replace(",", "") for found in re.findall(r"(?<![\w.,])\d[\d,]*\.\d+(?![\w.])", text)]


def missing_decimals(text, shown):
    """Return the decimal fractions of a text that no number of another text rounds to."""
    there = [float(found) for found in decimals(shown)]
    wanted = {found: len(found.partition(".")[2]) for found in decimals(text)}
    return [found for found, digits in wanted.items() if float(found) not in {round(value, digits) for value in there}]


@pages
def test_figures_in_the_text_of_a_link_are_on_the_page_that_it_leads_to(page):
    found = re.findall(r"\[([^][]*)\]\((?!https?:)([^)#]+\.md)[^)]*\)", prose(page))
    wrong = {
        (text, path): missing
        for text, path in found
        if (missing := missing_decimals(text, (page.parent / path).read_text()))
    }
    assert wrong == {}


def cited_part(page, anchor):
    """Return what is current of the part of a page that a link cites: its tables, or its text if it has none.

    The part is the section of the anchor, with the sections within it; without an anchor, what is before the first section.
    A column that says "before" or "earlier" in its heading is left out, since it has the figures of an earlier version.
    """
    lines = prose(page).splitlines()
    headings = [
        (0, 1, ""),
        *((at, line.index(" "), anchor_of(line)) for at, line in enumerate(lines) if line.startswith("##")),
    ]
    (found,) = [place for place, (_, _, name) in enumerate(headings) if name == anchor]
    start, level, _ = headings[found]
    ends = (at for at, other, _ in headings[found + 1 :] if other <= level or not anchor)
    lines = lines[start : next(ends, None)]
    kept, old = [], set()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        cells = line.strip("|").split("|")
        if not lines[number - 1].startswith("|"):
            old = {column for column, cell in enumerate(cells) if re.match(r" *(before|earlier)\b", cell)}
        kept += [cell for column, cell in enumerate(cells) if column not in old]
    return "\n".join(kept or lines)


def figures_not_in_the_part_that_they_cite(text):
    """Return the links of a text in the root of the repository with decimal fractions that are not in the cited part."""
    found = re.findall(r"\[([^][]*)\]\((?!https?:)([^)#]+\.md)#?([^)]*)\)", text)
    wrong = {(text, path, anchor): missing_decimals(text, cited_part(ROOT / path, anchor)) for text, path, anchor in found}
    return {link: missing for link, missing in wrong.items() if missing}


def test_figures_in_the_links_of_the_readme_are_in_the_current_table_that_they_cite():
    assert figures_not_in_the_part_that_they_cite(prose(README)) == {}


def test_a_figure_of_an_earlier_version_is_not_a_current_one():
    small = "recipes/results/micro-batches.md#small-networks"
    assert decimals(cited_part(RESULTS / "micro-batches.md", "small-networks")) != []
    assert figures_not_in_the_part_that_they_cite(f"[3.9 times]({small})") != {}


def test_times_and_memory_of_the_readme_are_those_of_their_pages():
    table = README.read_text().partition("**Time and memory**")[2].partition("\n- ")[0]
    rows = re.findall(r"^\|[^|]*\[[^]]*\]\(([^)#]+)#?([^)]*)\)[^|]*\|(.+)\|$", table, flags=re.MULTILINE)
    assert len(rows) == 5
    found = [(path, anchor, cells.replace("–", " ")) for path, anchor, cells in rows]
    assert all(decimals(cells) for _, _, cells in found)
    assert [row for row in found if missing_decimals(row[2], cited_part(ROOT / row[0], row[1]))] == []


def test_the_readme_counts_the_models_whose_gradients_are_compared():
    assert f"on {len(MODELS)} models and adapters" in " ".join(README.read_text().split())


def test_errors_are_those_of_the_seeds_that_a_page_lists():
    """Standard errors of means, where the single runs stand beside them."""
    page = (RESULTS / "sst2.md").read_text()
    for values, mean, error in (
        ([83.8, 84.5, 85.4, 85.9, 83.3], "84.6", "0.5"),
        ([89.8, 90.4, 89.7, 89.8, 90.6], "90.0", "0.2"),
    ):
        listed = ", ".join(map(str, values[:-1]))
        assert f"{listed}, {values[-1]}" in page or f"{listed} and {values[-1]}" in page
        assert f"{mean} ± {error}" in page
        assert statistics.mean(values) == pytest.approx(float(mean), abs=0.07)
        assert statistics.stdev(values) / len(values) ** 0.5 == pytest.approx(float(error), abs=0.05)


@pytest.mark.parametrize("epsilon", [3, *thorough(1, 8)])
def test_the_page_for_beginners_has_the_figures_of_the_plan_that_it_prints(epsilon, capsys, monkeypatch):
    page = DOCS / "start" / "dp-in-ten-minutes.md"
    text = " ".join(prose(page).split())
    (command,) = [command for command in commands(page) if command.startswith("doppler-hf plan ")]
    monkeypatch.setattr(planned_runs, "EPOCH_FACTORS", (1, 2))
    monkeypatch.setattr(planned_runs, "BATCH_SIZE_FACTORS", (1, 2))
    words = shlex.split(command)[1:]
    assert words[-2:] == ["--epsilon", "3"]
    assert main([*words[:-1], str(epsilon), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # σ differs in the fourth digit between processors and numbers of threads, by the simulation in its search.
    said = float(re.search(rf"\| ε = {epsilon} \| at most ([\d.]+) % \|", text)[1])
    assert 0.0 <= said - 100 * plan["attack"]["tpr_at_1e-2_fpr"] < 0.02 * said
    if epsilon == 3:
        noise = {
            (other["epochs"], other["expected_batch_size"]): other["noise_multiplier"]
            / (other["expected_batch_size"] * other["steps"] ** 0.5)
            for other in plan["alternatives"]
        }
        own = noise[3, 1000]
        assert f"twice the batch has {100 * (1 - noise[3, 2000] / own):.0f} % less noise" in text
        assert f"twice the epochs have {100 * (1 - noise[6, 1000] / own):.0f} % less noise" in text


def codes_of_errors():
    """The codes of all errors of the package, as they are written where an error is made."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "doppler_hf").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    first = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id in ERRORS]
    return {node.value for node in first if isinstance(node, ast.Constant)}


def test_codes_of_the_troubleshooting_page_are_those_of_errors():
    page = (DOCS / "start" / "troubleshooting.md").read_text()
    named = re.findall(r"^\| `([^`]+)`", page, flags=re.MULTILINE)
    assert len(named) > 25
    assert len(set(named)) == len(named)
    assert set(named) - codes_of_errors() == set()
