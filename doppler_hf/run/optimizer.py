"""The optimizer of a private run: Transformers' weight-decay groups, the filter, the base optimizer, and GaLore."""

import itertools
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from torch import nn

from doppler_hf.optim import DopplerOptimizer
from doppler_hf.run.planning.filter_and_noise import chosen_filter
from doppler_hf.run.planning.learning_rate import automatic_learning_rate
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.galore import GaloreArguments, target_parameters


def optimizer_in_words(args: DopplerTrainingArguments) -> str:
    """Return the optimizer of the filtered gradient, and GaLore if it is on, in one line."""
    targets = args.optim_target_modules
    if targets is None:
        return args.base_optimizer
    named = targets if isinstance(targets, str) else ", ".join(targets)
    return f"{args.base_optimizer}, GaLore of rank {GaloreArguments.parse(args.optim_args).rank} on {named}"


def first_learning_rate(optimizer: DopplerOptimizer) -> float:
    """Return the learning rate with which the schedule begins."""
    group = optimizer.param_groups[0]
    return float(group.get("initial_lr", group["lr"]))


def learning_rate_in_words(args: DopplerTrainingArguments, optimizer: DopplerOptimizer) -> str:
    """Return in words the first learning rate, and whether it was given, chosen or loaded from a checkpoint."""
    rate = first_learning_rate(optimizer)
    source = "auto: from noise, steps and model size" if args.learning_rate is None else "as given"
    if rate != optimizer.defaults["lr"]:
        ignored = "" if args.learning_rate is None else f"; learning_rate={args.learning_rate:g} has no effect"
        source = f"from the checkpoint{ignored}"
    return f"{rate:.3g} ({source})"


def optimizer_of(
    args: DopplerTrainingArguments, model: nn.Module, *, run: PrivateRun, decayed: Collection[str]
) -> DopplerOptimizer:
    """Return the `DopplerOptimizer` of the arguments, with weight decay for the parameters named `decayed`."""
    galore = GaloreArguments.parse(args.optim_args)
    targets = args.optim_target_modules
    projected = {} if targets is None else target_parameters(model, targets)
    matrices = matrices_of(model) if args.base_optimizer == "muon" else set()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    low_pass_filter = chosen_filter(args, run.statement, checkpoint=run.previous.checkpoint)
    rate = args.learning_rate
    groups = (
        {
            "params": [p for name, p in named if (name in decayed, name in projected, p in matrices) == kind],
            "weight_decay": args.weight_decay if kind[0] else 0.0,
            **(vars(galore) if kind[1] else {}),
            "orthogonal": kind[2],
        }
        for kind in itertools.product((True, False), repeat=3)
    )
    return DopplerOptimizer(
        [group for group in groups if group["params"]],
        lr=automatic_learning_rate(args, run.statement, model=model) if rate is None else rate,
        low_pass_filter=low_pass_filter,
        base=args.base_optimizer,
        beta2=args.adam_beta2,
        eps=args.adam_epsilon,
        floor=args.adam_bc_floor,
        noise_std=run.settled_noise_std,
    )


def terms_shown(run: PrivateRun, optimizer: DopplerOptimizer) -> dict[str, Any]:
    """Return a run's terms and its chosen values, by the names under which trackers get them."""
    chosen = {
        "noise_std": optimizer.noise_std,
        "low_pass_filter": str(optimizer.low_pass_filter),
        "learning_rate": first_learning_rate(optimizer),
    }
    return {f"privacy/{name}": value for name, value in (asdict(run.statement) | chosen).items()}


def matrices_of(model: nn.Module) -> set[nn.Parameter]:
    """Return trained weights of two or more dimensions, without embeddings, whose rows are independent vectors."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return {p for p in model.parameters() if p.requires_grad and p.ndim > 1 and p not in tables}
