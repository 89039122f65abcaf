"""A model and its data: all that a `Trainer` takes except its arguments. And what all kinds do to make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import AutoTokenizer, EvalPrediction

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Workload:
    """A model and its data, ready for `DopplerTrainer`; what is None is left to the trainer."""

    model: nn.Module  # with its adapters
    train_dataset: "Dataset"  # one row is one example
    eval_datasets: dict[str, "Dataset"]  # by the prefix of their metrics' names: `eval`, for MNLI `eval_matched` and another
    processing_class: Any  # tokenizer or image processor, which is saved beside the model
    data_collator: Callable[[list[Any]], dict[str, Any]] | None = None
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None

    @property
    def eval_dataset(self) -> "Dataset":
        """The first data set to evaluate on."""
        return next(iter(self.eval_datasets.values()))

    def for_trainer(self) -> dict[str, Any]:
        """Return the keywords that a `Trainer` takes of it."""
        others = {name: value for name, value in vars(self).items() if name != "eval_datasets"}
        return others | {"eval_dataset": self.eval_dataset}


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer that pads, on the right. GPT-2 and its kind are pretrained on unpadded text."""
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # On the left, padding would shift absolute positions by an amount that depends on the other examples.
    tokenizer.padding_side = "right"
    return tokenizer


def name_classes(model: Any, names: Sequence[str]) -> None:
    """Write the names of the classes into the model's config (modified in place)."""
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
