"""The secret of a run's rounds, kept for whoever resumes it on this machine.

A run that is resumed within a round goes on with the turns that were drawn. Otherwise its units could take part once more,
which would cost as much as a further round. Turns are by the numbers of rows: of other rows, or in another order, one that
has had its turn could have another, so that a new round begins.

Privacy: who has the secret knows when a unit takes part, so it lies where the data lie, and not where results do: in the
user's own folder of states (XDG_STATE_HOME), readable by the user alone, and no part of any checkpoint. It is removed once
its run has made its last step.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_LENGTH = 32


class RoundSecret(NamedTuple):
    """Where a process keeps the secret of a run."""

    run_id: str
    rank: int
    world_size: int  # with another number the units are divided otherwise
    data: str  # a digest of the rows' lengths, units and labels, which is as private as they are

    @property
    def path(self) -> Path:
        """The file."""
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return Path(home) / "doppler_hf" / f"{self.run_id}-{self.rank}-of-{self.world_size}-{self.data}"

    def keep(self, secret: bytes) -> None:
        """Write the secret, if there is a place for it. Without it a resumed run begins a new round."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(secret)

    def kept(self) -> bytes | None:
        """Return the secret; None if it is not here."""
        with contextlib.suppress(OSError):
            if len(secret := self.path.read_bytes()) == _LENGTH:
                return secret
        return None

    def is_of_other_data(self) -> bool:
        """Return whether the run's secret is here, but was drawn for other rows."""
        return not self.path.exists() and any(self._of_any_data())

    def forget(self) -> None:
        """Remove the secret."""
        with contextlib.suppress(OSError):
            for path in self._of_any_data():
                path.unlink(missing_ok=True)

    def _of_any_data(self) -> list[Path]:
        return [*self.path.parent.glob(self._replace(data="*").path.name)]
