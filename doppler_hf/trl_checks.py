"""The common parts of our TRL trainers: refusals, data preparation that shows no row, and logs without training figures.

TRL prepares the data row by row, and logs the end of every prompt that is not the beginning of its row. While one of our
trainers is made, a function of rows can neither log nor warn, whatever the text, the logger and the level, in this process
and in those of `dataset_num_proc`. The message of an error is shown only if it is a constant of the code that raised it.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from doppler_hf.errors import NO_KTO, Refusal
from doppler_hf.preflight.data import refuse_repeats, refuse_what_is_no_data_set, warn_if_evaluated
from doppler_hf.training_args import DopplerTrainingArguments, checks

# TRL's argument → the reason why a private run cannot use it.
NOT_PRIVATE: Final = {
    "padding_free": "it joins the texts of a batch into one row, so no text can be clipped by itself",
    "activation_offloading": "it returns each activation once, and per-sample gradients need activations twice",
}
_SELECTIVE: Final = "selective"  # TRL adds this key to `gradient_checkpointing_kwargs`.


def refuse_arguments(args: DopplerTrainingArguments, reasons: dict[str, str]) -> None:
    """Refuse TRL's arguments that a private run cannot have, each with its reason."""
    checks.refuse_all([*checks.breaking_privacy(args, reasons)])
    if (args.gradient_checkpointing_kwargs or {}).get(_SELECTIVE):
        raise Refusal(
            "selective-checkpointing",
            f"{_SELECTIVE!r} in gradient_checkpointing_kwargs={args.gradient_checkpointing_kwargs} cannot be used with "
            "differential privacy, because per-sample gradients need the recomputed tensors twice. Leave this setting out.",
        )


@contextlib.contextmanager
def private_init(trainer: Any, args: Any, config: type, *, train_dataset: Any, eval_dataset: Any = None) -> Iterator[None]:
    """Wrap the construction of a TRL trainer: refuse what cannot be private, and show no row of the data."""
    if any(kind.__name__ == "KTOConfig" for kind in type(args).__mro__):
        raise Refusal("no-kto", NO_KTO)
    if not isinstance(args, config):  # TRL would silently convert other arguments to its own class.
        raise Refusal(
            "not-our-arguments",
            f"args must be {config.__name__}; got {type(args).__name__}. Make a {config.__name__} with target_epsilon.",
        )
    assert isinstance(args, DopplerTrainingArguments)
    trainer._train_dataset_as_given = train_dataset
    if args.disable_dp:
        yield
        return
    refuse_what_is_no_data_set(train_dataset, "train_dataset")
    refuse_what_is_no_data_set(eval_dataset, "eval_dataset")
    if not {"image", "images"}.isdisjoint(next(iter(train_dataset or ()), ())):  # TRL looks for images in the same way.
        raise Refusal(
            "images-in-texts",
            "train_dataset has a column of images, which this trainer cannot train on privately, because models join the "
            "image patches of a whole batch. Remove the column, or train an image classifier with DopplerTrainer.",
        )
    # Sensitivity: repeats are found by the places of rows, so this check comes before TRL writes the rows again.
    refuse_repeats(args, train_dataset)
    trainer.sets_with_training_rows = warn_if_evaluated(train_dataset, eval_dataset)
    with quiet_rows():
        yield
    if trainer.aux_loss_enabled:
        raise Refusal(
            "loss-of-the-batch",
            f"The argument router_aux_loss_coef={trainer.router_aux_loss_coef} adds a balancing loss that depends on the "
            "whole batch, so no record has its own loss that could be clipped. Set router_aux_loss_coef=0.0.",
        )


def columns_of(given: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield the name, the data set and the columns of each data set among a trainer's arguments, where columns are known."""
    evaluated = given.get("eval_dataset")
    several = evaluated if isinstance(evaluated, dict) else {None: evaluated}
    named = {f"eval_dataset[{key!r}]" if key is not None else "eval_dataset": each for key, each in several.items()}
    for name, data_set in {"train_dataset": given.get("train_dataset"), **named}.items():
        columns = getattr(data_set, "column_names", None)
        if isinstance(columns, list):
            yield name, data_set, columns


def refuse_new_tokens_of_tied_embeddings(model: Any) -> None:
    """Refuse adapters for the new tokens of a chat template whose rows the output layer of the model shares."""
    places: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if "trainable_tokens_delta" not in name:
            continue
        if places.setdefault(id(parameter), name) != name:
            raise Refusal(
                "shared-parameters",
                "The tokenizer of chat_template_path has new tokens, and TRL trains their rows of a table that the model's "
                "embeddings and its output layer share. Shared rows have no per-sample gradients. Add the tokens before the "
                "trainer is made: model, tokenizer, _ = trl.clone_chat_template(model, tokenizer, PATH). Then leave "
                "chat_template_path out, and add 'embed_tokens' to the target_modules of LoraConfig. A template in "
                "a file of type jinja adds no tokens, and trains as it is.",
            )


def without_training_figures(trainer: Any) -> None:
    """Delete the figures of training batches that TRL would log with the loss, such as accuracy and entropy."""
    # Privacy: these figures have no noise. A private step does not ask TRL for any, so nothing is lost here.
    if not trainer.args.disable_dp:
        trainer._metrics["train"].clear()
        # TRL counts the tokens of training batches, and would report their number with each evaluation: here it stays 0.
        trainer._metrics["eval"].pop("num_tokens", None)


@contextlib.contextmanager
def quiet_rows() -> Iterator[None]:
    """Make `Dataset.map`, which `filter` uses too, wrap each function of rows in `WithoutWords` during the block."""
    from datasets import Dataset  # TRL requires datasets, but this package does not.

    own = Dataset.map

    def map_quietly(self: Any, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        with _errors_without_rows():
            return own(self, function and WithoutWords(function), *args, **kwargs)

    # The class is patched, since most methods of a data set return an object of this class, even for subclasses.
    Dataset.map = map_quietly
    try:
        yield
    finally:
        Dataset.map = own


class WithoutWords:
    """Wraps a function of rows so that it logs nothing and shows no warning, also in a process to which it is sent."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and log which module's messages were hidden."""
        # Privacy: every message that is made while a row is processed is hidden, whatever its text.
        places: list[str] = []
        made = logging.getLogRecordFactory()

        def unseen(*of_record: Any, **options: Any) -> logging.LogRecord:
            record = made(*of_record, **options)
            places.append(record.name)
            record.levelno = -1  # No handler shows a message of this level.
            record.msg, record.args, record.exc_info, record.exc_text = "", (), None, None
            return record

        with warnings.catch_warnings(record=True) as warned, _errors_without_rows():
            warnings.simplefilter("always")
            logging.setLogRecordFactory(unseen)
            try:
                return self.function(*args, **kwargs)
            finally:
                logging.setLogRecordFactory(made)
                places += [Path(each.filename).name for each in warned]
                for place in places:
                    _say_once(place)


_said: set[str] = set()


def _say_once(place: str) -> None:
    if place not in _said:
        _said.add(place)
        logging.getLogger(__name__).warning(
            "A message from %s about a row of the data is not shown, because it may contain a part of the row. To read it, "
            "make the trainer once with disable_dp=True.",
            place,
        )


_MAY_BE_SHOWN: Final = "_holds_no_row"


class RowError(Refusal):
    """An error while rows are prepared."""


@contextlib.contextmanager
def _errors_without_rows() -> Iterator[None]:
    """Replace an error of the block by a `RowError` if its message may contain a part of a row."""
    try:
        yield
    except RowError:
        raise
    except Exception as error:
        from datasets.formatting import formatting

        frames = list(_frames(error.__traceback__))
        # Privacy: a constant of the code is not a part of a row, nor is the name of a column that a row does not have.
        constants = [constant for code, _ in frames for constant in code.co_consts]
        is_constant = all(any(type(arg) is type(each) and arg == each for each in constants) for arg in error.args)
        is_of_system = (
            isinstance(error, OSError) and error.errno is not None and error.filename is None
        )  # An example is a full disk.
        is_missing_column = isinstance(error, KeyError) and frames[-1][0].co_filename == formatting.__file__
        if is_constant or is_of_system or is_missing_column or getattr(error, _MAY_BE_SHOWN, False):
            error.__dict__[_MAY_BE_SHOWN] = True  # The mark is kept if the error is sent to another process.
            raise
        code, line = frames[-1]
        raise RowError(
            "row-not-prepared",
            f"The rows of a data set could not be prepared: {type(error).__name__} in {code.co_name} "
            f"({Path(code.co_filename).name}, line {line}). The message of that error is not shown, because it may contain "
            "a part of a row. Check the names and types of the columns. To read the message, make the trainer once with "
            "disable_dp=True.",
        ) from None


def _frames(traceback: TracebackType | None) -> Iterator[tuple[Any, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next
