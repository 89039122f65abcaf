"""Plan a private run: the ε it costs, how noisy its gradients are, and the alternatives of equal ε.

Give the batch size, the length (epochs or steps), and either epsilon or the noise multiplier; the other one is computed. A
second table keeps epsilon and shows other lengths and batch sizes. Nothing is trained and no data is read. Give the number
of trained weights, or the model, and the plan also shows the learning rate that a run chooses. With --trials the plan is for
a search, which tries several settings and publishes only the best run.

  doppler-hf plan --num-examples 67349 --batch-size 1000 --epochs 3 --epsilon 3
  doppler-hf plan --num-examples 67349 --batch-size 1000 --epochs 3 --epsilon 3 --plot plan.png
  doppler-hf plan --num-examples 67349 --batch-size 1000 --epochs 3 --epsilon 3 --trainable-parameters 1.2e6
  doppler-hf plan --num-examples 67349 --batch-size 1000 --epochs 3 --epsilon 3 --trials 10
  doppler-hf plan --num-examples 67349 --batch-size 1000 --epochs 3 --noise-multiplier 1 --low-pass-filter first-order-v1
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Column, Table

from doppler_hf.cli.flags import whole_number
from doppler_hf.cli.planned_runs import (
    SCHEDULES,
    PlannedRun,
    PlannedTerms,
    PlanRequest,
    alternatives,
    epochs_of,
    of_gradient,
    planned_terms,
)
from doppler_hf.cli.plots import PICTURE_ENDINGS, check_picture, plot_plan
from doppler_hf.errors import Refusal, page
from doppler_hf.filters import LowPassFilter, NoiseShape, group_delay, noise_gain
from doppler_hf.filters.noise_shape import in_units_of_c
from doppler_hf.privacy.accounting.accounting import Sampling, get_total_epsilon
from doppler_hf.privacy.accounting.attack import TradeOff, attack_in_words, trade_off

READING: Final = (
    "noise is what the run adds to each coordinate of its average gradient, in units of the clip norm C. It includes the "
    "0.5 % for the logged training loss, which report_train_loss='none' saves. Less noise means better learning: above "
    "0.005 C, image classifiers trained from scratch learned little. Where the noise stops falling, larger batches and more "
    "epochs no longer help. This table assumes white noise (independent in each step); shaped noise, which the plan above "
    "may choose, may be lower. records processed is batch size × steps, and says what a run costs in time. See "
    f"{page('guides/choosing')}."
)
# Longer strategies and filters are not printed, so that no row of the table is longer than 80 characters.
MOST_PRINTED: Final = 6
LONGEST_FILTER: Final = 48
# The names of `cli.random_model.TASKS`, whose file imports torch.
TASKS: Final = (
    "text-classification", "causal-lm", "image-classification", "text-generation", "token-classification",
    "question-answering", "fill-mask", "text2text-generation", "multiple-choice",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf plan`."""
    parser.add_argument(
        "--num-examples",
        type=whole_number,
        required=True,
        metavar="N",
        help="number of records in the training set; with privacy_unit_column, the number of users",
    )
    parser.add_argument(
        "--batch-size", type=whole_number, metavar="B", help="expected, over all processes and micro-batches"
    )
    parser.add_argument("--epochs", type=float, metavar="E", help="length of the run; a step is one batch")
    parser.add_argument("--max-steps", type=whole_number, metavar="T", help="length of the run, in place of --epochs")
    parser.add_argument("--epsilon", type=float, metavar="ε", help="target ε")
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        metavar="σ",
        help="in units of the clip norm, in place of --epsilon; covers gradient and loss together, so a training script "
        "needs noise_multiplier=1.005·σ for the same ε, unless it has report_train_loss=none",
    )
    parser.add_argument("--delta", type=float, metavar="δ", help="default: N^-1.1")
    parser.add_argument(
        "--sampling", choices=get_args(Sampling), default="allocation", help="as in training (default: %(default)s)"
    )
    parser.add_argument(
        "--lr-scheduler-type",
        choices=[*SCHEDULES],
        default="linear",
        help="schedule of the learning rate, without a warmup; noise, filter and automatic learning rate are chosen for it "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--trials",
        type=float,
        metavar="K",
        help="expected number of runs of a search that draws the settings of each at random and publishes only the best; "
        "the real number is random and secret, and ε is that of the whole search",
    )
    parser.add_argument("--max-grad-norm", type=float, default=1.0, metavar="C", help="clip norm (default: %(default)s)")
    grammar = "as first-order-v1, butterworth:order=2,cutoff=0.1 or b=0.1,0.1;a=1,-0.8 (default: %(default)s)"
    parser.add_argument("--low-pass-filter", default="auto", metavar="FILTER", help=grammar)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--trainable-parameters",
        type=float,
        metavar="D",
        help="number of trained weights, for example 1.2e6, as print_trainable_parameters() of PEFT shows it, to show the "
        "learning rate that a run chooses",
    )
    size.add_argument(
        "--model",
        metavar="NAME",
        help="hub name, or a folder with config.json, to show the learning rate of a run that trains all weights; needs "
        "--task. No weights are loaded",
    )
    parser.add_argument("--task", choices=TASKS, metavar="TASK", help=f"the task of --model: {', '.join(TASKS)}")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the noise against batch size and epochs, with this plan marked, as " + ", ".join(PICTURE_ENDINGS),
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Compute ε or the noise multiplier, compare the run with others, and print the tables."""
    if args.plot is not None:
        check_picture(args.plot)  # Check it before the computation, which takes time.
    named = None if args.low_pass_filter == "auto" else LowPassFilter.parse(args.low_pass_filter)
    check_model_flags(args)
    request = PlanRequest(**{field.name: vars(args)[field.name] for field in dataclasses.fields(PlanRequest)})
    terms = planned_terms(request, named)
    planned = terms.white_run  # the alternatives have white noise, so this run is among them with white noise, too
    facts, best = describe(request, terms)
    if terms.selection is not None:
        facts["search"] = describe_search(request, terms)
    if args.trainable_parameters is not None or args.model is not None:
        facts |= learning_rate_of(args, facts, rates=request.rates(facts["steps"]))
    console = Console()
    if not args.json:
        console.print(facts_table(facts))
        console.print(attack_in_words(best, epsilon=facts["epsilon"]))
    # The alternatives get the target ε. The plan itself reaches a slightly smaller ε, which would distort the comparison.
    table = alternatives(request, planned, facts["target_epsilon"], selection=terms.selection)
    if args.plot is not None:
        plot_plan(table, planned, args.plot, epsilon=facts["target_epsilon"], delta=facts["delta"])
    if args.json:
        runs = [{"epochs": length, **dataclasses.asdict(other)} for length, others in table.items() for other in others]
        # JSON has no infinity; no plan contains one.
        print(json.dumps({**facts, "alternatives": runs}, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        guarantee = f"ε = {facts['target_epsilon']:.4g}, δ = {facts['delta']:.3g}"
        what = "Training runs" if terms.selection is None else "Trials of hyperparameter searches"
        console.print(f"\n{what} with the same guarantee, {guarantee}:", highlight=False)
        console.print(alternatives_table(table, planned))
        console.print(READING)
        if args.plot is not None:
            console.print(f"The noise of these runs is drawn in {args.plot}.", markup=False, soft_wrap=True)
    return 0


def describe(request: PlanRequest, terms: PlannedTerms) -> tuple[dict[str, Any], TradeOff]:
    """Return every number of the plan by name (the JSON object without its alternatives), and the best attack.

    Noise and filter are those that a training run would choose: without a given σ, it also chooses the shape of the noise.
    """
    delta, planned, shape, low_pass_filter = request.target_delta, terms.run, terms.shape, terms.low_pass_filter
    sigma, releases, selection = planned.noise_multiplier, terms.releases, terms.selection
    epsilon = get_total_epsilon([releases], delta=delta) if selection is None else selection.epsilon
    # The delay is taken at frequency zero, because a signal that changes slowly is there.
    (delay,) = group_delay(low_pass_filter, np.array([0.0])).tolist()
    # Only this pair of ε and δ is proven for a search.
    best = trade_off([releases]) if selection is None else TradeOff(np.array([epsilon]), np.array([delta]))
    facts = {
        "solved_for": "epsilon" if request.epsilon is None else "noise_multiplier",
        "num_examples": planned.num_examples,
        "max_grad_norm": planned.max_grad_norm,
        "epochs": epochs_of(request, planned),
        "batch_size": planned.expected_batch_size,
        "sample_rate": planned.sample_rate,
        "steps": planned.steps,
        "examples_processed": planned.examples_processed,
        "noise_multiplier": sigma,
        "noise_std": planned.noise_std * shape.std(planned.steps),
        "filtered_noise_std": planned.noise_std * math.sqrt(noise_gain(low_pass_filter, shape)),
        "average_noise_std": planned.average_noise_std(shape),
        "delta": delta,
        "target_epsilon": epsilon if request.epsilon is None else request.epsilon,
        "epsilon": epsilon,
        "attack": {
            "tpr_at_1e-2_fpr": best.true_positive_rate(1e-2),
            "tpr_at_1e-3_fpr": best.true_positive_rate(1e-3),
            "advantage": best.advantage,
        },
        "noise_shape": str(shape),
        "low_pass_filter": str(low_pass_filter),
        "delay_steps": delay,
        "delay_share_of_steps": delay / planned.steps,
        "sampling": planned.sampling,
        "lr_scheduler_type": request.lr_scheduler_type,
    }
    return facts, best


def describe_search(request: PlanRequest, terms: PlannedTerms) -> dict[str, Any]:
    """Return the numbers of a search by name: what each trial satisfies, and its noise beside that of a single run."""
    selection, single_run = terms.selection, terms.single_run
    assert selection is not None
    facts: dict[str, Any] = {
        "expected_trials": selection.trials.mean,
        "distribution": selection.trials.name,
        "first_guarantee": [*selection.first],
        "second_guarantee": [*selection.second],
        "trial_epsilon": get_total_epsilon([terms.releases], delta=request.target_delta),
        "trial_delta": request.target_delta,
        "expected_examples_processed": round(selection.trials.mean * terms.run.examples_processed),
    }
    if single_run is not None:
        of_trial = terms.run.average_noise_std(terms.shape)
        facts["noise_over_single_run"] = of_trial / single_run.run.average_noise_std(single_run.shape)
    return facts


def facts_table(facts: dict[str, Any]) -> Table:
    """Return a table of what `describe` returns."""
    bands = NoiseShape.parse(facts["noise_shape"]).bands
    shape = facts["noise_shape"] if bands <= MOST_PRINTED else f"{bands} bands (--json prints their coefficients)"
    delay = f"{facts['delay_steps']:.4g} steps, {facts['delay_share_of_steps']:.2%} of T"
    noise = in_units_of_c(facts["average_noise_std"] / facts["max_grad_norm"])
    named = facts["low_pass_filter"]
    if len(named) > LONGEST_FILTER:
        named = f"{named[: LONGEST_FILTER - 18]}… (--json has all)"
    rows = {
        "num_examples": ("training records N", f"{facts['num_examples']:,}"),
        "batch_size": ("expected batch size B", f"{facts['batch_size']:,}"),
        "sample_rate": ("sampling rate q = B/N", f"{facts['sample_rate']:.4g}"),
        "epochs": ("epochs", f"{facts['epochs']:.6g}"),
        "steps": ("steps T (max_steps)", f"{facts['steps']:,}"),
        "max_grad_norm": ("clip norm C", f"{facts['max_grad_norm']:g}"),
        "sampling": ("sampling", facts["sampling"]),
        "lr_scheduler_type": ("lr_scheduler_type", facts["lr_scheduler_type"]),
        "noise_multiplier": ("noise multiplier", f"{facts['noise_multiplier']:.4g}"),
        "noise_shape": ("noise_shape", shape),
        "low_pass_filter": ("low_pass_filter", named),
        "delay": ("delay of the filter", delay),
        "average_noise_std": ("noise per coordinate", noise + ("" if bands == 1 else ", shaped")),
        **rate_rows(facts),
        "delta": ("δ", f"{facts['delta']:.4g}"),
        "epsilon": ("ε", f"{facts['epsilon']:.4g}"),
    }
    if search := facts.get("search"):
        rows["epsilon"] = ("ε of the search", rows["epsilon"][1])
        rows |= {
            "trials": ("trials expected", f"{search['expected_trials']:g} ({search['distribution']}; the number is secret)"),
            "trial_epsilon": ("ε of each trial", f"{search['trial_epsilon']:.4g} at δ = {facts['delta']:.3g}"),
            "expected_work": ("records processed", f"{search['expected_examples_processed']:,} in all trials, expected"),
        }
        if "noise_over_single_run" in search:
            times = f"{search['noise_over_single_run']:.3g} times that of a single run of equal ε"
            rows["price"] = ("noise of each trial", times)
    table = Table(title="Plan", show_header=False)  # Each row fits into 80 characters.
    for name, (label, value) in rows.items():
        table.add_row(label, value + (" (computed)" if name == facts["solved_for"] else ""))
    return table


def rate_rows(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return rows of the automatic learning rate, or none if the plan has no trained weights."""
    if "learning_rate" not in facts:
        return {}
    most = "" if facts["learning_rate_is_exact"] else ", at most"
    return {
        "trainable_parameters": ("trained weights", f"{facts['trainable_parameters']:,}"),
        "learning_rate": ("learning rate", f"{facts['learning_rate']:.3g} (auto{most})"),
    }


def check_model_flags(args: argparse.Namespace) -> None:
    """Refuse a number of weights that is none, and a model without its task."""
    number = args.trainable_parameters
    if number is not None and not 1 <= number < math.inf:
        raise Refusal("out-of-range", f"--trainable-parameters must be at least 1; got {number:g}, as in 1.2e6.")
    if args.model is not None and args.task is None:
        raise Refusal(
            "no-task",
            f"--task is missing, which --model {args.model} needs. Give it, for example as --task {TASKS[0]}. All tasks are "
            f"{', '.join(TASKS)}.",
        )
    if args.task is not None and args.model is None:
        raise Refusal("no-effect", f"--task {args.task} has no effect without --model. Give the model, or leave --task out.")


def learning_rate_of(args: argparse.Namespace, facts: dict[str, Any], *, rates: Sequence[float]) -> dict[str, Any]:
    """Return the learning rate that a run chooses with the default optimizer and these `rates`, and its number of weights.

    A number of weights gives the most that the rate can be: the sizes of layers, and adapters, may lower it.
    """
    # torch and Transformers are imported only if they are needed.
    from doppler_hf.run.planning.learning_rate import TrainedWeights, learning_rate_of_rule, trained_weights

    if args.model is None:
        weights = TrainedWeights(round(args.trainable_parameters))
    else:
        from doppler_hf.cli.random_model import RandomModel

        length = None if args.task == "image-classification" else 1
        weights = trained_weights(RandomModel(args.model, task=args.task, length=length, device="meta").model)
    rate = learning_rate_of_rule(
        weights,
        # The plan's σ covers the gradient and the logged loss, and the rate follows from the gradient's.
        noise_multiplier=of_gradient(facts["noise_multiplier"]),
        batch_size=facts["batch_size"],
        shape=NoiseShape.parse(facts["noise_shape"]),
        rates=rates,
    )
    is_exact = args.model is not None
    return {"trainable_parameters": weights.number, "learning_rate": rate, "learning_rate_is_exact": is_exact}


def alternatives_table(table: dict[float, list[PlannedRun]], planned: PlannedRun) -> Table:
    """Return a table of the runs of equal ε, with an arrow at the run that was asked for."""
    columns = ["", "epochs", "batch\nsize", "steps", "noise", "records\nprocessed"]
    right = (Column(name, justify="right") for name in columns)
    laid_out = Table(*right, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for epochs, runs in table.items():
        for other in runs:
            laid_out.add_row(
                *("→" if other is planned else "", f"{epochs:.4g}", f"{other.expected_batch_size:,}", f"{other.steps:,}"),
                *(in_units_of_c(other.average_noise_std() / other.max_grad_norm), f"{other.examples_processed:,}"),
                style="bold" if other is planned else None,
            )
        laid_out.add_section()
    return laid_out
