"""Metrics of an evaluation as means over users, for runs in which a user, and not a row, is the unit of privacy.

Training counts users: a batch has so many users, and each contributes one clipped gradient, however many rows it has.
Metrics count rows. If a few users have most rows, the metrics say how good the model is for these users.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers import EvalPrediction

from doppler_hf.privacy.batching.columns import is_table, units_of
from doppler_hf.run.reporting.published_results import USERS_WITH


def users_of(dataset: Any, *, column: str, name: str = "eval_dataset") -> np.ndarray | None:
    """Return the user of each row of an evaluation set, or None if it has no such column."""
    if not is_table(dataset) or column not in dataset.column_names or not len(dataset):
        return None
    return units_of(dataset, column=column, name=name)


def mean_per_user(
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]], output: Any, *, users: np.ndarray, prefix: str
) -> dict[str, float]:
    """Return each metric as the mean of its values for the rows of single users, by its name with "_per_user".

    A user for whom a metric is undefined, such as an AUC of rows of one class, is left out of its mean. The number of the
    users that counted is then beside it, by its name with "users_with_" before it.

    Args:
        compute_metrics: The metrics of some rows.
        output: The predictions and labels of all rows, as Transformers' `evaluation_loop` returns them.
        users: The user of each row, shape (rows,).
        prefix: What the names begin with, such as "eval".
    """
    found: dict[str, list[float]] = {}
    order = np.argsort(users, kind="stable")
    _, starts = np.unique(users[order], return_index=True)
    for rows in np.split(order, starts[1:]):
        some = EvalPrediction(_rows_of(output.predictions, rows), _rows_of(output.label_ids, rows))
        try:
            # A mean of no rows, or a class that a user lacks, would warn for each user. What is wrong with all rows was
            # warned of when Transformers called the metrics for these.
            with warnings.catch_warnings(action="ignore"):
                metrics = compute_metrics(some)
        except Exception:
            continue
        for name, value in metrics.items():
            if isinstance(value, int | float | np.number):
                values = found.setdefault(name.removeprefix(f"{prefix}_"), [])
                values += [] if math.isnan(value) else [float(value)]
    if not any(found.values()):
        warnings.warn(
            "metrics_per_user=True adds no metric, because compute_metrics fails on the rows of a single user. Make "
            "compute_metrics work on a few rows, or leave metrics_per_user out.",
            stacklevel=4,
        )
    # Privacy: these records are evaluated and not trained on, so ε does not cover them, and the number is a metric like the
    # others. Of an evaluation set with training rows nothing that begins with "eval_" is published.
    counted = {name: len(values) for name, values in found.items() if len(values) < len(starts)}
    return {
        **{f"{prefix}_{name}_per_user": sum(values) / len(values) for name, values in found.items() if values},
        **{f"{prefix}_{USERS_WITH}{name}": count for name, count in counted.items()},
    }


def left_out_in_words(metrics: Mapping[str, float], *, prefix: str, users: np.ndarray) -> str:
    """Return which metrics are means over some of the users only; "" if each is a mean over all."""
    start = f"{prefix}_{USERS_WITH}"
    counts = {name.removeprefix(start): count for name, count in metrics.items() if name.startswith(start)}
    if not counts:
        return ""
    total = len(np.unique(users))
    some = ", ".join(f"{count:,.0f} of {total:,} users for {prefix}_{name}_per_user" for name, count in counts.items())
    return (
        f"metrics_per_user=True takes the mean over {some}. For the rows of the other users alone, the metric is no number, "
        f"such as a recall of a class that a user lacks. These counts are logged as {start}…"
    )


def _rows_of(values: Any, rows: np.ndarray) -> Any:
    if isinstance(values, tuple | list):
        return type(values)([_rows_of(each, rows) for each in values])
    return None if values is None else values[rows]
