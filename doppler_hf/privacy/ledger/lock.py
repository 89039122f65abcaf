"""One writer to a ledger at a time: a lock that the operating system takes back when its process dies."""

from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

# The host uploads no file whose name begins with "_".
LOCK_NAME: Final = "_privacy_ledger.lock"


class WriterLock:
    """Keeps other runs, of this process or another, from writing to the ledger of a folder. It can be entered repeatedly."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._lock = FileLock(self._folder / LOCK_NAME, thread_local=False)

    def __enter__(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{self._folder} is the folder of another private run, which is still going on. Use another output_dir, or "
                "wait until that run has ended."
            ) from None

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
