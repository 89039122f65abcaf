"""The model card in a folder: what a run knows comes first, the text that people wrote stays, and placeholders go.

PEFT writes a card with each adapter, TRL with each checkpoint, and Transformers when it is asked to. Theirs are templates to
fill in by hand, of which Transformers and TRL write over all that is there. Here the card is the title, a part between two
comments that each save renews (`card_sections`), and whatever else people have written.

A line of this part that was written by hand moves below it, and is not lost (`card_part`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import TEMPLATE_MODELCARD_PATH
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it names no exports

from doppler_hf.run.saving.card_part import PART, is_of_peft, marked, read_part

HEADING: Final = "## Differential privacy"
# The section that versions before 0.4 put at the end of a card.
_EARLIER_SECTION: Final = re.compile(
    rf"^{HEADING}\n(?:(?!^#).*\n)*?`doppler-hf verify` recomputes this (?:(?!^#).*\n?)*", re.MULTILINE
)
_FRONT_MATTER: Final = re.compile(r"\A\s*---\r?\n.*?^---[ \t]*(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL)
_PLACEHOLDER: Final = re.compile(r"^(?:[-*] \*\*[^*]*\*\*:? *)?\[?more information needed\]?\.?$", re.IGNORECASE)
_TITLE_OF_TEMPLATE: Final = "# Model Card for Model ID"
_BY_TRANSFORMERS: Final = "<!-- This model card has been generated automatically according to the information"
_BY_TRL: Final = "It has been trained using [TRL]"
_HEADINGS_OF_LIBRARIES: Final = {
    "Model description", "Intended uses & limitations", "Training and evaluation data", "Training procedure",
    "Training hyperparameters", "Training results", "Framework versions", "Quick start", "Citations",
}  # fmt: skip


@dataclass
class Section:
    """A heading, with "" for what comes before the first one, its level, and the lines below it."""

    heading: str
    level: int
    lines: list[str]

    @property
    def text(self) -> str:
        """The section as it is in the card."""
        return "\n".join([self.heading, *self.lines] if self.heading else self.lines)


def renew_card(path: Path, part: str | None, *, title: str, metadata: dict[str, object], before: str | None = None) -> None:
    """Put the part that a run writes behind the title of a card, or take it out, and keep what people have written.

    Args:
        path: The card, which a library may just have written.
        part: What is between the two comments; None where no ledger speaks for the weights.
        title: The title of a card that has none of its own.
        metadata: Values for the front matter. They do not replace any that are there.
        before: The card before a library wrote over all of it; None if it has added to what was there.
    """
    now = path.read_text("utf-8")
    front, body = split_front_matter(now)
    if before is None:
        own = written_by_people(body)
    else:
        own = written_by_people(split_front_matter(before)[1], fresh=body)
        fresh = without_placeholders(sections_of(body))
        # A run that does not speak for the model has nothing to say in place of what the library says.
        kept = [each for each in fresh if part is None or each.heading.strip("# ") == "Citations"]
        there = {each.heading for each in sections_of(own)}
        title = next((each.heading for each in fresh if each.level == 1), title).removeprefix("# ")
        added = [each.text for each in kept if each.level != 1 and each.heading not in there]
        own = "\n".join([own.rstrip(), "", *added]) if added else own
        front = with_values_kept(front, split_front_matter(before)[0])
    head, rest = with_title(own, title)
    whole = [head, "", *([] if part is None else [marked(part)]), rest.strip("\n")]
    text = completed(front, metadata) + "\n" + "\n".join(whole).rstrip() + "\n"
    path.write_text(text.lstrip("\n"), "utf-8")


def split_front_matter(text: str) -> tuple[str, str]:
    """Return the front matter of a card, with its lines of dashes, and its body."""
    found = _FRONT_MATTER.match(text)
    return (found[0], text[found.end() :]) if found else ("", text)


def sections_of(text: str) -> list[Section]:
    """Return the sections of a text; a line within a block of code is no heading."""
    found, fence = [Section("", 0, [])], ""
    for line in text.splitlines():
        heading = None if fence else re.match(r"(#{1,6}) \S", line)
        if mark := re.match(r" {0,3}(```+|~~~+)", line):
            fence = mark[1][:3] if not fence else "" if mark[1].startswith(fence) else fence
        if heading:
            found.append(Section(line.rstrip(), len(heading[1]), []))
        else:
            found[-1].lines.append(line)
    return found


def written_by_people(body: str, *, fresh: str = "") -> str:
    """Return a body without what a run or a library has written; `fresh` is what a library writes there now."""
    changed: list[str] = []
    while part := PART.search(body):
        changed += read_part(part).by_hand
        body = body[: part.start()].rstrip("\n") + "\n\n" + body[part.end() :].lstrip("\n")
    body = _EARLIER_SECTION.sub("", body)
    if changed:
        body = "\n".join([body.rstrip("\n"), "", *changed, ""])
    if _BY_TRANSFORMERS in body or _BY_TRL in body:
        body = without_lines_of(fresh, body)
    return "\n".join(each.text for each in without_placeholders(sections_of(body))) + "\n"


def without_lines_of(fresh: str, body: str) -> str:
    """Return a card that a library wrote before without its text, by that which it writes now.

    Numbers may differ, so that the lines of a list go by their names, and tables as a whole. Of blocks of code only whole
    sections go.
    """
    for each in sections_of(fresh):
        if each.level > 1 and each.text.strip() and f"\n{each.text.strip()}\n" in f"\n{body}\n":
            body = body.replace(each.text.strip(), "")
    lines = {line for line in fresh.splitlines() if line.strip() and not line.startswith(("#", "```", "~~~"))}
    names = {line[: line.index(":") + 1] for line in lines if re.match(r"- [^:]+:", line)}
    names |= {f"- {package} " for package in ("Transformers", "Pytorch", "Datasets", "Tokenizers", "PEFT")}
    kept = (
        line
        for line in re.sub(
            rf"^{re.escape(_BY_TRANSFORMERS)}.*?-->\n?", "", body, flags=re.MULTILINE | re.DOTALL
        ).splitlines()
        if line not in lines and not line.startswith(("|", *names))
    )
    return "\n".join(kept) + "\n"


def without_placeholders(sections: Iterable[Section]) -> list[Section]:
    """Return sections without the lines that nobody has filled in, and without those headings that then have no text."""
    template = [line.strip() for line in TEMPLATE_MODELCARD_PATH.read_text("utf-8").splitlines()]
    boilerplate = {line for line in template if line and not line.startswith(("#", "- ", "---")) and "{{" not in line}
    headings = {line.strip("# ") for line in template if line.startswith("#")} | _HEADINGS_OF_LIBRARIES
    kept: list[Section] = []
    deepest_kept = 0  # The level of the section after this one, if that is a part of it.
    for each in reversed(list(sections)):
        filled = [line for line in each.lines if not is_placeholder(line)]
        is_filled = len(filled) < len(each.lines) or not boilerplate.isdisjoint(line.strip() for line in filled)
        own = [line for line in filled if line.strip() not in boilerplate and not is_of_peft(line)]
        has_text = any(line.strip() for line in own)
        comments = {line for line in boilerplate if line.startswith("<!--")}
        lines = [line for line in filled if line.strip() not in comments] if has_text else own
        if is_filled:  # The removed lines leave blank lines behind.
            lines = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n").splitlines()
            lines = ["", *lines, ""] if lines and each.heading else lines
        is_known = each.level > 1 and each.heading.strip("# ") in headings
        if is_known and not has_text and deepest_kept <= each.level:
            continue
        kept.append(Section(each.heading, each.level, lines))
        if each.level:
            deepest_kept = each.level
    return kept[::-1]


def is_placeholder(line: str) -> bool:
    """Return whether a line asks for what nobody has filled in."""
    text = re.sub(r"<!--.*?-->", "", line).strip()
    return bool(_PLACEHOLDER.match(text)) or "More information needed for further recommendations" in line


def with_title(text: str, title: str) -> tuple[str, str]:
    """Return the title of a text with what is above it, or a new one, and the rest."""
    sections = sections_of(text)
    first = next((number for number, each in enumerate(sections) if each.level == 1), None)
    if first is None or (first > 1 and not any("\n".join(each.lines).strip() for each in sections[1:first])):
        return f"# {title}", text
    above = "\n".join(each.text for each in sections[:first]).strip("\n")
    heading = sections[first].heading
    if heading == _TITLE_OF_TEMPLATE:
        heading = f"# {title}"
    rest = "\n".join(["\n".join(sections[first].lines), *(each.text for each in sections[first + 1 :])])
    return (f"{above}\n\n{heading}" if above else heading), rest


def with_values_kept(front: str, before: str) -> str:
    """Return the front matter that a library has just written, with the values that only the earlier one has."""
    if not before:
        return front
    old, new = ModelCard(before), ModelCard(front or "---\n{}\n---\n")
    for name, value in old.data.to_dict().items():
        if new.data.get(name) is None and name != "model-index":
            new.data[name] = value
    return str(new)


def completed(front: str, metadata: dict[str, object]) -> str:
    """Return a front matter with values that it lacks, and without a base model and tags that the hub would refuse."""
    card = ModelCard(front or "---\n{}\n---\n")
    data = card.data
    if isinstance(data.get("base_model"), str) and not is_hub_id(data["base_model"]):
        data.pop("base_model")  # a folder of this machine, or a model without a name
    tags = data.get("tags")
    tags = [tags] if isinstance(tags, str) else list(tags or ())
    added = metadata.get("tags")
    tags += [tag for tag in (added if isinstance(added, list) else ()) if tag not in tags]
    tags = [tag for tag in tags if not tag.startswith("base_model:") or is_hub_id(tag.rpartition(":")[2])]
    data["tags"] = tags
    for name, value in metadata.items():
        if name != "tags" and value and not data.get(name):
            data[name] = value
    return str(card).rstrip() + "\n"


def is_hub_id(name: str) -> bool:
    """Return whether a name can be one of a model on the hub, and is not that of a folder here."""
    if Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)
