"""One grammar for filters, in recipes, flags and messages: presets, designs, coefficients, and `auto`, which a run chooses.

first-order-v1    butterworth:order=2,cutoff=0.1    b=0.1,0.1;a=1,-0.8    auto
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from doppler_hf.errors import Refusal, page
from doppler_hf.filters.design import DESIGNS, PAPER_FILTERS
from doppler_hf.filters.low_pass_filter import LowPassFilter

AUTO: Final = "auto"  # chosen by a run, so that no fixed filter belongs to it


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return ' (did you mean …?)' with the nearest known word, or '' if the word is known or none is near."""
    near = [] if word in known else difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def parse_filter(text: str) -> LowPassFilter:
    """Return the filter of a name; `LowPassFilter.parse` is this function.

    Args:
        text: A key of `PAPER_FILTERS`; a design as ``butterworth:order=2,cutoff=0.1``; or ``b=0.1,0.1;a=1,-0.8``.

    Returns:
        The filter, with ``LowPassFilter.parse(str(filter)) == filter``; one of `PAPER_FILTERS` if it has equal coefficients.

    Raises:
        ValueError: If the text is none of these, the filter is not valid, or a run chooses its coefficients.
    """
    compact = re.sub(r"\s", "", text)
    if compact in PAPER_FILTERS:
        return PAPER_FILTERS[compact]
    if compact == AUTO:
        raise Refusal(
            "not-a-fixed-filter",
            f"{text!r} is not a fixed filter: its coefficients come from a training run. Give a preset, a design or "
            "coefficients here.",
        )
    low_pass_filter = _read_coefficients(text) if compact.startswith("b=") else _designed(text, compact)
    # A preset's name is shorter than its coefficients, and says where they are from.
    return next((preset for preset in PAPER_FILTERS.values() if preset == low_pass_filter), low_pass_filter)


LowPassFilter.parse = staticmethod(parse_filter)


def _designed(text: str, compact: str) -> LowPassFilter:
    word, _, listed = compact.partition(":")
    if word not in DESIGNS:
        raise _unreadable(text)
    design, keys = DESIGNS[word]
    pairs = [pair.partition("=") for pair in listed.split(",") if pair]
    given = [key for key, _, _ in pairs]
    if sorted(given) != sorted(keys):
        form = f"{word}:{','.join(f'{key}=...' for key in keys)}"
        found = ", ".join(repr(key) + did_you_mean(key, keys) for key in given) or "nothing"
        raise Refusal("filter-syntax", f"{text!r} must have the form {form!r}, got {found} after {word!r}.")
    return design(**numbers_of(pairs, keys, text=text))


def numbers_of(
    pairs: Iterable[tuple[str, str, str]], kinds: Mapping[str, type[int] | type[float]], *, text: str
) -> dict[str, Any]:
    """Return the numbers of ``key=number`` in parts, each of the kind that belongs to its key; `text` is their whole."""
    numbers = {}
    for key, _, value in pairs:
        try:
            numbers[key] = kinds[key](value)
        except ValueError:
            wanted = "a whole number" if kinds[key] is int else "a number"
            raise Refusal("filter-syntax", f"{key} must be {wanted}, got {value!r} in {text!r}.") from None
    return numbers


def _read_coefficients(text: str) -> LowPassFilter:
    match = re.fullmatch(r"b=([^;=]+)(?:;a=([^;=]+))?", re.sub(r"\s", "", text))
    try:
        if match is None:
            raise ValueError
        b, a = (tuple(map(float, numbers.split(","))) for numbers in match.groups(default="1"))
    except ValueError:
        raise _unreadable(text) from None
    return LowPassFilter(b=b, a=a)


def _unreadable(text: str) -> Refusal:
    near = did_you_mean(re.split("[:=]", text)[0], (*PAPER_FILTERS, *DESIGNS, AUTO))
    return Refusal(
        "no-such-filter",
        f"A filter must be one of {', '.join(PAPER_FILTERS)}, a design such as butterworth:order=2,cutoff=0.1, or "
        f"coefficients such as b=0.1,0.1;a=1,-0.8, got {text!r}{near}. All are in {page('method/filters')}.",
    )
