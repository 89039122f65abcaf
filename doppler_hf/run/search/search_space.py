"""From what a search draws the settings of its trials, and the arguments of a trial that has them.

Privacy: settings are drawn with the operating system's entropy, independently of each other and of all results. `hp_space`
gets an object that draws, and nothing else.
"""

import copy
import logging
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers.trainer_utils import SchedulerType

from doppler_hf.errors import Refusal
from doppler_hf.training_args import DopplerTrainingArguments

# The arguments that may differ between trials. None of them changes what ε means or covers, and each run of a trial computes
# its noise from them.
SEARCHED: Final = frozenset({
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "per_sample_max_grad_norm", "clipping", "clipping_granularity", "augmentation_multiplicity", "noise_shape",
    "low_pass_filter", "base_optimizer", "adam_bc_floor", "weight_decay", "adam_beta2", "adam_epsilon",
    "lr_scheduler_type", "warmup_steps", "seed",
})  # fmt: skip
# Methods of Optuna's trials that are out of use there, and what to call in their place.
_OTHER_METHODS: Final = {
    "suggest_uniform": "Call suggest_float(name, low, high)",
    "suggest_loguniform": "Call suggest_float(name, low, high, log=True)",
    "suggest_discrete_uniform": "Call suggest_float(name, low, high, step=step)",
}
RANDOM: Final = secrets.SystemRandom()


class MissingMethodRefusal(Refusal, AttributeError):
    """`hp_space` calls a method that a trial does not have; `hasattr` and `copy` expect an `AttributeError`."""


class Draw:
    """The settings of one trial, drawn at random. It has the methods that `hp_space` calls on a trial of Optuna.

    Example:
        >>> draw = Draw()
        >>> 1e-4 <= draw.suggest_float("learning_rate", 1e-4, 1e-2, log=True) <= 1e-2
        True
        >>> draw.suggest_categorical("per_device_train_batch_size", [32, 64]) in (32, 64)
        True
    """

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float:
        """Draw a number between `low` and `high` uniformly, or its logarithm uniformly, or one of the steps from `low`."""
        _check_range(name, low, high, positive=log)
        if step is not None:
            steps = math.floor((high - low) / step + 1e-9)
            return self._once(name, lambda: min(high, low + step * RANDOM.randrange(steps + 1)), low, high, step=step)
        if log:
            ends = math.log(low), math.log(high)
            return self._once(name, lambda: min(high, max(low, math.exp(RANDOM.uniform(*ends)))), low, high, log=True)
        return self._once(name, lambda: RANDOM.uniform(low, high), low, high)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Draw a whole number from `low` to `high` uniformly, or its logarithm nearly uniformly."""
        _check_range(name, low, high, positive=log)
        if low != int(low) or high != int(high) or step != int(step):
            raise Refusal(
                "out-of-range",
                f"hp_space draws {name} as a whole number between {low} and {high} in steps of {step}. Give whole "
                "numbers, or draw it with suggest_float.",
            )
        low, high, step = int(low), int(high), int(step)
        if log:
            ends = math.log(low - 0.5), math.log(high + 0.5)
            return self._once(name, lambda: min(high, max(low, round(math.exp(RANDOM.uniform(*ends))))), low, high, log=True)
        return self._once(name, lambda: RANDOM.randrange(low, high + 1, step), low, high, step=step)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Draw one of the choices uniformly."""
        if not len(choices):
            raise Refusal("out-of-range", f"hp_space has no choices for {name}. Give suggest_categorical at least one.")
        return self._once(name, lambda: RANDOM.choice([*choices]), *choices)

    def __getattr__(self, name: str) -> Any:
        mend = _OTHER_METHODS.get(name, "Draw the settings with suggest_float, suggest_int and suggest_categorical")
        raise MissingMethodRefusal(
            "search-space",
            f"hp_space uses trial.{name}, which a trial of a private search does not have: its settings are drawn at "
            f"random, and must not depend on its number or on other trials. {mend}.",
        )

    def _once(self, name: str, draw: Callable[[], Any], *values: Any, **how: Any) -> Any:
        """Return what was drawn under this name, or draw it from `values`."""
        if name not in self.params:
            self.params[name] = draw()
        return self.params[name]


class _Extreme(Draw):
    """Takes the first value everywhere, or the last one, and writes down what it was asked for."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place, self.asked = place, ""

    def _once(self, name: str, draw: Callable[[], Any], *values: Any, **how: Any) -> Any:
        self.asked += f"{name} from {values} {how or ''}; "
        return self.params.setdefault(name, values[self._place])


def space_in_words(hp_space: Callable[[Any], Any]) -> str:
    """Return what `hp_space` draws from, by which another space is recognised."""
    said = []
    for place in (0, -1):
        draw = _Extreme(place)
        try:
            with unseen():
                returned = hp_space(draw)
            draw.asked += f"returned {returned}"
        except Exception as error:
            draw.asked += type(error).__name__
        said.append(draw.asked)
    return " | ".join(dict.fromkeys(said))


def _check_range(name: str, low: float, high: float, *, positive: bool) -> None:
    if not -math.inf < low <= high < math.inf or (positive and low <= 0):
        raise Refusal(
            "out-of-range",
            f"hp_space draws {name} between {low} and {high}{' on a logarithmic scale' if positive else ''}. The first "
            f"number has to be {'positive and ' if positive else ''}at most the second one, and both have to be finite.",
        )


def drawn_settings(hp_space: Callable[[Any], Any], draw: Draw | None = None) -> dict[str, Any]:
    """Return the settings of a trial, which `hp_space` draws; the same `draw` gives the same numbers again."""
    settings = hp_space(Draw() if draw is None else draw)
    if not isinstance(settings, Mapping):
        raise Refusal(
            "search-space",
            f"hp_space returned {type(settings).__name__}. Return a dictionary of the arguments that a trial gets, such as "
            '{"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)}.',
        )
    # JSON, which ledgers are written in, has no numbers of NumPy.
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}


def arguments_of_trial(args: DopplerTrainingArguments, settings: Mapping[str, Any]) -> DopplerTrainingArguments:
    """Return the arguments of a trial with these settings, after the checks of ordinary arguments."""
    for name in settings:
        if name not in SEARCHED:
            is_known = hasattr(args, name)
            mend = "To warm up for a share of the steps, set warmup_steps=0.1. " if name == "warmup_ratio" else ""
            raise Refusal(
                "search-setting",
                f"hp_space sets {name}, which {'may not differ between trials' if is_known else 'is no argument'}. {mend}A "
                "search can choose: " + ", ".join(sorted(SEARCHED)) + ".",
            )
    of_trial = copy.copy(args)
    try:
        for name, value in settings.items():
            # Transformers reads a schedule by its kind, and only its own `__post_init__` makes one of a name.
            setattr(of_trial, name, SchedulerType(value) if name == "lr_scheduler_type" else value)
        of_trial.check()
    except ValueError as error:
        raise Refusal("search-setting", f"hp_space drew settings that are refused ({dict(settings)}): {error}") from error
    return of_trial


@contextmanager
def unseen() -> Iterator[None]:
    """Show nothing of what the block prints, warns of or logs.

    # Privacy: it would tell the number of trials, and their settings and results, to whoever reads the screen or a log file.
    """
    was_disabled = logging.root.manager.disable
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(was_disabled)
