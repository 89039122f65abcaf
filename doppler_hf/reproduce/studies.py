"""What is compared on what.

Each method is at its best: its own clipping, base optimizer and trained weights, and a learning rate tuned like that of the
others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from doppler_hf.reproduce.networks import Trained


@dataclass(frozen=True)
class Method:
    """A way to train a task, as arguments of `DopplerTrainer`; all others are the task's.

    Attributes:
        arguments: The arguments.
        trained: Which weights are trained; None for those of the task.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    trained: Trained | None = None


@dataclass(frozen=True)
class Study:
    """What is compared on what.

    Attributes:
        question: What it settles.
        methods: Name → method; the first is compared with.
        tasks: Names.
        epsilons: ε.
    """

    question: str
    methods: Mapping[str, Method]
    tasks: tuple[str, ...]
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)


# A decay to zero averages the weights by itself.
ON_WEIGHTS: Final = {"weight_filter": "momentum:beta=0.97", "lr_scheduler_type": "constant"}


def shaped(low_pass_filter: str, noise_shape: str, **more: Any) -> Method:
    """Return DP-AdamBC, unless `more` has another base, with a filter and a shape of the noise."""
    return Method({"low_pass_filter": low_pass_filter, "noise_shape": noise_shape, **more})


SHAPES: Final[Mapping[str, Method]] = {
    "white, none": shaped("none", "white"),
    "white, first-order-v1": shaped("first-order-v1", "white"),
    "white, second-order": shaped("second-order", "white"),
    "white, auto": shaped("auto", "white"),
    "white, on weights": shaped("none", "white", **ON_WEIGHTS),
    "auto, none": shaped("none", "auto"),
    "auto, first-order-v1": shaped("first-order-v1", "auto"),
    "auto, auto": shaped("auto", "auto"),
    "auto, on weights": shaped("none", "auto", **ON_WEIGHTS),
}

STUDIES: Final[Mapping[str, Study]] = {
    "noise-shaping": Study(
        "What is shaped noise worth, and which filter belongs to it?",
        SHAPES,
        ("digits", "mnist", "mnist-perceptron", "sst2-words", "sst2", "sst2-full", "qnli"),
    ),
}
"""Name → study."""
