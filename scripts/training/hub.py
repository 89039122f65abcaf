"""What is wrong with a name on the hub or a folder, in one line, with the argument that takes another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from doppler_hf.errors import Refusal


@contextmanager
def hub_or_folder(source: str, flag: str) -> Iterator[None]:
    """Turn the failure of a download, or of a folder that lacks its files, into one line that says what to do.

    `datasets`, `huggingface_hub` and `transformers` each raise their own subclass of `OSError` there. `source` is what the
    block loads, and `flag` the argument that takes a local folder instead.
    """
    if Path(source).is_absolute() and not Path(source).exists():
        raise Refusal(
            "no-such-source", f"{flag} must be an existing folder or a name on the hub, got {source!r}. Check its path."
        )
    try:
        yield
    except OSError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise Refusal(
            "source-not-loaded",
            f"Cannot load {source!r} ({reason}). Without network access give a local folder with {flag}.",
        ) from error
