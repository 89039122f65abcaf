"""Checks of a training set and its collator that need not read a row."""

import itertools
import os
import warnings
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any, Final

from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.preflight.user_errors import RENAMED
from doppler_hf.privacy.batching.columns import columns_of_text, is_table
from doppler_hf.privacy.batching.repeats import has_repeats
from doppler_hf.privacy.batching.shared_rows import evaluation_sets, is_same_data, training_rows_in
from doppler_hf.privacy.known_numbers import LEAVES, is_own_generator
from doppler_hf.run.own_code import overrides
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.training_args import DopplerTrainingArguments

_FIRST: Final = 100  # Only so many values of a dictionary are looked at.
_KINDS_OF_FILES: Final = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
# Columns that belong to an input, and are none by themselves.
_BESIDE_INPUTS: Final = ("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids")
_PACKED: Final = "seq_lengths"  # the column in which TRL keeps the lengths of the texts packed into a row


def refuse_own_generators(dataset: Any, collator: Any) -> None:
    """Refuse a collator with a seed, and generators that are attributes of data set, transform or collator."""
    for name, owner in (("train_dataset", dataset), ("data_collator", collator)):
        attributes = _attributes_of(owner)
        # A transform is an attribute of the data set; in `datasets` it is among the options of the format. But other
        # dictionaries may hold all records.
        options = [each for each in attributes if isinstance(each, dict)]
        attributes += [each for held in options for each in itertools.islice(held.values(), _FIRST)]
        inner = (value for each in attributes if not isinstance(each, LEAVES) for value in _attributes_of(each))
        found = next((value for value in itertools.chain(attributes, inner) if is_own_generator(value)), None)
        # Sensitivity: its numbers follow the order of the draw, so that one more example changes those of the others.
        if found is not None:
            raise Refusal(
                "generator-of-its-own",
                f"{name} has a random generator of its own ({type(found).__name__}), so the random numbers of one record "
                "would depend on which other records are in the batch. Delete that generator, and draw from the global "
                "generators of torch, NumPy or Python, which a private run seeds secretly.",
            )
    if getattr(collator, "seed", None) is not None:
        raise Refusal(
            "public-seed",
            f"{type(collator).__name__} has seed={collator.seed}, so anybody who knows the seed can repeat its random "
            "numbers. They must be secret in a private run. Leave the seed out; the trainer then provides secret random "
            "numbers.",
        )


def _attributes_of(owner: Any) -> list[Any]:
    """Return the attributes of an object and of its class; none for modules, which belong to others, too."""
    if isinstance(owner, ModuleType):
        return []
    own = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
    return own + [each for kind in type(owner).__mro__ for each in vars(kind).values()]


def refuse_without_inputs(dataset: Any, taken: Collection[str], *, labels: Collection[str], description: str | None) -> None:
    """Refuse a data set of which the model takes no column but labels, and what belongs to an input, such as its mask."""
    columns = dataset.column_names or ()
    inputs = [each for each in taken if each not in {*labels, *RENAMED, "labels", *_BESIDE_INPUTS}]
    if taken and columns and {*inputs}.isdisjoint(columns):
        name = next(iter(inputs), "input_ids")
        text = next(columns_of_text(dataset), None) if is_table(dataset) else "text"
        tokenize = f".map(lambda rows: tokenizer(rows[{text!r}], truncation=True), batched=True)"
        tokenize = "" if text is None else f" If it has texts, tokenize them: {tokenize}."
        removed = ", ".join(column for column in columns if column not in {*taken, *RENAMED, "labels"})
        removed = f" ({removed})" if removed else ""
        raise Refusal(
            "no-inputs",
            f"The model takes none of the columns of the {(description or 'data').lower()} set ({', '.join(columns)}) as an "
            f"input. If a transform or the collator makes the inputs of columns that Transformers removes{removed}, set "
            f"remove_unused_columns=False.{tokenize} If a column has another name than the input, rename it, for example "
            f"with .rename_column(NAME, {name!r}).",
        )


def refuse_what_is_no_data_set(given: Any, name: str) -> None:
    """Refuse a path in place of a data set, and a list of several data sets."""
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given)
        kind = _KINDS_OF_FILES.get(os.path.splitext(path)[1].lower())
        loaded = f"{path!r}" if kind is None else f"{kind!r}, data_files={path!r}"
        raise Refusal(
            "not-a-data-set",
            f"{name} must be a data set; got the name or path {path!r}. Load it: datasets.load_dataset({loaded})['train'].",
        )
    if isinstance(given, list | tuple) and given and all(isinstance(each, Dataset) or is_table(each) for each in given):
        joined = "datasets.concatenate_datasets" if all(map(is_table, given)) else "torch.utils.data.ConcatDataset"
        mend = f"Join the data sets: {joined}({name})."
        if name != "train_dataset":
            mend = "Pass a dictionary, whose names become parts of metrics' names: {'first': set1, 'second': set2}."
        raise Refusal("not-a-data-set", f"{name} must be a data set; got a {type(given).__name__} of data sets. {mend}")


def refuse_evaluation_data(trainer: Any) -> None:
    """Refuse paths, lists of data sets, and empty data sets that will be evaluated."""
    refuse_what_is_no_data_set(trainer.eval_dataset, "eval_dataset")
    args, is_own = trainer.args, overrides(trainer, "get_eval_dataloader")
    evaluates = args.eval_strategy != "no" or trainer.compute_metrics is not None
    for key, each in evaluation_sets(trainer.eval_dataset).items():
        name = f"eval_dataset[{key!r}]" if key else "eval_dataset"
        refuse_what_is_no_data_set(each, name)
        if evaluates and not is_own:
            _refuse_empty(each, name)


def _refuse_empty(dataset: Any, name: str) -> None:
    if has_length(dataset) and len(dataset) == 0:
        raise Refusal("no-examples", f"{name} is empty. Check whether a filter has removed all rows.")


def refuse_a_run_without_data(args: DopplerTrainingArguments, train_dataset: Any) -> None:
    """Refuse a training set whose rows are not single records that can be sampled."""
    if train_dataset is None:
        raise Refusal(
            "no-training-set", "train_dataset is None, so there is nothing to train on. Pass a data set to DopplerTrainer."
        )
    refuse_stream(train_dataset)
    if hasattr(train_dataset, "iloc"):  # in pandas, data[0] is a column
        raise Refusal(
            "rows-not-numbered",
            f"train_dataset is a {type(train_dataset).__name__} of pandas, whose rows cannot be read as train_dataset[0]. "
            "Pass datasets.Dataset.from_pandas(train_dataset).",
        )
    if isinstance(train_dataset, Mapping) and 0 not in train_dataset:
        # The message leaves out the keys, which may name people: messages end up in logs.
        raise Refusal(
            "rows-not-numbered",
            f"train_dataset is a {type(train_dataset).__name__}, whose rows cannot be read as train_dataset[0]. Pass a "
            "single split, such as train_dataset['train'], or convert the columns with "
            "datasets.Dataset.from_dict(train_dataset).",
        )
    _refuse_empty(train_dataset, "train_dataset")
    # Sensitivity: which texts share a row depends on all of them, so that one more text changes many rows.
    if args.privacy_unit_column is None and _PACKED in (getattr(train_dataset, "column_names", None) or ()):
        raise Refusal(
            "packed-rows",
            f"train_dataset has packed rows (it has a column {_PACKED!r}), so one text more or less would change many rows. "
            "Turn packing off, or pack the texts of each user separately and set privacy_unit_column.",
        )
    refuse_repeats(args, train_dataset)


def refuse_stream(train_dataset: Any) -> None:
    """Refuse a data set without a length, or whose rows can only be read one after the other."""
    refuse_what_is_no_data_set(train_dataset, "train_dataset")
    has_no_numbers = isinstance(train_dataset, IterableDataset)
    if train_dataset is not None and (has_no_numbers or not has_length(train_dataset)):
        what = "rows that can only be read in their order" if has_length(train_dataset) else "no length"
        raise Refusal(
            "streamed-data",
            f"train_dataset ({type(train_dataset).__name__}) has {what}, so no random batches can be sampled from it. "
            "Load it without streaming=True, or convert it to a table: datasets.Dataset.from_list(list(train_dataset)).",
        )


def refuse_another_dataset(run: PrivateRun, trainer: Any) -> None:
    """Refuse a data set that replaces the run's while it trains: the accounting is for the rows of the first one."""
    # Sensitivity: nobody has looked for repeated rows in the new data set.
    if trainer.is_in_train and trainer.train_dataset is not run.train_dataset:
        raise Refusal(
            "another-training-set",
            "trainer.train_dataset was replaced during the run (in get_train_dataloader), but ε was planned for the first "
            "data set. Set train_dataset before train().",
        )


def refuse_repeats(args: DopplerTrainingArguments, train_dataset: Any) -> None:
    """Refuse a data set with repeated rows, unless they share a unit of privacy."""
    # Sensitivity: a record that is in k rows contributes k times C.
    if args.privacy_unit_column is None and has_length(train_dataset) and has_repeats(train_dataset):
        raise Refusal(
            "repeated-rows",
            "train_dataset has the same rows several times (from select, repeat or Subset), but ε protects one row, not "
            "several copies of it. Remove the copies, or "
            + ("" if is_table(train_dataset) else "make a datasets.Dataset of it and ")
            + "set privacy_unit_column to a column that they share.",
        )


def warn_of_training_data_in_evaluation(trainer: Any) -> None:
    """Warn once if training rows are evaluated: their metrics, and a checkpoint chosen by them, are not private.

    This is called when a trainer is made and when it trains. The second call looks again if a data set was replaced.
    """
    sets, before = (trainer.train_dataset, trainer.eval_dataset), trainer.sets_looked_at
    if before is not None and all(each is other for each, other in zip(sets, before, strict=True)):
        return
    # A TRL trainer has looked at the data sets before it made new rows of them.
    known = trainer.sets_with_training_rows if before is None else frozenset()
    trainer.sets_looked_at = sets
    trainer.sets_with_training_rows = known | warn_if_evaluated(*sets, known=known)


def warn_if_evaluated(
    train_dataset: Any, evaluated: Any, *, name: str = "eval_dataset", known: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Warn if an evaluation set is the training set or has some of its rows, and return the names of such sets.

    # Privacy: the warning depends on objects, fingerprints and places of rows. It shows a number of rows only if slices
    # alone have chosen the rows, since a filter may choose them by what they hold.
    """
    sets, found = evaluation_sets(evaluated), training_rows_in(train_dataset, evaluated)
    for key, rows in found.items():
        if key in known:
            continue
        which = f"{name}[{key!r}]" if key else name
        if is_same_data(train_dataset, sets[key]):
            fact, mend = f"{which} is train_dataset", "Evaluate on other records."
        else:
            share = f"{rows.shared:,} of the {rows.size:,}" if rows.is_by_slices else "Some"
            share = "All" if rows.shared == rows.size else share
            fact = f"{share} rows of {which} are also in train_dataset"
            mend = (
                "Evaluate on other records. If you split the data, pass both parts, for example split['train'] as "
                f"train_dataset and split['test'] as {name}."
            )
        warnings.warn(f"{fact}, so its metrics, and a best checkpoint chosen by them, are NOT PRIVATE. {mend}", stacklevel=4)
    return frozenset(found)
