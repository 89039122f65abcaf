"""Whether a method of a trainer is the user's own, or one of the libraries that a private run rests on."""

from typing import Final

_LIBRARIES: Final = ("doppler_hf", "transformers", "trl")


def overrides(trainer: type, method: str) -> bool:
    """Return whether a user's class defines this method of a class of trainers.

    Example:
        >>> from doppler_hf import DopplerTrainer
        >>> class Mine(DopplerTrainer):
        ...     def log(self, logs, start_time=None): ...
        >>> overrides(Mine, "log"), overrides(Mine, "train")
        (True, False)
    """
    owner = next(cls for cls in trainer.__mro__ if method in vars(cls))
    return owner.__module__.partition(".")[0] not in _LIBRARIES
