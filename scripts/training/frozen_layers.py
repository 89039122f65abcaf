"""The lowest layers of an encoder, frozen: computed once for every example, and kept on disk.

    h = f(tokens of one example),    logits = g(h; trained weights)

Privacy: f costs none, as a tokenizer costs none. In evaluation mode it is a fixed map of one example: it has no dropout, no
statistics of a batch and no weights fitted to these data, and each text is computed alone. Gradients are clipped behind
it, whatever its values. The file is as private as the examples, which could be guessed from it.

`input_ids` become the numbers of rows in a table of outputs, a row for each token. So the collator, the sorting by length
and the model's own forward stay as they are.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from doppler_hf.errors import Refusal

if TYPE_CHECKING:
    from datasets import Dataset


class RowsOfTable(nn.Module):
    """Stands in the place of the embeddings, and looks up the outputs of the frozen layers."""

    word_embeddings = None  # Transformers asks for it; there is no table of token ids whose size could be checked.

    def __init__(self, table: Float[np.ndarray, "rows hidden"]) -> None:
        super().__init__()
        self._table = table  # no buffer: it would be saved with the model, and moved to the device as a whole

    def forward(self, input_ids: Int[Tensor, "batch length"], **_: Any) -> Float[Tensor, "batch length hidden"]:
        """Return the outputs of the frozen layers, in float32."""
        return torch.from_numpy(self._table[input_ids.numpy(force=True)]).to(input_ids.device, torch.float32)


def freeze_lowest(
    model: PreTrainedModel,
    layers: int,
    splits: Mapping[str, "Dataset"],
    tokenizer: PreTrainedTokenizerBase,
    *,
    bf16: bool,
    folder: Path,
) -> dict[str, "Dataset"]:
    """Take the lowest layers out of a BERT-like model (modified in place), and return its data with rows for `input_ids`.

    Adapters of the layers above, made afterwards, keep the names that they have in the whole model, and load onto it. With
    `bf16` it computes in autocast, and keeps float16, which rounds finer. `folder` gets a file for each model and data.
    """
    encoder = model.base_model
    stack = getattr(getattr(encoder, "encoder", None), "layer", ())
    if not 0 < layers < len(stack):
        got = f"{layers} for a {type(encoder).__name__} with {len(stack)}"
        raise Refusal("out-of-range", f"--frozen_layers must be less than a BERT-like model's number of layers, got {got}.")
    encoder.encoder.layer = stack[:layers]
    columns = [name for name in tokenizer.model_input_names if name in next(iter(splits.values())).column_names]
    texts = [row for part in splits.values() for row in part.select_columns(columns)]
    digest = hashlib.sha256(repr((encoder.config.to_dict(), bf16, texts)).encode())
    for weights in (*encoder.parameters(), *encoder.buffers()):
        digest.update(weights.detach().cpu().contiguous().view(torch.uint8).numpy())
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    # The padding's number is a row as well: a row of zeros, not another example's.
    ends = tokenizer.pad_token_id + 1 + np.cumsum([len(text["input_ids"]) for text in texts])
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{secrets.token_hex(4)}.npy"  # a random name, since two runs may write at once
        _write_outputs(encoder, texts, ends, unfinished, bf16=bf16)
        unfinished.replace(path)
    encoder.embeddings, encoder.encoder.layer = RowsOfTable(np.load(path, mmap_mode="r")), nn.ModuleList()
    for number, layer in enumerate(stack[layers:], start=layers):
        encoder.encoder.layer.add_module(str(number), layer)
    of_texts = iter([[*range(end - len(text["input_ids"]), end)] for text, end in zip(texts, ends.tolist(), strict=True)])
    unread = [name for name in columns if name != "attention_mask"]  # types of tokens are for the embeddings alone
    return {
        name: part.remove_columns(unread).add_column("input_ids", [next(of_texts) for _ in range(len(part))])
        for name, part in splits.items()
    }


@torch.no_grad()
def _write_outputs(
    encoder: PreTrainedModel, texts: Sequence[dict[str, list[int]]], ends: np.ndarray, path: Path, *, bf16: bool
) -> None:
    was_training, dtype = encoder.training, np.float16 if bf16 else np.float32
    encoder.eval()
    table = np.lib.format.open_memmap(path, "w+", dtype, shape=(int(ends[-1]), encoder.config.hidden_size))
    # Around the loop, autocast casts the weights once. Around each text it would do so each time: three times as slow.
    with torch.autocast(encoder.device.type, torch.bfloat16, enabled=bf16):
        for text, end in zip(texts, ends.tolist(), strict=True):
            # Privacy: alone, so that a text's outputs follow from its own tokens to the last bit. In a batch they would be
            # rounded by what is beside them, and one text more would move them all.
            batch = {name: torch.tensor([values], device=encoder.device) for name, values in text.items()}
            hidden = encoder(**batch).last_hidden_state
            table[end - hidden.shape[1] : end] = hidden[0].float().numpy(force=True)
    table.flush()
    encoder.train(was_training)
