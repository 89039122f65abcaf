"""GLUE tasks: sentences as counts of hashed words, or as the outputs of an encoder's frozen layers, computed once.

A frozen layer without dropout is a public function of one example, so that its output is one of the example's features: a
run on outputs is the run on texts, at a fraction of the time.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.run.digests import parameters_digest
from scripts.studies.data import Data, Loader, Sources, apart, digest_of, in_parts, kept
from scripts.studies.networks import HASHED_WORDS, TopLayers
from scripts.training.data_sources import glue_task, load_glue
from scripts.training.hub import hub_or_folder

# The longest text, and how many texts are computed together.
MAX_TOKENS: Final = 128
TOGETHER: Final = 256


def words(task_name: str, network: Callable[[], nn.Module], *, held_out: int) -> Loader:
    """Return what loads a task of single sentences as counts of hashed words, each sentence of norm 1.

    The weights of the words are public: idf would be learnt from private data.

    Args:
        task_name: The task.
        network: Makes a network of counts, shape (batch, HASHED_WORDS).
        held_out: How many training examples to choose by.
    """

    def read(folder: str | None, sources: Sources) -> Data:
        from sklearn.feature_extraction.text import HashingVectorizer

        splits = load_glue(task_name, folder, flag="--data-dir")
        (column,) = glue_task(task_name).text_columns
        counts = {name: HashingVectorizer(n_features=HASHED_WORDS).transform(splits[name][column]) for name in splits}
        labels = {name: torch.tensor(splits[name]["label"]) for name in splits}

        def inputs_of(rows: np.ndarray, *, split: str) -> Tensor:
            return torch.from_numpy(counts[split][rows].toarray()).float()

        digest = digest_of(task_name, held_out, *(list(splits[name][each]) for name in splits for each in (column, "label")))
        return in_parts(digest, inputs_of, labels, network, held_out=held_out)

    return Loader(f"glue/{task_name}", read)


class Outputs:
    """Outputs for every token of every text, and the collator that pads them.

    Args:
        vectors: All tokens of all texts, shape (tokens, hidden).
        ends: Of each text, the number of tokens up to its end.
    """

    def __init__(self, vectors: Tensor, ends: Tensor) -> None:
        self._vectors, self._ends = vectors, ends
        self._lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the outputs of some texts, padded on the right, with their masks and labels."""
        rows = torch.tensor([example["text"] for example in examples])
        lengths = self._lengths[rows]
        positions = torch.arange(int(lengths.max()))
        mask = positions < lengths[:, None]
        tokens = (self._ends[rows] - lengths)[:, None] + positions
        return {
            "hidden": self._vectors[tokens.where(mask, 0)].float() * mask[..., None],
            "attention_mask": mask.long(),
            "labels": torch.tensor([example["label"] for example in examples]),
        }


def outputs_of(
    encoder: PreTrainedModel, tokens: Mapping[str, list[list[int]]], *, pad: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    """Return `vectors` and `ends` of `Outputs`, for texts as a tokenizer returns them; `pad` is the tokenizer's."""
    lengths = torch.tensor([len(ids) for ids in tokens["input_ids"]])
    ends = lengths.cumsum(0)
    vectors = torch.empty(int(ends[-1]), encoder.config.hidden_size, dtype=torch.float16)
    encoder.eval()
    with torch.no_grad():
        # Texts of one length together need no padding.
        for rows in lengths.argsort().split(TOGETHER):
            batch = pad({name: [each[row] for row in rows] for name, each in tokens.items()}, return_tensors="pt")
            hidden = encoder(**batch).last_hidden_state
            for row, own in zip(rows, hidden, strict=True):
                vectors[ends[row] - lengths[row] : ends[row]] = own[: lengths[row]].half()
    return vectors, ends


def check_encoder(encoder: str) -> None:
    """Check that an encoder, a hub name or folder, can be loaded, before work that comes to it late.

    Raises:
        ValueError: If it cannot.
    """
    with hub_or_folder(encoder, "--encoder"):
        AutoConfig.from_pretrained(encoder)


def sentences(task_name: str, *, layers: int, held_out: int) -> Loader:
    """Return what loads a task for the last layers of an encoder.

    Args:
        task_name: The task.
        layers: How many are trained.
        held_out: How many training examples to choose by.
    """

    def read(folder: str | None, sources: Sources) -> Data:
        from datasets import Dataset
        from transformers import AutoModel, AutoTokenizer

        task = glue_task(task_name)
        splits = load_glue(task_name, folder, flag="--data-dir")
        with hub_or_folder(sources.encoder, "--encoder"):
            tokenizer, encoder = AutoTokenizer.from_pretrained(sources.encoder), AutoModel.from_pretrained(sources.encoder)
        if not isinstance(getattr(getattr(encoder, "encoder", None), "layer", None), nn.ModuleList):
            raise Refusal(
                "no-list-of-layers",
                f"--encoder must be a BERT-like model with a list of layers, got a {type(encoder).__name__}. Give one such "
                "as sentence-transformers/all-MiniLM-L6-v2.",
            )
        above = encoder.encoder.layer[-layers:]
        encoder.encoder.layer = encoder.encoder.layer[:-layers]
        parts = [splits["train"], splits[task.validation_splits[0]]]
        texts = [[text for part in parts for text in part[column]] for column in task.text_columns]
        tokens = tokenizer(*texts, truncation=True, max_length=MAX_TOKENS, return_attention_mask=False).data
        labels = [label for part in parts for label in part["label"]]
        digest = digest_of(parameters_digest(encoder), parameters_digest(above), layers, held_out, tokens, labels)
        path = sources.cache_dir / f"{task_name}-{digest}.pt"
        outputs = Outputs(*kept(path, lambda: outputs_of(encoder, tokens, pad=tokenizer.pad)))
        # The lengths of input_ids are those by which a draw is sorted.
        rows = Dataset.from_dict({**tokens, "text": range(len(labels)), "label": labels})
        train, tuning = apart(len(parts[0]), held_out)

        def network() -> nn.Module:
            return TopLayers(copy.deepcopy(above), hidden_size=encoder.config.hidden_size, num_labels=task.num_labels)

        report = rows.select(range(len(parts[0]), len(rows)))
        return Data(digest, rows.select(train), rows.select(tuning), report, network, outputs)

    return Loader(f"glue/{task_name}", read)
