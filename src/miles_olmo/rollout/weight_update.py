"""The version an engine serves and the update that is announced to it: which tensors were named so far.

Both kinds of engine use this, so that they admit and refuse alike, with the same words.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import EngineError


@dataclass
class WeightUpdate:
    """What an open update has announced so far."""

    expected: frozenset[str]
    """Names of all tensors of the policy."""
    version: int | None = None
    names: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)

    def add(self, info: Any) -> None:
        """Take one `update_info`.

        Raises:
            EngineError: E209, it is malformed, or names a tensor twice or one the policy lacks.
        """
        names, paths, checksums, version = _update_fields(info)
        repeated = sorted(n for n, count in Counter(self.names + names).items() if count > 1)
        unknown = sorted(set(names) - self.expected)
        if repeated or unknown:
            raise _update_refused(
                f"{len(repeated)} tensors named twice ({_first(repeated)}), "
                f"{len(unknown)} unknown ({_first(unknown)})",
                repeated=repeated,
                unknown=unknown,
            )
        if self.version not in (None, version):
            raise _update_refused(f"parts of versions {self.version} and {version} in one update")
        self.version = version
        self.names += names
        self.paths += [path for path in paths if path not in self.paths]
        self.checksums.update(checksums)

    def check_complete(self) -> int:
        """The announced version.

        Raises:
            EngineError: E209, a tensor of the policy was not named.
        """
        missing = sorted(self.expected.difference(self.names))
        if missing or self.version is None:
            raise _update_refused(
                f"{len(missing)} of {len(self.expected)} tensors were not named ({_first(missing)})",
                missing=missing,
            )
        return self.version


class ServedVersion:
    """The version that an engine serves, and who may sample from it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.version: int | None = None
        """None before the first completed version."""
        self._update: WeightUpdate | None = None
        self._updating = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()

    async def _admit(self) -> None:
        """Let a request sample now; one that comes during a pause waits for its end.

        Raises:
            EngineError: E206, no version yet; E207, an update is open and nothing is paused.
        """
        while True:
            if not self._running.is_set():
                await self._running.wait()
            elif self.version is None:
                raise EngineError(
                    "E206",
                    "the engine has no weights yet",
                    why="no version was completed since it started",
                    fix="publish a version first",
                )
            elif self._update is not None:
                raise EngineError(
                    "E207",
                    "a weight update is in progress",
                    why="the engine is not paused, so the request cannot wait for it",
                    fix="send it again after /finish_weight_update",
                )
            else:
                return

    def _open_update(self) -> WeightUpdate:
        """Raises: EngineError: E208, there is none."""
        if self._update is None:
            raise EngineError(
                "E208",
                "no weight update is open",
                why="it was not started, was refused, or was given up by /resume",
                fix="call /start_weight_update first",
            )
        return self._update


def _update_fields(info: Any) -> tuple[list[str], list[str], dict[str, str], int]:
    if not isinstance(info, dict):
        raise _update_refused("update_info is not an object")
    for key in ("names", "dtype_names", "shapes", "paths"):
        if not isinstance(info.get(key), list):
            raise _update_refused(f"update_info.{key} is not a list")
    names, paths = info["names"], info["paths"]
    checksums, version = info.get("checksums"), info.get("weight_version")
    if not len(names) == len(info["dtype_names"]) == len(info["shapes"]):
        raise _update_refused("update_info.names, dtype_names and shapes differ in length")
    if not all(isinstance(text, str) for text in [*names, *paths]):
        raise _update_refused("update_info.names and paths are not all strings")
    if not isinstance(checksums, dict) or set(checksums) != set(names):
        raise _update_refused("update_info.checksums does not name the same tensors as names")
    if type(version) is not int or version < 0:
        raise _update_refused(f"update_info.weight_version = {version!r} is not a version")
    absent = [path for path in paths if not (Path(path).is_absolute() and Path(path).is_file())]
    if absent:
        raise _update_refused(f"{absent[0]} is not a file here")
    return names, paths, checksums, version


def _update_refused(what: str, **details: Any) -> EngineError:
    return EngineError(
        "E209",
        f"weight update refused: {what}",
        why="a version must name every tensor of the policy exactly once",
        fix="publish the version again; the engine still serves the one before",
        **details,
    )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + ("..." if len(names) > 3 else "") or "none"
