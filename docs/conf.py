"""The site that `make docs` builds of README, docs/ and recipes/ as they lie, and of the docstrings. Nothing is fetched."""

import dataclasses
import json
import re
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation
from transformers import TrainingArguments

project = html_title = "doppler_hf"
extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The pages of single experiments are reached from the summary of results, and are not in the navigation.
suppress_warnings = ["toc.not_included"]
# The source is the repository as a whole, so that a link that leads somewhere there leads somewhere here.
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**", "recipes/**"]
exclude_patterns = [".*", "build", "dist", "doppler_hf", "out", "runs", "scripts", "site", "tests"]
myst_heading_anchors = 4  # GitHub's
myst_enable_extensions = ["colon_fence", "tasklist"]
html_theme = "furo"
html_extra_path = ["index.html"]
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_sphinx = html_show_copyright = html_copy_source = html_show_sourcelink = False
default_role = "code"
napoleon_use_ivar = True
autodoc_default_options = {"members": True, "exclude-members": "non_private_learning_rate"}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

# Autodoc looks for what is there, and these make their names when they are asked for.
for lazy in map(import_module, ("doppler_hf", "doppler_hf.privacy")):
    vars(lazy).update({name: getattr(lazy, name) for name in lazy.__all__})


def arguments_of(what: str, thing: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a class that have help texts: of a trainer's arguments those that it adds or changes."""
    fields = getattr(thing, "__dataclass_fields__", {}) if what == "class" else {}
    own = vars(thing)["__annotations__"] if fields and issubclass(thing, TrainingArguments) else fields
    return [fields[name] for name in own if "help" in fields[name].metadata]


def complete(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring's |x| into text, and add a table of a dataclass's arguments (lines are modified)."""
    if fields := arguments_of(what, thing):
        lines += ["", ".. list-table::", "   :header-rows: 1", "   :widths: 27 23 50", ""]
        lines += ["   * - argument", "     - type, default", "     - what it sets"]
    for field in fields:
        words, named = " | ".join(map(repr, get_args(field.type))), stringify_annotation(field.type, "smart")
        kind = words if get_origin(field.type) is Literal else re.sub(r"~[\w.]*\.", "", named)
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        lines += [f"   * - `{field.name}`", f"     - `{kind}`, {default}", f"     - {field.metadata['help']}"]
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", line) for line in lines]


def signature(app: Sphinx, what: str, name: str, thing: Any, *_: Any) -> tuple[str, str] | None:
    """Leave arguments that stand in a table out of the signature."""
    return ("(...)", "") if arguments_of(what, thing) else None


class NotebookParser(MystParser):
    """Reads a notebook of the gallery, which has no output, as the Markdown of its cells."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse the cells of text as they are, and those of code as blocks of Python."""
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(inputstring)["cells"]]
        name = document["source"].rpartition("/")[2]
        # A link to the file itself, for readers who want to run it.
        texts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
        texts.append(f"The notebook is {{download}}`{name}`.")
        super().parse("\n\n".join(texts), document)


def setup(app: Sphinx) -> None:
    """Read notebooks, and connect both functions, ahead of napoleon."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", complete, priority=400)
    app.connect("autodoc-process-signature", signature)
