"""Refusals of a training set and its collator, by what can be read without an example."""

import random
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.privacy.batching.repeats import has_repeats
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.published_results import is_training_data
from doppler_hf.training_args import DopplerTrainingArguments

_GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_PACKED: Final = "seq_lengths"  # where TRL notes the lengths of the texts in a row


def refuse_own_generators(dataset: Any, collator: Any) -> None:
    """Refuse a collator with a seed, and generators that are attributes of data set, transform or collator."""
    for name, owner in (("train_dataset", dataset), ("data_collator", collator)):
        attributes = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
        # A transform is an attribute of the data set, or of `datasets` among the options of its format.
        attributes += [each for options in attributes if isinstance(options, dict) for each in options.values()]
        inner = [value for each in attributes if hasattr(each, "__dict__") for value in vars(each).values()]
        found = next((value for value in (*attributes, *inner) if isinstance(value, _GENERATORS)), None)
        # Sensitivity: its numbers follow the order of the draw, so that one example more changes those of the others.
        if found is not None and found is not torch.default_generator:
            raise Refusal(
                "generator-of-its-own",
                f"{name} must draw all random numbers from the global generators of torch, NumPy or Python, got a "
                f"{type(found).__name__} of its own. Draw from the global ones, which are secret, and delete this one.",
            )
    if getattr(collator, "seed", None) is not None:
        raise Refusal(
            "public-seed",
            f"The seed of {type(collator).__name__} must be None in a private run, got {collator.seed}: its random numbers "
            "would follow a public seed. Leave it out.",
        )


def refuse_a_run_without_data(args: DopplerTrainingArguments, train_dataset: Any) -> None:
    """Refuse a training set without one example per row."""
    if train_dataset is None:
        raise Refusal(
            "no-training-set", "train_dataset must be a data set with a length, got None. Pass one to DopplerTrainer."
        )
    refuse_stream(train_dataset)
    if hasattr(train_dataset, "iloc"):  # pandas, whose rows have no numbers
        raise Refusal(
            "rows-not-numbered",
            f"train_dataset must have rows 0, 1, 2, …, got a {type(train_dataset).__name__} of pandas. Pass "
            "datasets.Dataset.from_pandas(train_dataset).",
        )
    if isinstance(train_dataset, Mapping) and 0 not in train_dataset:
        # Not its keys, which may name people: messages end in logs.
        raise Refusal(
            "rows-not-numbered",
            f"train_dataset must have rows 0, 1, 2, …, got a {type(train_dataset).__name__}. Of several data sets pass one, "
            "such as train_dataset['train']. Of columns pass datasets.Dataset.from_dict(train_dataset).",
        )
    if len(train_dataset) == 0:
        raise Refusal("no-examples", "train_dataset must have examples, got none. Check what has filtered them out.")
    # Sensitivity: which texts share a row depends on all of them, so that one text more changes many rows.
    if args.privacy_unit_column is None and _PACKED in (getattr(train_dataset, "column_names", None) or ()):
        raise Refusal(
            "packed-rows",
            f"train_dataset must have one text in each row, got a column {_PACKED!r} of packed rows. Do without packing, or "
            "pack each person's texts by themselves and set privacy_unit_column.",
        )
    refuse_repeats(args, train_dataset)


def refuse_stream(train_dataset: Any) -> None:
    """Refuse a data set without a length."""
    if train_dataset is not None and not has_length(train_dataset):
        raise Refusal(
            "streamed-data",
            f"{type(train_dataset).__name__} has no length, so it cannot be sampled at random. Load it without "
            "streaming=True, or make a table of it: datasets.Dataset.from_list(list(train_dataset)).",
        )


def refuse_another_dataset(run: PrivateRun, trainer: Any) -> None:
    """Refuse, in a training, a data set that replaces the run's, whose rows are accounted for."""
    # Sensitivity: nobody has looked for repeated rows in this one.
    if trainer.is_in_train and trainer.train_dataset is not run.train_dataset:
        raise Refusal(
            "another-training-set",
            "train_dataset must stay the same while a training lasts, got another one in get_train_dataloader. Set it "
            "before train().",
        )


def refuse_repeats(args: DopplerTrainingArguments, train_dataset: Any) -> None:
    """Refuse a data set in which rows stand more than once, unless they share a unit of privacy."""
    # Sensitivity: a record that stands in k rows contributes k times C.
    if args.privacy_unit_column is None and has_length(train_dataset) and has_repeats(train_dataset):
        raise Refusal(
            "repeated-rows",
            "train_dataset must have each row once, got repeated rows, as by select, repeat or Subset: ε protects one row, "
            "not several copies of it. Leave out the repeats, or set privacy_unit_column to a column that they share.",
        )


def warn_of_training_data_in_evaluation(trainer: Any) -> None:
    """Warn where the training set is evaluated: its metrics, and a checkpoint that they choose, are not private."""
    warn_if_evaluated(trainer.train_dataset, trainer.eval_dataset)


def warn_if_evaluated(train_dataset: Any, evaluated: Any) -> None:
    """Warn if what is evaluated is the training set, or the same data loaded or prepared once more."""
    if is_training_data(train_dataset, evaluated):
        warnings.warn(
            "eval_dataset is train_dataset: its metrics, and a checkpoint that they choose, are NOT PRIVATE. Evaluate on "
            "other examples.",
            stacklevel=4,
        )
