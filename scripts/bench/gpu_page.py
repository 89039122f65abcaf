"""The page of `gpu.py`: tables of what was measured, and of each figure that is missing, why."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[str, Row | None]
PRIVATE = "book_keeping"
NO_FIGURES = (
    "**This page was made to try out the script, at tiny shapes or on a CPU. It says nothing of a GPU, and the sizes in its "
    "text are those of the full scale.**"
)


def page(here: Row, rows: Rows) -> str:
    """Return the page in Markdown.

    Args:
        here: The environment in which all rows were measured.
        rows: The rows by name, "work/of what", None for those that are missing.
    """
    dates = sorted({row["date"] for row in rows.values() if row}) or ["nothing was run yet"]
    is_tried = here["device"] == "cpu" or here["scale"] == "tiny"
    parts = [
        "# On a GPU",
        "\n".join(
            [
                "- **Question:** what do a private pass, step, noise and optimizer cost on a GPU, beside Opacus, and do the "
                "tests pass?",
                "- **Command:** `make gpu`",
                f"- **Seeds:** random weights, one initialisation; {here['pairs']} pairs of steps (of noise at most 10) in "
                "turn in one process, medians, quartiles in brackets.",
                f"- **Hardware:** {here['device']}, {here['memory_mib']:,} MiB, driver {here['driver']}; torch "
                f"{here['torch']}, CUDA {here['cuda']}, transformers {here['transformers']}, commit {here['commit']}.",
                f"- **Date:** {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}",
            ]
        ),
        *([NO_FIGURES] if is_tried else []),
        "## Tests",
        f"Marked `gpu`: {said(rows.get('tests/gpu'), outcome)}.",
        *section(
            "Forward and backward pass",
            "Per-sample clipping and summing under bf16 autocast, without noise and optimizer, against a pass with the "
            "model's own loss. Memory is the most that three steps add to model and batch "
            "(`torch.cuda.max_memory_allocated`).",
            "| model | time, of plain | examples a second: plain → private | memory, of plain | MiB: plain → private |",
            (
                f"| {name} | {said(row, ratio)} | {said(row, examples)} | {memory_ratio(rows, name)} | "
                f"{said(rows.get(f'memory/{name} plain'), mib)} → {said(rows.get(f'memory/{name} {PRIVATE}'), mib)} |"
                for name, row in of_work("pass", rows)
            ),
        ),
        *section(
            "Beside Opacus",
            "The same passes of plain, ours and Opacus, in turn in one process: `GradSampleModule` keeps the gradient of "
            "each example, ghost clipping runs backward twice. Opacus computes all logits at once.",
            "| model, Opacus' way | its time, of plain | ours, of plain | examples a second: plain → Opacus | its MiB |",
            (
                f"| {name} | {said(row, ratio)} | {said(row, lambda row: ratio(row['ours']))} | {said(row, examples)} | "
                f"{said(rows.get(f'memory/{name}'), mib)} |"
                for name, row in of_work("peer", rows)
            ),
        ),
        *section(
            "Whole step",
            "The same with noise, filter (`momentum`) and AdamBC, against a plain step with fused AdamW. Waits for the "
            "device are those of one step of which `torch.cuda.set_sync_debug_mode` warns; it does not see all.",
            "| model | time, of plain | examples a second: plain → private | waits: plain → private |",
            (
                f"| {name} | {said(row, ratio)} | {said(row, examples)} | {said(rows.get(f'waits/{name}'), waits)} |"
                for name, row in of_work("step", rows)
            ),
        ),
        *section(
            "Noise",
            "To privatize sums of 125 million coordinates, against `torch.Tensor.normal_` on the device.",
            "| way | time, of torch's normals | ms: torch's → ours |",
            (f"| {name} | {said(row, ratio)} | {said(row, milliseconds)} |" for name, row in of_work("noise", rows)),
        ),
        *section(
            "Optimizer",
            "A step on the 85 million parameters of RoBERTa-base's encoder, against fused AdamW.",
            "| kind | time, of AdamW | ms: AdamW → ours | MiB: AdamW → ours |",
            (
                f"| {name} | {said(row, ratio)} | {said(row, milliseconds)} | {said(rows.get('memory/fused AdamW'), mib)} → "
                f"{said(rows.get(f'memory/{name}'), mib)} |"
                for name, row in of_work("optimizer", rows)
            ),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(title: str, text: str, head: str, lines: Iterable[str]) -> list[str]:
    """Return a part of the page with a table."""
    return [f"## {title}", text, "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines])]


def of_work(work: str, rows: Rows) -> list[tuple[str, Row | None]]:
    """Return what a work is measured of, with the rows."""
    return [(name.partition("/")[2], row) for name, row in rows.items() if name.startswith(f"{work}/")]


def said(row: Row | None, figure: Callable[[Row], str]) -> str:
    """Return a figure of a row, or why there is none."""
    if row is None:
        return "not run"
    if row.get("out_of_memory"):
        return "out of memory"
    if "unsupported" in row:
        return f"not supported ({row['unsupported']})".replace("|", "/")
    if "error" in row:
        return f"failed ({row['error']})".replace("|", "/")
    return figure(row)


def ratio(row: Row) -> str:
    """Return a ratio with its quartiles."""
    q1, q3 = row["ratio_quartiles"]
    return f"**{row['ratio']:.2f}** ({q1:.2f}–{q3:.2f})"


def milliseconds(row: Row) -> str:
    """Return both times."""
    return f"{1000 * row['first_s']:.3g} → {1000 * row['second_s']:.3g}"


def examples(row: Row) -> str:
    """Return how many examples a second both times are."""
    return f"{row['examples'] / row['first_s']:,.1f} → {row['examples'] / row['second_s']:,.1f}"


def waits(row: Row) -> str:
    """Return how often a plain and a private step wait, and where the private one does."""
    places = f" ({', '.join(f'`{place}`' for place in sorted(set(row['private'])))})" if row["private"] else ""
    return f"{len(row['plain'])} → {len(row['private'])}{places}"


def mib(row: Row) -> str:
    """Return a memory."""
    return f"{row['mib']:,.0f}"


def memory_ratio(rows: Rows, name: str) -> str:
    """Return by how much a private pass needs more memory than a plain one."""
    plain, private = ((rows.get(f"memory/{name} {kind}") or {}).get("mib") for kind in ("plain", PRIVATE))
    return f"{private / plain:.2f}" if plain and private is not None else "–"


def outcome(row: Row) -> str:
    """Return how many tests passed, failed and were skipped, and which failed."""
    failed = row["failed"]
    named = f" ({', '.join(f'`{name}`' for name in failed)})" if failed else ""
    return f"{row['passed']} passed, {len(failed)} failed{named}, {row['skipped']} skipped"


def in_short(row: Row) -> str:
    """Return a row in one line, whatever it is of."""
    figures = {"tests": outcome, "memory": mib, "waits": waits}
    work = row["row"].split("/")[0]
    return said(row, figures.get(work, lambda row: f"{ratio(row)}, {milliseconds(row)} ms"))
