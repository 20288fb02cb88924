"""Appending JSON lines to a file that others read meanwhile: `metrics.jsonl`, `expert_load.jsonl`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LineLog:
    """One write per line, under a lock, so that readers see whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._drop_torn_line()

    def append_line(self, value: Mapping[str, Any]) -> None:
        """Add one JSON object; NaN and infinity are no JSON (ValueError)."""
        line = json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_torn_line(self) -> None:
        """Cut what a killed attempt left of its last line, so that the next row starts a line."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        raw = self.path.read_bytes()
        if raw and not raw.endswith(b"\n"):
            os.ftruncate(self._descriptor, raw.rfind(b"\n") + 1)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
