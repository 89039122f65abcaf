"""What a power failure would take away: contents, names and folders that were not synchronized since they changed."""

import os
import re
import stat
from pathlib import Path


class Disk:
    """Watches what is renamed, made and synchronized; `lost` is what is not yet on the disk for sure."""

    def __init__(self, monkeypatch):
        self.lost, self._synchronized = [], set()
        replace, mkdir, fsync = os.replace, os.mkdir, os.fsync

        def replaced(source, target):
            found = os.stat(source)
            if re.search(r"\.[0-9a-f]{8}$", str(source)) and (found.st_dev, found.st_ino) not in self._synchronized:
                self.lost.append(("content", Path(target)))
            replace(source, target)
            self.lost.append(("name", Path(target)))

        def made(path, *mode):
            mkdir(path, *mode)
            self.lost.append(("name", Path(path)))

        def synchronized(file):
            found = os.fstat(file)
            if stat.S_ISDIR(found.st_mode):
                self.lost = [
                    (kind, path)
                    for kind, path in self.lost
                    if kind == "content" or not os.path.samestat(os.stat(path.parent), found)
                ]
            else:
                self._synchronized.add((found.st_dev, found.st_ino))
            fsync(file)

        for name, function in (("replace", replaced), ("mkdir", made), ("fsync", synchronized)):
            monkeypatch.setattr(os, name, function)
