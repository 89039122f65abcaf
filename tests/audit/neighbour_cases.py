"""The neighbour test over models and settings, as a table: `python -m tests.audit.neighbour_cases`.

Every two values of two settings meet in one of the cases. The models are those of `tests.support.models`, in float64, so
that rounding is far below 1e-6.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import BertForMultipleChoice

from doppler_hf import DopplerTrainer
from doppler_hf.audit import neighbour_distances
from tests.support.models import IGNORED, VOCABULARY, build
from tests.support.pairwise import pairwise
from tests.support.trainers import arguments

EXAMPLES, USERS = 30, 14
PADDING_OF = {"labels": IGNORED}

SETTINGS = {
    "model": ("roberta", "gpt2-lm", "llama-lm", "t5-lm", "vit", "resnet", "roberta-lora", "llama-dora", "gpt2"),
    "padding": ("longest", "to eight"),
    "dropout": (0.0, 0.3),
    "unit": ("example", "user", "user, two at most", "mean of a user, two at most"),
    "accumulation": (1, 3),
    "clipping": ("automatic", "vanilla"),
    "granularity": ("flat", "per_layer"),
    "engine": ("book_keeping", "opacus"),
    "checkpointing": ("off", "non-reentrant"),
    "tokens": (None, 24),
    "loss": ("raw", "private"),
    "update": ("sgd", "adam_bc", "galore"),
}
# Images have no tokens, and adapters of rank 4 no smaller subspace.
IMPOSSIBLE = {
    ("padding", "to eight"): {"vit", "resnet"},
    ("tokens", 24): {"vit", "resnet", "t5-lm"},
    ("checkpointing", "non-reentrant"): {"resnet"},
    ("update", "galore"): {"roberta-lora", "llama-dora", "resnet"},
}
USUAL = {name: values[0] for name, values in SETTINGS.items()}
# The model makes several rows of each example, as many as it has choices, which may come in several views too.
OF_CHOICES = [
    USUAL | {"model": "bert-choice", "clipping": "vanilla", "dropout": 0.3, "tokens": 36},
    USUAL | {"model": "bert-choice", "unit": "user, two at most", "granularity": "per_layer", "accumulation": 3},
]
# Cases in which an example comes in several views.
VIEWS = 4
OF_VIEWS = [
    USUAL | {"model": "vit", "clipping": "vanilla"},
    USUAL | {"model": "resnet", "clipping": "vanilla", "accumulation": 3, "engine": "opacus"},
    USUAL | {"model": "resnet", "unit": "user, two at most", "granularity": "per_layer", "loss": "private"},
    USUAL | {"model": "resnet", "unit": "mean of a user", "clipping": "vanilla", "accumulation": 3, "loss": "private"},
    USUAL | {"model": "gpt2-lm", "clipping": "vanilla", "accumulation": 3, "tokens": 96},
    USUAL | {"model": "bert-choice", "clipping": "vanilla"},
]


def cases():
    """Return settings by name, each two of which meet, without the impossible ones."""
    found = []
    for values in pairwise(*SETTINGS.values()):
        case = dict(zip(SETTINGS, values, strict=True))
        for name, value in case.items():
            if case["model"] in IMPOSSIBLE.get((name, value), ()):
                case[name] = USUAL[name]
        if case["engine"] == "opacus" and "dora" in case["model"]:
            case["engine"] = "book_keeping"
        found.append(case)
    return [case for index, case in enumerate(found) if case not in found[:index]]


def data_for(model, *, seed=0):
    """Return examples of unequal lengths for a model, with the column of users."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(EXAMPLES):
        tokens = generator.integers(2, VOCABULARY, size=generator.integers(3, 9)).tolist()
        row = {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": index % 3}
        if isinstance(model, BertForMultipleChoice):
            choices = [tokens, tokens[: index % 3] + generator.integers(2, VOCABULARY, size=3).tolist()]
            row = {"input_ids": choices, "attention_mask": [[1] * len(choice) for choice in choices], "labels": index % 2}
        elif model.main_input_name == "pixel_values":
            row = {"pixel_values": generator.normal(size=(3, 8, 8)).tolist(), "labels": index % 3}
        elif model.config.is_encoder_decoder:
            row["labels"] = generator.integers(2, VOCABULARY, size=generator.integers(2, 6)).tolist()
        elif model.get_output_embeddings() is not None:
            row["labels"] = tokens
        rows.append(row | {"user": index % USERS if index < 20 else 0})
    return Dataset.from_list(rows)


def augmented(rows):
    """Transform images and texts at random, each by itself: moved, mirrored, with tokens hidden."""
    if "pixel_values" in rows:
        rows["pixel_values"] = [
            np.roll(np.flip(image, axis=2) if np.random.random() < 0.5 else image, np.random.randint(-2, 3, size=2), (1, 2))
            for image in np.asarray(rows["pixel_values"])
        ]
    elif "input_ids" in rows:
        rows["input_ids"] = [hidden(tokens) for tokens in rows["input_ids"]]
    return rows


def hidden(tokens):
    """Hide some tokens of a text, or of each choice."""
    if isinstance(tokens[0], list):
        return [hidden(choice) for choice in tokens]
    return np.where(np.random.random(len(tokens)) < 0.3, 1, tokens).tolist()


def collator_for(padding):
    """Return a collator that pads on the right to the longest example or to a multiple of eight."""

    def stack(name, values):
        if isinstance(values[0], list) and isinstance(values[0][0], list) and name != "pixel_values":
            choices = stack(name, [choice for value in values for choice in value])
            return choices.unflatten(0, (len(values), -1))
        values = [torch.as_tensor(value) for value in values]
        if name == "pixel_values":
            return torch.stack(values).double()
        if values[0].ndim == 0:
            return torch.stack(values)
        fill = PADDING_OF.get(name, 0)
        stacked = pad_sequence(values, batch_first=True, padding_value=fill)
        missing = -stacked.shape[1] % 8 if padding == "to eight" and name != "labels" else 0
        return torch.nn.functional.pad(stacked, (0, missing), value=fill)

    def collate(examples):
        batch = {name: stack(name, [example[name] for example in examples]) for name in examples[0]}
        if batch["labels"].ndim == 2 and padding == "to eight" and "input_ids" in batch:
            missing = max(0, batch["input_ids"].shape[1] - batch["labels"].shape[1])
            batch["labels"] = torch.nn.functional.pad(batch["labels"], (0, missing), value=IGNORED)
        return batch

    return collate


def trainer_for(case, folder, *, cls=DopplerTrainer, collator=None, model=None, views=1, **overrides):
    """Return a trainer of one case; the data are random if an example comes in several views."""
    if model is None:
        model = build(case["model"], checkpointing=case["checkpointing"])
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = case["dropout"]
    options = dict(
        clipping=case["clipping"], clipping_granularity=case["granularity"], grad_sample_engine=case["engine"],
        gradient_accumulation_steps=case["accumulation"], per_device_train_batch_size=9 // case["accumulation"],
        max_tokens_per_micro_batch=case["tokens"], remove_unused_columns=False,
        # Norms of every example are far above it, so that vanilla clipping brings all of them to C.
        per_sample_max_grad_norm=1e-3, grad_sample_self_check=True,
    )  # fmt: skip
    if case["unit"] != "example":
        options |= {"privacy_unit_column": "user", "per_device_train_batch_size": 6 // case["accumulation"]}
        options |= {"max_examples_per_unit": 2} if "two" in case["unit"] else {}
        options |= {"clip_unit_mean": "mean" in case["unit"]}
    if case["loss"] == "private":
        options |= {"report_train_loss": "private", "per_sample_max_loss": 0.5}
    if case["update"] == "galore":
        options |= {"optim_target_modules": "all-linear", "optim_args": "rank=2,update_proj_gap=2"}
    else:
        options |= {"base_optimizer": case["update"]}
    data = data_for(model)
    if views > 1:
        data, options["augmentation_multiplicity"] = data.with_transform(augmented), views
    return cls(
        model=model,
        args=arguments(Path(folder), **(options | overrides)),
        train_dataset=data if case["unit"] != "example" else data.remove_columns("user"),
        data_collator=collator_for(case["padding"]) if collator is None else collator,
    )


def result_of(case, *, pairs=2, views=1):
    """Return the outcome of the neighbour test of one case."""
    with tempfile.TemporaryDirectory() as folder:
        return neighbour_distances(trainer_for(case, folder, views=views), pairs=pairs, tolerance=1e-6)


def main():
    """Print a table of all cases, and one of those in several views, for the results page."""
    print_table(cases(), views=1)
    print("\nWith two choices in each example:\n")
    print_table(OF_CHOICES, views=1)
    print(f"\nWith {VIEWS} views of each example:\n")
    print_table(OF_VIEWS, views=VIEWS)


def print_table(cases, *, views):
    """Print a table of some cases."""
    print("|", " | ".join(SETTINGS), "| largest distance | largest coupling |")
    print("|" + " --- |" * (len(SETTINGS) + 2))
    distances, couplings = [], []
    for case in cases:
        result = result_of(case, pairs=12, views=views)
        distances.append(result.distances.max())
        couplings.append(result.couplings.max())
        print(
            "|",
            " | ".join(str(value) for value in case.values()),
            f"| {distances[-1]:.9f} | {couplings[-1]:.1e} |",
            flush=True,
        )
    print(f"\n{len(distances)} cases: largest distance {max(distances):.9f} C, largest coupling {max(couplings):.1e} C")


if __name__ == "__main__":
    main()
