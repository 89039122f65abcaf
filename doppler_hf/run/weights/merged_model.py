"""Check that a model is a base with an adapter merged into it, for `doppler-hf verify MERGED --base BASE --adapter FOLDER`.

The merge is computed again, in each precision in which it may have been made, and every tensor is compared. A tensor that
the adapter does not change must equal the base's, value by value. How a merge rounds depends on the machine. With the
spacing eps of the precision in which the merged model was saved, a tensor V counts as W′ = W + ΔW if

- each value differs from W′ by at most 2 eps (|W| + |W′| + max |ΔW|), and all values together by at most eps/2 of the norms
  of W and W′. In half precision few values may differ at all, since one spacing is large there and training moves all
  values;
- the change V − W contains ΔW once: ⟨V − W, ΔW⟩ equals ⟨ΔW, ΔW⟩ up to a tenth and rounding. So a base without the adapter is
  noticed, even if the adapter changes less than rounding does.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from doppler_hf.errors import Refusal
from doppler_hf.extras import require
from doppler_hf.privacy.ledger.weights import weight_files
from doppler_hf.run.weights.config_differences import config_differences

_ROUNDINGS: Final = 2.0
_TOGETHER: Final = 0.5
_NEARLY_ONCE: Final = 0.1
# The share of values in half precision that may round to a different number, the further share for a large change (which is
# rounded too), the fewest such values, and the spacing above which a precision counts as half precision.
_FEW, _OF_CHANGE, _FEWEST, _HALF = 0.02, 0.5, 2, 1e-5
# The number of standard deviations that count as chance.
_BY_CHANCE: Final = 6.0


def merge_mismatches(merged: Path, *, base: str, adapter: Path) -> list[str]:
    """Return in words how the model in `merged` differs, beyond rounding, from `base` with `adapter` merged into it."""
    require("recipes")
    with _readable(merged):
        config = AutoConfig.from_pretrained(merged)
    if getattr(config, "quantization_config", None) is not None:
        raise Refusal(
            "quantized-merge",
            f"The model in {merged} is quantized, which changes its weights, so this check cannot recognise the "
            "adapter in them. Verify the merged model before you quantize it.",
        )
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise Refusal(
            "no-class-of-model",
            f"{merged / 'config.json'} names no model class of Transformers, so `verify` cannot redo the merge and compare "
            "the two. Save the merged model again with save_pretrained.",
        )
    with _readable(merged):
        published, names = kind.from_pretrained(merged, dtype=config.dtype, output_loading_info=True)
    lines = [f"{name} is missing in {merged}." for name in names["missing_keys"]]
    lines += [f"{name} in {merged} is not a weight of this model class." for name in names["unexpected_keys"]]
    lines += [
        f"{name} in {merged} is a weight file that the model does not use, so it was not checked. Remove it."
        for name in _unused_files(merged)
    ]
    with _readable(base):
        lines += [
            f"The configuration of {merged} has {name}={value!r}, and that of {base} has {of_base!r}, so the model computes "
            "something else. Save the merged model again with save_pretrained."
            for name, value, of_base in config_differences(config, AutoConfig.from_pretrained(base))
        ]
    found = published.state_dict()
    differing: list[str] = [*found]
    for precision in dict.fromkeys([config.dtype, torch.float32, torch.bfloat16, torch.float16]):
        for keeps_adapter in (True, False):
            before, after, rows = _merged_again(kind, published, base, adapter, dtype=precision, keeps_adapter=keeps_adapter)
            if rows is not None:
                return [*lines, rows]
            if other := _of_one_alone(found, after, merged=merged, base=base):
                return [*lines, *other]
            still = [name for name, value in found.items() if not _is_equal(value, after[name], before.get(name))]
            differing = min(differing, still, key=len)
            if not differing:
                return lines
    lines.append(
        f"{len(differing)} of {len(found)} tensors in {merged} differ from {base} with the adapter in {adapter} merged into "
        f"it, such as {differing[0]}. Merge again from the saved adapter, and change nothing afterwards."
    )
    return lines


def _of_one_alone(found: dict[str, Tensor], after: dict[str, Tensor], *, merged: Path, base: str) -> list[str]:
    """Return a line for tensors that only the merged model has, and one for those that only the base has, such as layers."""
    only_merged, only_base = sorted(found.keys() - after.keys()), sorted(after.keys() - found.keys())
    lines = []
    if only_merged:
        lines.append(f"{len(only_merged)} tensors in {merged} are not in {base}, such as {only_merged[0]}.")
    if only_base:
        lines.append(
            f"{len(only_base)} tensors of {base} are missing in {merged}, such as {only_base[0]}. If a part of {base} was "
            "trained, such as its first layers, save that part with save_pretrained before the training, and give its "
            "folder as --base."
        )
    return lines


def _merged_again(
    kind: Any, published: Any, base: str, adapter: Path, *, dtype: torch.dtype, keeps_adapter: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], str | None]:
    """Return the tensors of the base in a precision and of the merge, or a line that says why embeddings differ in size.

    If the base is in half precision, PEFT keeps the adapter in float32 by default.
    """
    from peft import PeftModel

    with _readable(base):
        # The merged head may have a different number of classes: then it comes from the adapter, or is found to differ.
        model = kind.from_pretrained(base, dtype=dtype, num_labels=published.config.num_labels, ignore_mismatched_sizes=True)
    table, rows = published.get_input_embeddings(), model.get_input_embeddings()
    if table is not None and rows is not None and table.weight.shape != rows.weight.shape:
        number, of_base = table.weight.shape[0], rows.weight.shape[0]
        if table.weight.shape[1:] != rows.weight.shape[1:]:
            raise Refusal(
                "another-base",
                f"{base} has a different size than the merged model. Give the model that the adapter was trained on.",
            )
        if tuple(table.weight.shape) not in _shapes_in(adapter):
            line = (
                f"The merged model has embeddings of {number:,} tokens, but {base} has {of_base:,}, and the adapter has no "
                "embeddings. So tokens were added or removed after the merge, and their values cannot be checked. Publish "
                "the model as it was merged."
            )
            return {}, {}, line
        model.resize_token_embeddings(number, mean_resizing=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        adapted = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=keeps_adapter)
    except (RuntimeError, KeyError, ValueError) as error:
        raise Refusal(
            "adapter-does-not-fit",
            f"The adapter in {adapter} does not fit {base}. Give the model on which it was trained as --base.",
        ) from error
    return before, adapted.merge_and_unload().state_dict(), None


@contextlib.contextmanager
def _readable(source: str | Path) -> Iterator[None]:
    """Turn an error of the block into a refusal that names the model that could not be read."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, ImportError) as error:
        said = str(error).strip().split("\n")[0]
        raise Refusal(
            "no-such-model", f"The model {source} cannot be loaded ({said}). Give its folder or hub id."
        ) from error


def _shapes_in(adapter: Path) -> set[tuple[int, ...]]:
    shapes: set[tuple[int, ...]] = set()
    for path in adapter.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - this is no dict
    return shapes


def _unused_files(folder: Path) -> list[str]:
    """Return the weight files of a folder that Transformers does not read because other files come first."""
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            used = {name}
            if name.endswith(".json"):
                used |= {*json.loads((folder / name).read_text("utf-8"))["weight_map"].values()}
            return [file for file in weight_files(folder) if file not in used]
    return []


def _is_equal(found: Tensor, expected: Tensor, before: Tensor | None) -> bool:
    """Return whether a tensor equals the result of the merge with the tensor `before`, up to rounding."""
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    # A head that comes from the adapter was a different tensor before, perhaps with a different shape.
    base = expected if before is None or before.shape != expected.shape else before
    # The merge may have been made in half precision and saved in float32.
    spacing = max(torch.finfo(value.dtype).eps for value in (found, expected))
    found, expected, base = (value.to(found.dtype).double() for value in (found, expected, base))
    off, change = found - expected, expected - base
    if not change.any():  # the adapter does not change it
        return bool((off == 0).all())
    if spacing > _HALF:
        most = _FEW + _OF_CHANGE * min(1.0, float(_size(change) / _size(expected)))
        if int((off != 0).sum()) > max(_FEWEST, most * off.numel()):
            return False
    sizes = _size(base) + _size(expected)
    is_near = bool((off.abs() <= _ROUNDINGS * spacing * (expected.abs() + base.abs() + change.abs().max())).all())
    is_rounding = bool(_size(off) <= _TOGETHER * spacing * sizes)
    # Rounding is nearly independent of the change, so its share of the product falls with the number of values.
    rounding = spacing * sizes * _size(change) / found.numel() ** 0.5
    is_merged_once = bool((off * change).sum().abs() <= _NEARLY_ONCE * change.square().sum() + _BY_CHANCE * rounding)
    return is_near and is_rounding and is_merged_once


def _size(values: Tensor) -> Tensor:
    """Return the norm of float64 numbers; `sum` adds up their squares pairwise, which rounds little."""
    return values.square().sum().sqrt()
