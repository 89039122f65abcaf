"""One page of a run, as a file of HTML that needs nothing else: what is claimed, what was logged, how the noise lies."""

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.privacy.accounting.attack import TradeOff, percent
from doppler_hf.reports.plots import draw_noise, new_figure

# Of what Transformers logs: quantities of the training, and of evaluations all but how long they took.
_SHOWN: Final = ("loss", "learning_rate", "grad_norm")
_MAJORITY: Final = "majority_class_accuracy"
_NOT_SHOWN: Final = ("_runtime", "_per_second", "_epsilon", "_mean_label_loss", _MAJORITY)
PAGE: Final = """<!doctype html>
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
    """Return a page: what is guaranteed, if anything is, and headings, each with what stands below it, in HTML."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    color = "#2a7" if is_private else "#c33"
    return PAGE.format(title=html.escape(title), claim=html.escape(claim), color=color, sections=body)


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of a name and a value as HTML."""
    cells = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>\n{cells}\n</table>"


def _is_metric(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(_NOT_SHOWN)


def _majority_of(name: str) -> str:
    return name.removesuffix("accuracy") + _MAJORITY


def last_evaluation(logs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the metrics of the last step that was evaluated, each with its name; of all sets, if there are several."""
    evaluations = [entry for entry in logs if any(map(_is_metric, entry))]
    last = [entry for entry in evaluations if entry["step"] == evaluations[-1]["step"]]
    metrics = {name: value for entry in last for name, value in entry.items()}
    rows = [("last evaluation", f"at step {metrics['step']:,}")] if metrics else []
    for name, value in metrics.items():
        if _is_metric(name):
            majority = metrics.get(_majority_of(name))
            beside = "" if majority is None else f" (always the most frequent label: {majority:.4g})"
            words = f"{value:.4g}" if isinstance(value, int | float) else str(value)
            rows.append((name.removeprefix("eval_"), words + beside))
    return rows


def draw_trade_off(best: TradeOff) -> str:
    """Draw the best true-positive rate of an attack against its false-positive rate, and guessing, and return it as SVG."""
    from matplotlib.ticker import FuncFormatter

    rates = np.geomspace(1e-4, 1.0, 300)
    reached = np.array([best.true_positive_rate(rate) for rate in rates])
    figure = new_figure(6.0, 4.2)
    axes = figure.subplots()
    axes.loglog(rates, reached, color="C3", label="no attack is above this line")
    axes.fill_between(rates, rates, reached, color="C3", alpha=0.12)
    axes.loglog(rates, rates, "--", color="grey", label="guessing")
    for rate in (1e-3, 1e-2):
        share = best.true_positive_rate(rate)
        axes.plot(rate, share, "o", color="C3", markersize=5)
        axes.annotate(
            f"{percent(share)} at {100 * rate:g} %", (rate, share), (-6, 6), textcoords="offset points", ha="right"
        )
    axes.set(xlabel="false-positive rate: others called members", ylabel="true-positive rate: members identified")
    axes.set(xlim=(1e-4, 1.0), ylim=(1e-4, 1.0), title="Membership attacks on the model")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.legend(loc="lower right", fontsize="small")
    return _svg(figure)


def draw_run(logs: Sequence[Mapping[str, Any]]) -> str:
    """Draw what a run has logged, a panel for each quantity that has several values, as SVG, if any."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for entry in logs:
        for name, value in entry.items():
            if (name in _SHOWN or _is_metric(name)) and isinstance(value, int | float):
                curves.setdefault(name, []).append((entry["step"], value))
    shown = {name: points for name, points in curves.items() if len(points) > 1}
    if not shown:
        return ""
    columns = 3
    lines = -(-len(shown) // columns)
    figure = new_figure(3.4 * columns, 2.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, (name, points) in zip(panels, shown.items(), strict=False):
        panel.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, linewidth=1.2)
        panel.set(title=name, xlabel="step")
        for share in {entry[majority] for entry in logs if (majority := _majority_of(name)) in entry}:
            panel.axhline(share, color="grey", linewidth=0.8, linestyle=":")
    for panel in panels[len(shown) :]:
        panel.remove()
    return _svg(figure)


def draw_noise_over_frequency(shape: NoiseShape, low_pass_filter: LowPassFilter | None) -> str:
    """Draw the spectrum of the noise, white noise of the same σ, and the gain of the filter, and return it as SVG."""
    figure = new_figure(6.8, 3.0)
    draw_noise(figure.subplots(), shape, {} if low_pass_filter is None else {"the filter": low_pass_filter})
    return _svg(figure)


def _svg(figure: Any) -> str:
    """Return a figure as an element of HTML, whose text is text."""
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.grid(alpha=0.3)
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "doppler_hf"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()[written.getvalue().index("<svg") :]
