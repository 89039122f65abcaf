"""Check that a model is a base with an adapter merged into it, for `doppler-hf verify MERGED --base BASE --adapter FOLDER`.

The merge is computed again and every tensor compared. How a merge rounds depends on precision and machine. With the spacing
eps of the precision in which the merged model was saved, a tensor V counts as W′ = W + ΔW if

- each value differs from W′ by at most 2 eps (|W| + |W′| + max |ΔW|), and all of them together by at most eps/2 of the norms
  of W and W′: roundings differ from value to value, while a training or a factor changes all;
- the change V − W contains ΔW once: ⟨V − W, ΔW⟩ is ⟨ΔW, ΔW⟩ up to a tenth and what rounding adds. So a base without the
  adapter is noticed, even if the adapter changes less than rounding does.
"""

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.extras import require

_ROUNDINGS: Final = 2.0
_TOGETHER: Final = 0.5
_NEARLY_ONCE: Final = 0.1
# So many standard deviations.
_BY_CHANCE: Final = 6.0


def merge_mismatches(merged: Path, *, base: str, adapter: Path) -> list[str]:
    """Return how the model in `merged` differs from `base` with `adapter` merged into it, beyond rounding."""
    require("recipes")
    from peft import PeftModel

    config = AutoConfig.from_pretrained(merged)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise Refusal(
            "no-class-of-model",
            f"{merged / 'config.json'} names no class of Transformers, so the merge cannot be computed again. Save the "
            "merged model with save_pretrained.",
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
    off, change = found - expected, expected - base
    sizes = _size(base) + _size(expected)
    is_near = bool((off.abs() <= _ROUNDINGS * spacing * (expected.abs() + base.abs() + change.abs().max())).all())
    is_rounding = bool(_size(off) <= _TOGETHER * spacing * sizes)
    # Rounding is nearly independent of the change, so that its share of the product falls with the number of values.
    rounding = spacing * sizes * _size(change) / found.numel() ** 0.5
    is_merged_once = bool((off * change).sum().abs() <= _NEARLY_ONCE * change.square().sum() + _BY_CHANCE * rounding)
    return is_near and is_rounding and is_merged_once


def _size(values: Tensor) -> Tensor:
    """Return the norm of float64 numbers, whose squares `sum` adds up in pairs."""
    return values.square().sum().sqrt()
