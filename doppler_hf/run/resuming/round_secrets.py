"""Keep the secret of a run's rounds, so that the run can be resumed on this machine.

In a round, random allocation deals out every record once. A run that is resumed within a round continues with the turns that
were drawn. Otherwise its units could take part once more, which would cost as much as a further round. Turns are assigned to
row numbers. With different rows, or with the same rows in another order, a unit that has had its turn could have another
turn. So a digest of the data is kept with the secret, and with different data a new round starts.

Privacy: who has the secret knows when a unit takes part, and the digest tells whether some rows are the training data. So
both are kept where the data are, and not where results are: in the user's own folder of states (XDG_STATE_HOME), readable by
the user alone, and not in any checkpoint.

The file is removed when its run has made the last step of its plan, when it has been resumed, or if it ends before its first
step. A run that was stopped early may continue, and a run that was killed may be resumed. Their files are removed by another
private run: after a month if the run's output folder no longer has its ledger, without which nothing can be resumed, and
otherwise after half a year. The month leaves time to move a folder. A folder that is missing here may exist on
another machine with the same folder of states, so only files of runs on this machine are removed after a month.
"""

import contextlib
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.ledger.ledger import ledger_files
from doppler_hf.run.states_folder import KEPT_FOR, make_states_folder, states_folder

_LENGTH: Final = 32
_KEPT_WITHOUT_LEDGER: Final = 30 * 24 * 3600.0  # seconds
_NAME: Final = re.compile(
    r"[0-9a-f]{16}-(?P<rank>\d+)-of-(?P<world_size>\d+)(?P<digest>-[0-9a-f]{8})?"
)  # Version 0.3 added a digest.


class RoundSecret(NamedTuple):
    """The place where a process keeps the secret of a run."""

    run_id: str
    rank: int
    world_size: int  # With a different number of processes, the units are divided differently.
    data: DataDigest  # The digest is as private as the data.

    @property
    def path(self) -> Path:
        """The path of the file."""
        return states_folder() / f"{self.run_id}-{self.rank}-of-{self.world_size}"

    def keep(self, secret: bytes, *, output_dir: str | Path) -> None:
        """Write the secret, if its folder can be written. Without it, a resumed run starts a new round.

        Args:
            secret: The secret.
            output_dir: The folder of the run's ledger.
        """
        with contextlib.suppress(OSError):
            make_states_folder()
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                place = {"machine": platform.node(), "output_dir": str(Path(output_dir).resolve())}
                json.dump({"secret": secret.hex(), "data": self.data.to_json(), **place}, file)
            self._remove_old_ones()

    def secret(self) -> bytes | None:
        """Return the secret, or None if it is not here or was drawn for different rows."""
        kept = self._kept()
        if kept is None or not kept[1].is_of_same_rows(self.data):
            return None
        return kept[0]

    def is_of_other_data(self) -> bool:
        """Return whether the run's secret is here, but was drawn for different rows."""
        kept = self._kept()
        return kept is not None and not kept[1].is_of_same_rows(self.data)

    def secret_for_other_world_size(self) -> Self | None:
        """Return the place of the run's secret for another number of processes, or None if there is no such file here."""
        with contextlib.suppress(OSError):
            for path in sorted(self.path.parent.glob(f"{self.run_id}-*-of-*")):
                found = _NAME.fullmatch(path.name)
                if found is not None and found["digest"] is None and int(found["world_size"]) != self.world_size:
                    return self._replace(rank=int(found["rank"]), world_size=int(found["world_size"]))
        return None

    def forget(self) -> None:
        """Remove the secrets of all processes of the run on this machine."""
        with contextlib.suppress(OSError):
            for path in self.path.parent.glob(f"{self.run_id}-*"):
                path.unlink(missing_ok=True)

    def _kept(self) -> tuple[bytes, DataDigest] | None:
        # The file may be missing or bad.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept: dict[str, Any] = json.loads(self.path.read_text("utf-8"))
            secret = bytes.fromhex(kept["secret"])
            if len(secret) == _LENGTH:
                return secret, DataDigest.from_json(kept["data"])
        return None

    def _remove_old_ones(self) -> None:
        """Remove the secrets of runs that cannot be resumed, or that nobody has resumed for half a year.

        Resuming a run without its secret starts a new round.
        """
        for path in self.path.parent.iterdir():
            with contextlib.suppress(OSError):
                age = time.time() - path.stat().st_mtime if _NAME.fullmatch(path.name) else 0.0
                if age > KEPT_FOR or (age > _KEPT_WITHOUT_LEDGER and _lacks_ledger(path)):
                    path.unlink()


def _lacks_ledger(path: Path) -> bool:
    """Return whether the folder in which a run of this machine saved has no ledger of this run; False if it is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text("utf-8"))
        run_id = path.name.partition("-")[0]
        if kept["machine"] == platform.node():
            return not any(run_id in ledger.read_text("utf-8") for ledger in ledger_files(kept["output_dir"]))
    return False
