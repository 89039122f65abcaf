"""The names of filters in recipes, flags and messages: presets, designs, coefficients, and `auto`, chosen by the run.

first-order-v1    butterworth:order=2,cutoff=0.1    b=0.1,0.1;a=1,-0.8    auto
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from doppler_hf.errors import Refusal, page
from doppler_hf.filters.design import DESIGNS, PAPER_FILTERS
from doppler_hf.filters.low_pass_filter import LowPassFilter

AUTO: Final = "auto"  # The run chooses the filter, so this name stands for no fixed filter.

_LIKE: Final = 0.6  # as in `difflib.get_close_matches`


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return ' (did you mean …?)' with the most similar known word, or '' if the word is known or none is similar.

    Of equally similar words it is the first.
    """
    matcher = difflib.SequenceMatcher(b=word.lower())

    def likeness(each: str) -> float:
        matcher.set_seq1(each)
        return matcher.ratio()

    best = max(known, key=likeness, default="")
    return f" (did you mean {best!r}?)" if word not in known and likeness(best) >= _LIKE else ""


def parse_filter(text: str) -> LowPassFilter:
    """Return the filter with this name; `LowPassFilter.parse` is this function.

    Args:
        text: A key of `PAPER_FILTERS`; a design as ``butterworth:order=2,cutoff=0.1``; or ``b=0.1,0.1;a=1,-0.8``.

    Returns:
        The filter, with ``LowPassFilter.parse(str(filter)) == filter``. If a filter of `PAPER_FILTERS` has the same
        coefficients, that filter is returned.

    Raises:
        ValueError: If the text has none of these forms, the filter is not valid, or the text is "auto".
    """
    compact = re.sub(r"\s", "", text)
    if compact in PAPER_FILTERS:
        return PAPER_FILTERS[compact]
    if compact == AUTO:
        raise Refusal(
            "not-a-fixed-filter",
            f"{text!r} has no fixed coefficients, because a training run chooses the filter. Give a preset, a design or "
            "coefficients here.",
        )
    low_pass_filter = _read_coefficients(text) if compact.startswith("b=") else _designed(text, compact)
    # The name of a preset is shorter than its coefficients, and says where they come from.
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
        raise Refusal("filter-syntax", f"Expected {form!r}; got {found} after {word!r} in {text!r}.")
    return design(**numbers_of(pairs, keys, text=text))


def numbers_of(
    pairs: Iterable[tuple[str, str, str]], kinds: Mapping[str, type[int] | type[float]], *, text: str
) -> dict[str, Any]:
    """Return key → number for parsed pairs ``key=number``, each of the kind of its key; `text` is for the error message."""
    numbers = {}
    for key, _, value in pairs:
        try:
            numbers[key] = kinds[key](value)
        except ValueError:
            wanted = "a whole number" if kinds[key] is int else "a number"
            raise Refusal("filter-syntax", f"Expected {wanted} as {key} in {text!r}; got {value!r}.") from None
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
        f"There is no filter {text!r}{near}. Give a preset ({', '.join(PAPER_FILTERS)}), a design ({', '.join(DESIGNS)}) "
        "such as butterworth:order=2,cutoff=0.1, or coefficients such as b=0.1,0.1;a=1,-0.8. See "
        f"{page('method/filters')}.",
    )
