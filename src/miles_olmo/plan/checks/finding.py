"""What a check finds: values that do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from miles_olmo.base.problems import Problem
from miles_olmo.manifest.models import Manifest
from miles_olmo.manifest.positions import KeyPath, Positions


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of one or more keys."""

    code: str
    keys: tuple[str, ...]
    """Dotted keys that it depends on; the report points at the first that the file has."""
    what: str
    why: str
    fix: str


Check = Callable[[Manifest], Iterable[Finding]]


def path_of(key: str) -> KeyPath:
    return tuple(key.split("."))


def is_involved(finding: Finding, wrong: Sequence[KeyPath]) -> bool:
    """Whether a finding depends on a key that could not be read."""
    return any(_overlap(path_of(key), path) for key in finding.keys for path in wrong)


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def locate(finding: Finding, positions: Positions) -> Problem:
    """The finding at its place in the manifest."""
    paths = [path_of(key) for key in finding.keys]
    written = next((path for path in paths if path in positions), paths[0])
    place = positions.where(written)
    return Problem(
        place.file, place.line, place.column, finding.code, finding.what, finding.why, finding.fix
    )
