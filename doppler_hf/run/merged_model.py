"""Check that a model is a base with an adapter merged into it, for `doppler-hf verify MERGED --base BASE --adapter FOLDER`.

The merge is computed again and every tensor compared. How a merge rounds depends on precision and machine, so two tensors
count as equal if each value of W′ = W + ΔW differs by at most

    4 eps (|W| + |W′| + max |ΔW|)

with the spacing eps of the precision in which the merged model was saved.
"""

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from doppler_hf.extras import require

_ROUNDINGS: Final = 4.0


def merge_mismatches(merged: Path, *, base: str, adapter: Path) -> list[str]:
    """Return how the model in `merged` differs from `base` with `adapter` merged into it, beyond rounding."""
    require("recipes")
    from peft import PeftModel

    config = AutoConfig.from_pretrained(merged)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise ValueError(
            f"{merged / 'config.json'} names no class of Transformers, so the merge cannot be computed again. Save the "
            "merged model with save_pretrained."
        )
    published, names = _loaded(kind, merged, dtype=config.dtype)
    model, _ = _loaded(kind, base, dtype=config.dtype, num_labels=config.num_labels)
    if model.get_input_embeddings() is not None and hasattr(config, "vocab_size"):
        model.resize_token_embeddings(published.get_input_embeddings().num_embeddings, mean_resizing=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    found = published.state_dict()
    lines = [f"{name} is missing in {merged}." for name in names["missing_keys"]]
    lines += [f"{name} is in {merged}, and in no such model." for name in names["unexpected_keys"]]
    differing = [name for name, value in found.items() if not _is_equal(value, after[name], before.get(name))]
    if differing:
        lines.append(
            f"{len(differing)} of {len(found)} tensors in {merged} are not those of {base} with the adapter in {adapter} "
            f"merged into it, such as {differing[0]}. Merge again from the saved adapter, and change nothing afterwards."
        )
    return lines


def _loaded(kind: Any, source: str | Path, *, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, Any]:
    model, names = kind.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    return model, names


def _is_equal(found: Tensor, expected: Tensor, before: Tensor | None) -> bool:
    """Return whether a tensor is what the merge makes of the tensor `before`, up to rounding."""
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    # A head that only the adapter holds was another tensor before, perhaps of another shape.
    base = expected if before is None or before.shape != expected.shape else before
    spacing, (found, expected, base) = torch.finfo(found.dtype).eps, (value.double() for value in (found, expected, base))
    scale = expected.abs() + base.abs() + (expected - base).abs().max()
    return bool(((found - expected).abs() <= _ROUNDINGS * spacing * scale).all())
