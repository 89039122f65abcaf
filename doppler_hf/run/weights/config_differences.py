"""What differs between two configurations of Transformers such that equal weights would give other outputs."""

import re
from collections.abc import Iterator
from typing import Any, Final

# Fields of a configuration that change no output of the same weights, or belong to a new head or to added tokens.
_BESIDE_THE_OUTPUTS: Final = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label", "label2id",
    "num_labels", "pad_token_id", "problem_type", "quantization_config", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "vocab_size",
})  # fmt: skip
# Fields of training alone, such as dropout, which private runs do better without.
_OF_TRAINING: Final = re.compile("^_|drop|initializer|^output_|^mask_|gradient_checkpointing|loss")


def config_differences(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of each field on which outputs depend and in which two configurations differ."""
    return _differences(one.to_dict(), other.to_dict())


def _differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted((one.keys() | other.keys()) - _BESIDE_THE_OUTPUTS):
        first, second = one.get(name), other.get(name)
        if _OF_TRAINING.search(name):
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            yield from ((f"{name}.{inner}", *values) for inner, *values in _differences(first, second))
        elif first != second:
            yield name, first, second
