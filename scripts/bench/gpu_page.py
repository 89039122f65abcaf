"""The page of `gpu.py`: tables of what was measured, and of each figure that is missing, why."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[str, Row | None]
PRIVATE = "book_keeping"
OF_STEPS = (
    "*Busy* is the sum of the kernels' own times, and memory the most that a step adds to what is there. Waits for the "
    "device are those of which `torch.cuda.set_sync_debug_mode` warns; it does not see all."
)
COLUMNS = "time, of plain | ms: plain → ours | ms busy | kernels | MiB | waits"
NO_FIGURES = (
    "**This page was made to try out the script, at tiny shapes or on a CPU. It says nothing of a GPU, and the sizes in its "
    "text are those of the full scale.**"
)


def private_by_plain(key: str) -> Callable[[Row], float]:
    """Return what divides ours by the plain one."""
    return lambda row: float(row[key][1] / row[key][0])


# Figure, row, how it is read from the row, and the most that is wanted.
WANTED: tuple[tuple[str, str, Callable[[Row], float], float], ...] = (
    *(
        ("busy time of a pass, of plain", f"pass/{name}", private_by_plain("busy_s"), most)
        for name, most in {
            **{"roberta-base": 1.25, "gpt2": 1.25, "vit-base": 1.3, "roberta-base-lora": 1.05, "llama-1b-lora": 1.05}
        }.items()
    ),
    *(
        ("kernels of a pass, of plain", f"pass/{name}", private_by_plain("kernels"), 1.05 if "lora" in name else 1.35)
        for name in ("roberta-base", "gpt2", "vit-base", "roberta-base-lora", "llama-1b-lora")
    ),
    ("ms", "release/white", lambda row: 1000 * row["second_s"], 3.0),
    ("kernels", "release/white", lambda row: row["kernels"][1], 10),
    ("ms", "optimizer/momentum", lambda row: 1000 * row["second_s"], 1.5),
    ("s of the first step", "optimizer/momentum", lambda row: row["first_step_s"], 3.0),
    ("time of a step, of plain", "run/roberta-base", lambda row: row["ratio"], 1.2),
    ("time of a step, of plain", "run/roberta-base-lora", lambda row: row["ratio"], 1.15),
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
                "- **Question:** what do a private pass, release, optimizer and run cost on a GPU, and do the tests pass?",
                "- **Command:** `make gpu`",
                f"- **Seeds:** random weights and data, one initialisation; {here['pairs']} pairs of steps in turn in one "
                "process, medians, quartiles in brackets.",
                f"- **Hardware:** {here['device']}, {here['memory_mib']:,} MiB, driver {here['driver']}; torch "
                f"{here['torch']}, CUDA {here['cuda']}, transformers {here['transformers']}, commit {here['commit']}.",
                f"- **Date:** {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}",
            ]
        ),
        *([NO_FIGURES] if is_tried else []),
        *section(
            "Verdict",
            "What was wanted, of private steps against plain ones, and what was measured.",
            "| figure | of | at most | measured | |",
            (verdict(rows, *wanted) for wanted in WANTED),
        ),
        "## Tests",
        f"Marked `gpu`: {said(rows.get('tests/gpu'), outcome)}.",
        f"Trainings of other tests, on the device: {said(rows.get('tests/trainings'), outcome)}.",
        *section(
            "Forward and backward pass",
            f"Per-sample clipping and summing under bf16 autocast, against a pass with the model's own loss. {OF_STEPS}",
            f"| model | {COLUMNS} | examples a second |",
            (f"| {name} | {compared(row)} | {said(row, examples)} |" for name, row in of_work("pass", rows)),
        ),
        *section(
            "Release and optimizer",
            "The release of sums of 125 million coordinates against `torch.Tensor.normal_`, and a step of filter "
            "(`momentum`) and AdamBC on 127 million against fused AdamW.",
            f"| step | {COLUMNS} | ms of the first step |",
            (
                f"| {work} | {compared(row)} | {said(row, first_step) if work == 'optimizer' else '–'} |"
                for work in ("release", "optimizer")
                for _, row in of_work(work, rows)
            ),
        ),
        *section(
            "Whole run",
            "`DopplerTrainer` against `Trainer`, with samplers, collator, noise, filter and optimizer, on random texts of "
            "one length, in bf16. The first step is apart, with the checks before it.",
            "| model | time of a step, of plain | ms | s until the first step's end | examples of a step |",
            (
                f"| {name} | {said(row, ratio)} | {said(row, milliseconds)} | {said(row, first_steps)} | "
                f"{said(row, lambda row: str(row['examples']))} |"
                for name, row in of_work("run", rows)
            ),
        ),
        *section(
            "Beside Opacus",
            "The same passes of plain, ours and Opacus, in turn in one process: `GradSampleModule` keeps the gradient of "
            "each example, ghost clipping runs backward twice. Opacus computes all logits at once.",
            "| model, Opacus' way | its time, of plain | ours, of plain | examples a second: plain → Opacus |",
            (
                f"| {name} | {said(row, ratio)} | {said(row, lambda row: ratio(row['ours']))} | {said(row, examples)} |"
                for name, row in of_work("peer", rows)
                if row
            ),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdict(rows: Rows, figure: str, name: str, of_row: Callable[[Row], float], most: float) -> str:
    """Return a line of the table of what was wanted."""
    row = rows.get(name)
    measured = said(row, lambda row: f"{of_row(row):.3g}")
    is_figure = measured not in ("not run", "out of memory") and row is not None and "error" not in row
    met = ("**met**" if of_row(row) <= most else f"**missed**, {of_row(row) / most:.3g} ×") if is_figure and row else "–"
    return f"| {figure} | {name} | {most:g} | {measured} | {met} |"


def compared(row: Row | None) -> str:
    """Return the cells of what `gpu.compared` measures."""
    of_pairs = (
        lambda row: f"{1000 * row['busy_s'][0]:.3g} → {1000 * row['busy_s'][1]:.3g}",
        lambda row: "{:,} → {:,}".format(*row["kernels"]),
        lambda row: "{:,.0f} → {:,.0f}".format(*row["mib"]),
        waits,
    )
    return " | ".join(said(row, figure) for figure in (ratio, milliseconds, *of_pairs))


def section(title: str, text: str, head: str, lines: Iterable[str]) -> list[str]:
    """Return a part of the page with a table, or nothing if it would be empty."""
    table = [head, "|---" * (head.count("|") - 1) + "|", *lines]
    return [f"## {title}", text, "\n".join(table)] if len(table) > 2 else []


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
    plain, private = row["waits"]
    places = f" ({', '.join(f'`{place}`' for place in sorted(set(private)))})" if private else ""
    return f"{len(plain)} → {len(private)}{places}"


def first_step(row: Row) -> str:
    """Return how long a first step takes, in milliseconds."""
    return f"{1000 * row['first_step_s']:,.0f}"


def first_steps(row: Row) -> str:
    """Return how long a plain and a private run take to the end of their first step."""
    return "{:.3g} → {:.3g}".format(*row["first_step_s"])


def outcome(row: Row) -> str:
    """Return how many tests passed, failed and were skipped, and which failed."""
    failed = row["failed"]
    named = f" ({', '.join(f'`{name}`' for name in failed)})" if failed else ""
    rest = ", and the time was over" if row["interrupted"] else ""
    return f"{row['passed']} passed, {len(failed)} failed{named}, {row['skipped']} skipped{rest}"


def in_short(row: Row) -> str:
    """Return a row in one line, whatever it is of."""
    return said(row, outcome if row["row"].startswith("tests/") else lambda row: f"{ratio(row)}, {milliseconds(row)} ms")
