"""The tasks, with the settings that all methods share: of a size that a CPU trains in seconds to minutes, or the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from doppler_hf.errors import Refusal
from scripts.studies.data import Loader
from scripts.studies.images import images, images_of_users, scattered_images
from scripts.studies.networks import (
    Trained,
    cifar_cnn,
    digits_vit,
    efficientnet,
    hashed_words,
    linear_on_scattering,
    mnist_cnn,
    perceptron,
    resnet50,
    vit_small,
)
from scripts.studies.texts import sentences, words


@dataclass(frozen=True)
class Task:
    """A task: its data, which weights are trained, the arguments of all methods, and whether the network is pretrained."""

    load: Loader
    trained: Trained
    settings: Mapping[str, Any]
    is_pretrained: bool = False


def _settings(batch_size: int, steps: int, max_grad_norm: float, **more: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": batch_size,
        "max_steps": steps,
        "per_sample_max_grad_norm": max_grad_norm,
        "clipping": "vanilla",
    } | more


# The head's input has norm √hidden, and a clip norm far below that of most gradients turns all examples into equal pushes.
# Micro-batches of 1,024 tokens stay in a CPU's caches: a step takes 0.7 of the time that it takes with 4,096.
TEXT: Final = _settings(500, 100, 10.0, max_tokens_per_micro_batch=1024)


def _fine_tuned_long(name: str, *, held_out: int, steps: int) -> Task:
    settings = TEXT | {"per_device_train_batch_size": 128, "max_steps": steps, "clipping": "automatic"}
    return Task(sentences(name, layers=1, held_out=held_out), "lora", settings, is_pretrained=True)


# "-long": three epochs of small batches; of SST-2's many sentences one.
SMALL: Final[Mapping[str, Task]] = {
    "digits": Task(images("digits", digits_vit, held_out=200), "all", _settings(256, 150, 1.0)),
    "mnist": Task(images("mnist", mnist_cnn, held_out=5000), "all", _settings(500, 200, 1.0)),
    "mnist-users": Task(
        images_of_users("mnist", mnist_cnn, held_out=5000, per_user=10),
        "all",
        _settings(100, 150, 1.0, clipping="automatic", privacy_unit_column="user"),
    ),
    "mnist-perceptron": Task(images("mnist", perceptron, held_out=5000), "all", _settings(1000, 300, 1.0)),
    "mnist-scattering": Task(
        scattered_images("mnist", partial(linear_on_scattering, 28, 1), held_out=5000),
        "all",
        _settings(1000, 300, 1.0),
    ),
    "cifar10-scattering": Task(
        scattered_images("cifar10", partial(linear_on_scattering, 32, 3), held_out=5000),
        "all",
        _settings(1000, 300, 1.0),
    ),
    "cifar10-scattering-long": Task(
        scattered_images("cifar10", partial(linear_on_scattering, 32, 3), held_out=5000),
        "all",
        _settings(128, 1055, 1.0),
    ),
    # A quarter of the paper's channels, which takes a sixteenth of the time.
    "cifar10": Task(images("cifar10", partial(cifar_cnn, 10, width=16), held_out=5000), "all", _settings(500, 200, 1.0)),
    "sst2-words": Task(words("sst2", hashed_words, held_out=2000), "all", _settings(1000, 200, 0.3)),
    "sst2-words-long": Task(words("sst2", hashed_words, held_out=2000), "all", _settings(128, 1256, 0.3)),
    "sst2": Task(sentences("sst2", layers=1, held_out=2000), "lora", TEXT, is_pretrained=True),
    "sst2-full": Task(sentences("sst2", layers=1, held_out=2000), "all", TEXT, is_pretrained=True),
    "qnli": Task(sentences("qnli", layers=1, held_out=1000), "lora", TEXT, is_pretrained=True),
    "sst2-long": _fine_tuned_long("sst2", held_out=2000, steps=418),
    "qqp-long": _fine_tuned_long("qqp", held_out=1000, steps=188),
    **{f"{name}-long": _fine_tuned_long(name, held_out=1000, steps=211) for name in ("mnli", "qnli")},
}
"""Name → task, for two cores."""

# The paper's grid has 50 to 150 epochs of batches of 500 to 5,000: here 120 of 1,000.
LONG: Final = _settings(1000, 5400, 1.0, clipping="automatic")
FULL: Final[Mapping[str, Task]] = {
    "mnist": Task(images("mnist", mnist_cnn, held_out=5000), "all", LONG | {"max_steps": 2750}),
    "cifar10": Task(images("cifar10", partial(cifar_cnn, 10), held_out=5000), "all", LONG),
    "cifar100": Task(images("cifar100", partial(cifar_cnn, 100), held_out=5000), "all", LONG),
    "cifar10-vit": Task(images("cifar10", vit_small, held_out=5000), "all", LONG),
    "cifar10-efficientnet": Task(images("cifar10", efficientnet, held_out=5000), "all", LONG),
    "cifar10-resnet": Task(images("cifar10", resnet50, held_out=5000), "all", LONG),
}
"""Name → task, for a GPU: the data sets and models that the paper trains from scratch."""

TASKS: Final[Mapping[str, Mapping[str, Task]]] = {"small": SMALL, "full": FULL}


def small_task(name: str) -> Task:
    """Look up a small task.

    Raises:
        ValueError: If there is no such task.
    """
    if name not in SMALL:
        raise Refusal("unknown-value", f"--tasks must be of {', '.join(SMALL)}, got {name!r}.")
    return SMALL[name]
