"""Where a run's directory is, also after it was renamed under the processes that work in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_F_GETPATH = 50
"""macOS: the path of an open file."""


class Place:
    """A directory by itself instead of by its path. `close` it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        os.close(self._descriptor)

    def is_at(self, path: Path) -> bool:
        """Whether this very directory has that path now."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def path(self) -> Path | None:
        """Where the directory is now; None when it was removed, or nobody can tell."""
        try:
            found = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        except OSError:
            try:
                raw = fcntl.fcntl(self._descriptor, _F_GETPATH, bytes(1024))
            except OSError:
                return None
            found = Path(os.fsdecode(raw.rstrip(b"\0")))
        return found if self.is_at(found) else None
