"""Labels of texts: their public names, the prompt of each, and how many texts to sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from doppler_hf.errors import Refusal


def label_names(feature: Any, given: str | None) -> list[str]:
    """Return the names of all labels: those that are given, or the class names of the column.

    Privacy: the names become public. They are never collected from the rows, where a rare label would show that its only
    record is in the data.
    """
    own = getattr(feature, "names", None)
    names = own if given is None else [name.strip() for name in given.split(",")]
    if names is None:
        raise Refusal(
            "no-label-names",
            "The label column has no class names, and the names of the labels become public. Name all of them with "
            "--labels, for example --labels negative,positive.",
        )
    if own is not None and names != own:
        raise Refusal(
            "other-label-names", f"Expected the column's own labels, {','.join(own)}; got {given}. Leave --labels out."
        )
    for name in names:
        if not name or not name.isprintable() or names.count(name) > 1:
            raise Refusal(
                "bad-label-name",
                f"Expected different names of one line each; the label {name!r} is empty, repeated or has a line break. "
                "Change the name, since it is a line of the prompt.",
            )
    return list(names)


def label_reader(feature: Any, names: Sequence[str]) -> Callable[[Any], str]:
    """Return the function from a value of the label column to the name of the label.

    In a column of whole numbers, label k has the k-th name, as with class names, unless the names are numbers themselves.
    """
    is_whole = getattr(feature, "names", None) is not None or str(getattr(feature, "dtype", "")).startswith(("int", "uint"))
    by_number = is_whole and (hasattr(feature, "names") or not all(name.lstrip("-").isdecimal() for name in names))

    def name_of(value: Any) -> str:
        found = value is not None and (0 <= value < len(names) if by_number else str(value) in names)
        if not found:
            # Privacy: the label of a record is not shown.
            raise Refusal(
                "unknown-label",
                f"A row has a label that is not one of {', '.join(names)}. Name all labels with --labels, or leave rows "
                "with other labels out of the data.",
            )
        return names[value] if by_number else str(value)

    return name_of


def checked_text(text: Any) -> str:
    """Return the text of a row, or refuse what is none: a missing text would be trained as the word None."""
    if not isinstance(text, str):
        # Privacy: the row is not shown.
        raise Refusal(
            "text-not-a-string",
            f"Expected a text in every row; one has {type(text).__name__}. Leave such rows out of the data.",
        )
    return text


def prompt_text(label: str) -> str:
    """Return the prompt after which the model writes a text with this label."""
    return f"label: {label}\ntext:"


def prompt_of(label: str, tokenizer: Any, *, shorter_than: int) -> list[int]:
    """Return the tokens of a label's prompt."""
    tokens = list(tokenizer(prompt_text(label))["input_ids"])
    if len(tokens) >= shorter_than:
        raise Refusal(
            "prompt-too-long",
            f"The prompt of the label {label!r} has {len(tokens)} tokens, and a prompt with its text may have "
            f"{shorter_than}. No token of the text is left. Raise --max_seq_length.",
        )
    return tokens


def parse_proportions(names: Sequence[str], proportions: str | None) -> dict[str, float]:
    """Return the part of each label: equal parts, or those of a text such as negative=1,positive=3."""
    if proportions is None:
        return dict.fromkeys(names, 1.0)
    parts = dict.fromkeys(names, 0.0)
    for word in proportions.split(","):
        name, _, number = word.rpartition("=")
        if name.strip() not in parts:
            raise Refusal(
                "proportion-of-unknown-label",
                f"--proportions names the label {name.strip()!r}, and the labels are {', '.join(names)}. Name one of them.",
            )
        try:
            part = float(number)
        except ValueError:
            part = -1.0
        if not 0.0 <= part < float("inf"):
            raise Refusal(
                "bad-proportion", f"Expected a number of at least 0 for each label; got {word!r} in --proportions."
            )
        parts[name.strip()] = part
    return parts


def numbers_of_samples(total: int, parts: Mapping[str, float]) -> dict[str, int]:
    """Return how many texts to sample for each label: `total` in all, in the proportions of `parts`.

    Example:
        >>> numbers_of_samples(10, {"bad": 1.0, "good": 3.0})
        {'bad': 2, 'good': 8}
    """
    whole = sum(parts.values())
    if total < 1 or not whole > 0.0:
        raise Refusal("no-samples", "No texts are asked for. Give --num_samples of at least 1, and a label a part above 0.")
    # Largest remainders: the numbers add up to the total, and each is within one of its part.
    exact = {name: total * part / whole for name, part in parts.items()}
    numbers = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: numbers[name] - exact[name])[: total - sum(numbers.values())]:
        numbers[name] += 1
    return numbers
