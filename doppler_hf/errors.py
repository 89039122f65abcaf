"""The errors of this package. Each has a code for its reason, so that programs need not read its message."""

import copyreg
from typing import Any, Final

# The address of the published documentation, such as "https://example.org/doppler_hf/docs". It is None as long as nothing is
# published.
DOCUMENTATION: Final[str | None] = None


def page(name: str, section: str = "") -> str:
    """Return where a reader finds a page of the documentation, for a message: its address, or its file in the repository.

    Args:
        name: The page within `docs`, such as "guides/own-loss".
        section: The anchor of a heading, if the message is about one.
    """
    anchor = f"#{section}" if section else ""
    if DOCUMENTATION is not None:
        return f"{DOCUMENTATION}/{name}.html{anchor}"
    return f"docs/{name}.md{anchor} in the repository"


class CodedError(Exception):
    """An error with a code.

    Attributes:
        code: Names the reason, such as "repeated-rows", and stays the same when the words of the message change.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        # A traceback shows it below the message, where a reader finds it to look it up in the documentation.
        self.add_note(f"Error code: {code}")

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors picklable, so that processes can exchange them, whatever arguments a subclass's `__init__` takes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class Refusal(CodedError, ValueError):
    """The run cannot be made as requested. No ε was spent.

    Example:
        >>> try:
        ...     raise Refusal("repeated-rows", "train_dataset contains the same row more than once.")
        ... except ValueError as error:
        ...     print(error.code)
        repeated-rows
    """


class TypeRefusal(Refusal, TypeError):
    """A class has a definition that a private run cannot use, or is called with an argument that it does not have."""


class Failure(CodedError, RuntimeError):
    """A training run, or a part of it, cannot continue. The ε that it has spent stays counted."""


NO_KTO: Final = (
    "KTO has no private trainer: its loss compares each answer with an estimate over the whole batch, so no "
    "record has a loss of its own. Use DopplerDPOTrainer on pairs of answers, or DopplerSFTTrainer on the good answers."
)


class NoTrainerError(CodedError, ImportError):
    """A trainer of TRL has no private form."""
