"""The files around the code agree: the version and its date, what CI and the hooks run, and what is asked of reporters."""

import re
import tomllib
from pathlib import Path

import yaml

from doppler_hf.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))


def test_the_changelog_begins_with_unreleased_changes_and_dates_each_version():
    first, *releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first == "Unreleased"
    found = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - (\d{4}-\d{2}-\d{2})", release) for release in releases]
    assert None not in found, releases
    versions = [tuple(map(int, release.groups()[:3])) for release in found]
    dates = [release[4] for release in found]
    assert versions == sorted(versions, reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert ".".join(map(str, versions[0])) == VERSION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == VERSION


def pythons(job):
    matrix = WORKFLOW["jobs"][job]["strategy"]["matrix"]
    return [*matrix.get("python", []), *(row["python"] for row in matrix.get("include", []))]


def test_ci_runs_the_oldest_and_the_newest_python_and_commands_that_there_are():
    admitted = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert PROJECT["requires-python"] == f">={admitted[0]}"
    ends = [admitted[0], admitted[-1]]
    assert {job: pythons(job) for job in WORKFLOW["jobs"]} == {"tests": ends, "versions": ends}
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make test-${{ matrix.versions }}"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert {f"test-{row['versions']}" for row in WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]} <= TARGETS


def test_the_hook_before_a_commit_is_a_command_of_the_makefile():
    """A second list of tools would have versions of its own."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == ["make check"]
    assert "check" in TARGETS


def test_whoever_reports_a_privacy_defect_is_asked_to_do_so_in_private():
    heads = [yaml.safe_load(page.read_text("utf-8").split("---\n")[1]) for page in TEMPLATES]
    assert {head["name"] for head in heads} == {"Bug", "Privacy defect", "Question or feature"}
    assert all(head["about"] for head in heads)
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "privacy-defect.md").read_text("utf-8")
    assert "do not describe the defect here" in template
    for page in (template, (ROOT / "SECURITY.md").read_text("utf-8")):
        assert "*Report a vulnerability*" in page
    # The other pages send them there.
    for name in (".github/ISSUE_TEMPLATE/bug.md", "SECURITY.md"):
        assert "Privacy defect" in (ROOT / name).read_text("utf-8")
    for name in (".github/ISSUE_TEMPLATE/privacy-defect.md", ".github/PULL_REQUEST_TEMPLATE.md", "CONTRIBUTING.md"):
        assert "SECURITY.md" in (ROOT / name).read_text("utf-8")
