"""Report a run: its guarantee and what that means, its results, its noise and filter, on one page of HTML.

The page needs no other file and no network. It is made from what the run has published: the ledger, its evaluations, and
log and filter of the newest checkpoint.

  doppler-hf report out/
  doppler-hf report out/ --output report.html
"""

import argparse
import html
import json
from pathlib import Path
from typing import Final

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.terms import account_in_words, attacks_in_words, claim_in_words, record_in_words
from doppler_hf.reports.run_report import (
    draw_noise_over_frequency,
    draw_run,
    draw_trade_off,
    html_page,
    html_table,
    last_evaluation,
)
from doppler_hf.run.checkpoints import filter_of_checkpoint, is_whole, kept_evaluations

REPORT_NAME: Final = "privacy_report.html"
_STATE: Final = "trainer_state.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf report`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"the output folder of a run, with {LEDGER_NAME}")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the page (default: {REPORT_NAME} in the folder)")


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    if not (args.folder / LEDGER_NAME).is_file():
        raise ValueError(f"FOLDER must have {LEDGER_NAME}, got {args.folder} without it. Give the output folder of a run.")
    output = args.folder / REPORT_NAME if args.output is None else args.output
    if output.suffix != ".html":
        raise ValueError(f"--output must end in .html, got {output}.")
    ledger = PrivacyLedger.load(args.folder)
    statement, checkpoint = ledger.statement, newest_checkpoint(args.folder, ledger)
    logs = [] if checkpoint is None else json.loads((checkpoint / _STATE).read_text("utf-8"))["log_history"]
    if evaluations := kept_evaluations(args.folder, ledger=ledger):
        logs = [entry for entry in logs if not any(name.startswith("eval_") for name in entry)] + evaluations
    curves = draw_run(logs)
    low_pass_filter = filter_of_checkpoint(None if checkpoint is None else str(checkpoint))
    noise = draw_noise_over_frequency(NoiseShape.parse(statement.noise_shape), low_pass_filter)
    logged = (
        ""
        if checkpoint is not None
        else "<p>No checkpoint of this training is here, so that there are neither its loss nor a filter to draw.</p>"
    )
    first, last = (ledger.entries[place]["time"][:10] for place in (0, -1))
    what = [
        ("model", model_in_words(args.folder, *([] if checkpoint is None else [checkpoint]))),
        ("trained", first if first == last else f"{first} to {last}"),
        ("data", f"{statement.num_units:,} {record_in_words(ledger)}s"),
        *last_evaluation(logs),
    ]
    meaning = [("What ε means", draw_trade_off(ledger.trade_off()) + html_table(attacks_in_words(ledger)))]
    check = (
        f"<p><code>doppler-hf verify {html.escape(args.folder.resolve().name)}</code> recomputes ε and the chain of hashes. "
        f"The last hash is <code>{ledger.head}</code>.</p>"
    )
    page = html_page(
        title=f"Private training: {args.folder.resolve().name}",
        claim=claim_in_words(ledger),
        is_private=ledger.why_not_private is None,
        sections=[
            ("The training", html_table(what)),
            *(meaning if ledger.why_not_private is None else []),
            ("Over the training", curves + logged),
            ("The noise over time", f"<p>{html.escape(statement.noise_shape_in_words)}</p>{noise}"),
            ("The terms", html_table(account_in_words(ledger))),
            ("Not covered by ε", f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in ledger.not_covered)}</ul>"),
            ("How to check it", check),
        ],
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    print(f"The report is in {output}.")
    return 0


def model_in_words(*folders: Path) -> str:
    """Return the name of the model that was saved in the first of some folders that has one."""
    for path in (folder / name for folder in folders for name in ("adapter_config.json", "config.json")):
        if path.is_file():
            config = json.loads(path.read_text("utf-8"))
            base = config.get("base_model_name_or_path") or config.get("_name_or_path") or ""
            of = Path(base).name if Path(base).is_absolute() else base  # where it lay is nobody's business
            kind = (
                f"{config['peft_type']} adapter" if "peft_type" in config else ", ".join(config.get("architectures") or ())
            )
            return f"{kind} of {of}" if of else kind
    return "none is saved here"


def newest_checkpoint(folder: Path, ledger: PrivacyLedger) -> Path | None:
    """Return the checkpoint of the largest step of a training, if there is one that was written to its end.

    The log of another, without privacy perhaps, may lie in the same folder.
    """
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{_STATE}") if is_whole(path.parent)]
    own = [path for path in whole if (path / LEDGER_NAME).is_file() and PrivacyLedger.load(path).is_prefix_of(ledger)]
    steps = {json.loads((path / _STATE).read_text("utf-8"))["global_step"]: path for path in own}
    return steps[max(steps)] if steps else None
