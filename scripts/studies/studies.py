"""What is compared on what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from doppler_hf.filters import PAPER_FILTERS
from scripts.studies.networks import Trained
from scripts.studies.tasks import FULL, Task


@dataclass(frozen=True)
class Method:
    """A way to train a task, as arguments of `DopplerTrainer`; all others are the task's.

    Attributes:
        arguments: The arguments; `floor_fraction` is `adam_bc_floor` in units of the noise's variance.
        trained: Which weights are trained; None for those of the task.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    trained: Trained | None = None


def fits(method: Method, task: Task) -> bool:
    """Return whether a task has such a method: of a network from scratch all weights are trained."""
    return task.is_pretrained or method.trained is None


@dataclass(frozen=True)
class Study:
    """What is compared on what.

    Attributes:
        question: What it settles.
        methods: Name → method; the first is compared with.
        tasks: Names of small tasks.
        full_tasks: Names of tasks at full scale.
        epsilons: ε.
    """

    question: str
    methods: Mapping[str, Method]
    tasks: tuple[str, ...]
    full_tasks: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)


FIRST_ORDER: Final = "first-order-v1"


def shaped(low_pass_filter: str, noise_shape: str, *, trained: Trained | None = None, **more: Any) -> Method:
    """Return DP-AdamBC, unless `more` has another base, with a filter and a shape of the noise."""
    return Method({"low_pass_filter": low_pass_filter, "noise_shape": noise_shape, **more}, trained=trained)


SHAPES: Final[Mapping[str, Method]] = {
    "white, none": shaped("none", "white"),
    "white, first-order-v1": shaped(FIRST_ORDER, "white"),
    "white, second-order": shaped("second-order", "white"),
    "white, momentum": shaped("momentum:beta=0.85", "white"),
    "auto, none": shaped("none", "auto"),
    "auto, first-order-v1": shaped(FIRST_ORDER, "auto"),
    "auto, auto": shaped("auto", "auto"),
    "banded:bands=4, first-order-v1": shaped(FIRST_ORDER, "banded:bands=4"),
    "SGD: white, none": shaped("none", "white", base_optimizer="sgd"),
    "SGD: white, auto": shaped("auto", "white", base_optimizer="sgd"),
    "SGD: auto, auto": shaped("auto", "auto", base_optimizer="sgd"),
}
GALORE: Final[Mapping[str, Any]] = {
    "optim_target_modules": "all-linear",
    "optim_args": "rank=16,update_proj_gap=50,scale=1.0",
}
# The paper's algorithms, each without its filter and with it.
ALGORITHMS: Final[Mapping[str, Method]] = {
    "DPSGD": shaped("none", "white", base_optimizer="sgd"),
    "LP-DPSGD": shaped(FIRST_ORDER, "white", base_optimizer="sgd"),
    "DPAdamBC": shaped("none", "white"),
    "LP-DPAdamBC": shaped(FIRST_ORDER, "white"),
    "DPGaLore": shaped("none", "white", **GALORE),
    "LP-DPGaLore": shaped(FIRST_ORDER, "white", **GALORE),
}
# As their own papers have them: clipping, base optimizer and what is trained.
PEERS: Final[Mapping[str, Method]] = {
    "auto, auto": shaped("auto", "auto"),
    "DP-SGD, vanilla (Opacus)": shaped("none", "white", base_optimizer="sgd", clipping="vanilla"),
    "DP-Adam, vanilla (Opacus, dp-transformers)": shaped("none", "white", base_optimizer="adam", clipping="vanilla"),
    "DP-Adam, automatic (fastDP)": shaped("none", "white", base_optimizer="adam", clipping="automatic"),
    "DP-Adam, automatic, biases alone (fastDP's BiTFiT)": shaped(
        "none", "white", base_optimizer="adam", clipping="automatic", trained="bitfit"
    ),
    "DP-Adam, head alone": shaped("none", "white", base_optimizer="adam", trained="head"),
    "DP-AdamBC": shaped("none", "white"),
    "LP-DPSGD": ALGORITHMS["LP-DPSGD"],
    "LP-DPAdamBC": ALGORITHMS["LP-DPAdamBC"],
}
SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "constant": {"lr_scheduler_type": "constant"},
    "cosine, warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 0.05},  # below 1: a fraction of all steps
    "linear": {"lr_scheduler_type": "linear"},
}
# The default first.
FLOORS: Final = (0.3, 0.003, 0.01, 0.03, 0.1, 1.0, 3.0, 10.0)

FROM_SCRATCH: Final = ("mnist", "mnist-perceptron", "digits", "cifar10")
SCATTERED: Final = ("mnist-scattering", "cifar10-scattering", "cifar10-scattering-long")
TEXTS: Final = ("sst2-words", "sst2-words-long")
FINE_TUNED: Final = ("sst2", "sst2-long", "qqp-long", "mnli-long", "qnli-long")

STUDIES: Final[Mapping[str, Study]] = {
    "paper": Study(
        "Does the paper's filter gain on white noise, from scratch, by algorithm, data set, model and ε?",
        ALGORITHMS,
        FROM_SCRATCH,
        tuple(FULL),
    ),
    "paper-filters": Study(
        "Which of the paper's filters is best, with SGD?",
        {name: shaped(name, "white", base_optimizer="sgd") for name in PAPER_FILTERS},
        FROM_SCRATCH,
        ("cifar10",),
        epsilons=(8.0,),
    ),
    "paper-clipping": Study(
        "Which clipping is best, with SGD and the paper's filter?",
        {
            f"{clipping}, {kind}": shaped(
                FIRST_ORDER, "white", base_optimizer="sgd", clipping=clipping, clipping_granularity=kind
            )
            for clipping in ("automatic", "vanilla")
            for kind in ("flat", "per_layer")
        },
        FROM_SCRATCH,
        ("cifar10",),
        epsilons=(8.0,),
    ),
    "paper-schedules": Study(
        "Which schedule is best, with SGD and the paper's filter?",
        {name: shaped(FIRST_ORDER, "white", base_optimizer="sgd", **schedule) for name, schedule in SCHEDULES.items()},
        FROM_SCRATCH,
        ("cifar10",),
        epsilons=(8.0,),
    ),
    "noise-shaping": Study(
        "What is shaped noise worth, and which filter belongs to it?",
        SHAPES,
        ("digits", "mnist", "mnist-perceptron", "cifar10", *TEXTS, "sst2", "sst2-full", "qnli"),
        tuple(FULL),
    ),
    "peers": Study(
        "Which method trains best, each at its best learning rate?",
        PEERS,
        ("mnist", "mnist-perceptron", "cifar10", *SCATTERED, *TEXTS, *FINE_TUNED),
        tuple(FULL),
    ),
    "muon": Study(
        "Do orthogonalized updates gain from scratch?",
        {"AdamBC": shaped("auto", "auto"), "Muon": shaped("auto", "auto", base_optimizer="muon")},
        FROM_SCRATCH,
        ("mnist", "cifar10"),
    ),
    "users": Study(
        "What is a user's contribution to be, if it is protected as a whole?",
        {
            "mean, clipped": Method(),
            "mean of clipped examples": Method({"clip_unit_mean": False}),
            "one example, clipped": Method({"max_examples_per_unit": 1}),
        },
        ("mnist-users",),
        epsilons=(3.0,),
    ),
    "floor": Study(
        "How small may AdamBC's corrected second moment become, in units of the noise's variance?",
        {f"{fraction:g}": shaped("momentum", "white", floor_fraction=fraction) for fraction in FLOORS},
        ("mnist", "sst2-words"),
        epsilons=(1.0, 8.0),
    ),
}
"""Name → study."""
