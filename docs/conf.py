"""The site that `make docs` builds of README, docs/ and recipes/ as they lie, and of the docstrings. Nothing is fetched."""

import dataclasses
import re
from importlib import import_module
from typing import Any

from sphinx.application import Sphinx
from transformers import TrainingArguments

project = html_title = "doppler_hf"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The source is the repository as a whole, so that a link that leads somewhere there leads somewhere here.
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "recipes/**"]
exclude_patterns = [".*", "build", "dist", "doppler_hf", "out", "runs", "scripts", "site", "tests"]
myst_heading_anchors = 4  # GitHub's
myst_enable_extensions = ["tasklist"]
nb_execution_mode = "off"  # `make notebook` stores the outputs
html_theme = "furo"
html_extra_path = ["index.html"]
html_show_sphinx = html_show_copyright = html_copy_source = html_show_sourcelink = False
default_role = "code"
napoleon_use_ivar = True
autodoc_default_options = {"members": True, "exclude-members": "stock_compute_loss, host_learning_rate"}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

# Autodoc looks for what is there, and these make their names when they are asked for.
for lazy in map(import_module, ("doppler_hf", "doppler_hf.privacy")):
    vars(lazy).update({name: getattr(lazy, name) for name in lazy.__all__})


def complete(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring's |x| into text, and tell the arguments of a dataclass by their help texts (lines are modified)."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", line) for line in lines]
    if what == "class" and issubclass(thing, TrainingArguments):
        own = [field for field in dataclasses.fields(thing) if field.name in vars(thing)["__annotations__"]]
        lines += ["", "Args:", *(f"    {field.name}: {field.metadata['help']}" for field in own), ""]


def signature(app: Sphinx, what: str, name: str, thing: Any, *_: Any) -> tuple[str, str] | None:
    """Leave the host's more than hundred arguments out of the signature of ours."""
    return ("(output_dir=None, ...)", "") if what == "class" and issubclass(thing, TrainingArguments) else None


def setup(app: Sphinx) -> None:
    """Connect both, ahead of napoleon."""
    app.connect("autodoc-process-docstring", complete, priority=400)
    app.connect("autodoc-process-signature", signature)
