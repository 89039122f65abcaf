"""One page of a run, as a file of HTML that needs nothing else: what is claimed, what was logged, how the noise lies."""

import html
from collections.abc import Iterable, Sequence

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2rem }}
.claim {{ font-size: 1.15rem; border-left: 4px solid {color}; padding: .4rem 1rem; background: #f6f6f6 }}
table {{ border-collapse: collapse }} th {{ text-align: left; font-weight: 500; padding-right: 1.5rem; white-space: nowrap }}
td, th {{ border-bottom: 1px solid #ddd; padding-top: .2rem; padding-bottom: .2rem; vertical-align: top }}
svg {{ max-width: 100%; height: auto }} code {{ background: #f3f3f3; overflow-wrap: anywhere }}
</style>
<h1>{title}</h1>
<p class="claim">{claim}</p>
{sections}
</html>
"""


def html_page(*, title: str, claim: str, is_private: bool, sections: Iterable[tuple[str, str]]) -> str:
    """Return a page.

    Args:
        title: Its title.
        claim: What is guaranteed, in one sentence.
        is_private: Whether anything is.
        sections: Headings, each with what stands below it, in HTML.
    """
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    color = "#2a7" if is_private else "#c33"
    return PAGE.format(title=html.escape(title), claim=html.escape(claim), color=color, sections=body)


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of a name and a value as HTML."""
    cells = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>\n{cells}\n</table>"


def html_list(lines: Sequence[str]) -> str:
    """Return a list as HTML."""
    return "<ul>\n" + "\n".join(f"<li>{html.escape(line)}</li>" for line in lines) + "\n</ul>"
