"""Engines announce themselves by files, so that a client finds them wherever they bound to.

    <run>/engines/engine-0.json     {index, url, pid, attempt, started_at}

An engine writes its entry once it listens; a restarted engine overwrites it. An entry that
differs from the one seen before therefore means: another process, without weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from miles_olmo.base.errors import EngineError
from miles_olmo.base.files import write_json

_NAME = re.compile(r"engine-(\d+)\.json$")


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where one engine listens."""

    index: int
    """Position in the fleet, from 0."""
    url: str
    """Base address, e.g. "http://127.0.0.1:41234"."""
    pid: int
    """Process that serves it."""
    attempt: int
    """Grows with every start of this engine."""
    started_at: str
    """UTC, ISO 8601."""

    @property
    def name(self) -> str:
        return f"engine-{self.index}"


def register(directory: Path, entry: EngineEntry) -> Path:
    """Write the entry's file atomically; returns its path."""
    path = directory / f"{entry.name}.json"
    write_json(path, asdict(entry))
    return path


def clear_registry(directory: Path) -> None:
    """Forget the engines of an earlier attempt, before this attempt starts its own."""
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        if _NAME.match(path.name):
            path.unlink(missing_ok=True)


def read_registry(directory: Path) -> dict[int, EngineEntry]:
    """All entries by index, ascending; empty while the directory does not exist.

    Raises:
        EngineError: E227, a file is not a complete entry.
    """
    if not directory.is_dir():
        return {}
    paths = {
        int(match[1]): path for path in directory.iterdir() if (match := _NAME.match(path.name))
    }
    return {index: _read(paths[index], index) for index in sorted(paths)}


def _read(path: Path, index: int) -> EngineEntry:
    try:
        content = json.loads(path.read_bytes())
        entry = EngineEntry(**content)
        for field in fields(EngineEntry):
            expected = {"int": int, "str": str}[str(field.type)]
            if type(getattr(entry, field.name)) is not expected:
                raise TypeError(f"{field.name} is not {field.type}")
        if entry.index != index or not entry.url.startswith(("http://", "https://")):
            raise ValueError("index or url do not fit")
    except (ValueError, TypeError) as error:
        raise EngineError(
            "E227",
            f"{path} is not a registry entry ({error})",
            why="the client cannot tell where the engine listens",
            fix="launch the run again",
        ) from error
    return entry
