"""The user's own folder of states, for what has to stay on this machine and must not be in an output folder."""

import os
from pathlib import Path


def states_folder() -> Path:
    """Return the folder, by XDG_STATE_HOME if that is set."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "doppler_hf"
