"""The user's own folder of states, for what has to stay on this machine and must not be in an output folder."""

import contextlib
import os
from pathlib import Path
from typing import Final

from doppler_hf.privacy.ledger.file import make_folder

KEPT_FOR: Final = 182 * 24 * 3600.0  # seconds, of what nobody has used since: half a year


def states_folder() -> Path:
    """Return the folder, by XDG_STATE_HOME if that is set."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "doppler_hf"


def make_states_folder() -> Path:
    """Return the folder after making it, if it is not there. Others cannot see the names of what is in it.

    Raises:
        OSError: If it cannot be made.
    """
    folder = states_folder()
    make_folder(folder, mode=0o700)
    with contextlib.suppress(OSError):  # Perhaps it is another user's, or somebody else has made it for all to see.
        folder.chmod(0o700)
    return folder
