"""Read a manifest: TOML text to a `Manifest`, or every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from miles_olmo.base.errors import UsageError
from miles_olmo.base.problems import Problem
from miles_olmo.manifest.fields import dotted
from miles_olmo.manifest.models import Manifest
from miles_olmo.manifest.positions import KeyPath, Place, Positions, find_positions
from miles_olmo.manifest.reports import (
    ManifestErrors,
    describe_errors,
    meant_keys,
    rename_misspelt_sections,
    sort_problems,
)
from miles_olmo.manifest.secrets import environment_secrets

_MAX_EXACT = 2**53 - 1
"""Largest integer that canonical JSON can carry."""


@dataclass(frozen=True)
class Reading:
    """What could be read of a manifest, and what is wrong with it."""

    manifest: Manifest | None
    """None when a key without a default is missing or wrong. With problems, wrong keys are left out."""
    positions: Positions
    problems: tuple[Problem, ...]
    wrong: tuple[KeyPath, ...]
    """Known keys that were left out; checks that depend on them mean nothing."""


Fill = Callable[[dict[str, Any], Positions], list[Problem]]
"""Completes a parsed manifest in place from files that it names; returns what is wrong with these."""


def read_manifest(
    path: Path, *, overrides: Sequence[str] = (), fill: Fill | None = None
) -> tuple[Manifest, Positions]:
    """Read and validate a manifest; what goes together is checked in `miles_olmo.plan.checks`.

    Args:
        path: The TOML file.
        overrides: Assignments that replace keys, e.g. `"train.steps=20"`; values are TOML.
        fill: Completes the manifest before its types are checked.

    Raises:
        ManifestErrors: Everything that is wrong, ordered by place.
        UsageError: E602, an override is not an assignment; E612, two set one key.
    """
    reading = read_leniently(path, overrides=overrides, fill=fill)
    if reading.problems:
        raise ManifestErrors(reading.problems)
    assert reading.manifest is not None
    return reading.manifest, reading.positions


def read_leniently(
    path: Path, *, overrides: Sequence[str] = (), fill: Fill | None = None
) -> Reading:
    """Like `read_manifest`, but what is readable is returned beside the problems.

    Raises:
        ManifestErrors: E001 or E002, when nothing can be read.
        UsageError: E602, an override is not an assignment; E612, two set one key.
    """
    file = str(path)
    document, positions = _parse(_read_text(path), file)
    changed: set[tuple[str, ...]] = set()
    for number, override in enumerate(overrides, start=1):
        change = _parse_override(override)
        changed |= _keys_set_once(change, changed)
        _merge(document, change)
        place = Place("--set", number, 1)
        positions = positions.with_places({key: place for key, _ in _leaves(change)})
    problems, positions = rename_misspelt_sections(document, positions)
    problems += _inexact_integers(document, positions)
    problems += _secret_values(document, positions)
    unfilled = fill(document, positions) if fill is not None else []
    problems += unfilled
    wrong: list[KeyPath] = []
    manifest = None
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        if unfilled:  # a shape that could not be read is not one that should have been written
            errors = [entry for entry in errors if entry["loc"] != ("model", "shape")]
        problems += describe_errors(errors, document, positions)
        manifest = _without(document, [entry["loc"] for entry in errors])
        wrong = [entry["loc"] for entry in errors if entry["type"] != "extra_forbidden"]
        wrong += meant_keys(errors)
    return Reading(manifest, positions, tuple(sort_problems(problems, file)), tuple(wrong))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        what, why = f"cannot read the manifest {path}", error.strerror or str(error)
        fix = "name a TOML file"
        near = _similar_file(path)
        if near is not None:
            fix = f"did you mean '{near}'?"
    except UnicodeDecodeError as error:
        what, why = f"{path} is not UTF-8 text", f"byte {error.start} cannot be decoded"
        fix = "save it as UTF-8"
    raise ManifestErrors([Problem(str(path), 1, 1, "E002", what, why, fix)])


def _similar_file(path: Path) -> Path | None:
    from miles_olmo.base.suggest import closest

    if path.exists() or not path.parent.is_dir():
        return None
    near = closest(path.name, (entry.name for entry in path.parent.glob("*.toml")))
    return path.with_name(near) if near is not None else None


def _parse(text: str, file: str) -> tuple[dict[str, Any], Positions]:
    try:
        return tomli.loads(text), find_positions(text, file)
    except tomli.TOMLDecodeError as error:
        line, column, message = error.lineno, error.colno, error.msg
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        line, column, message = 1, 1, str(error)
    fix = "correct the text at this place"
    raise ManifestErrors([Problem(file, line, column, "E001", "not valid TOML", message, fix)])


def _parse_override(text: str) -> dict[str, Any]:
    try:
        change = tomli.loads(text)
    except (ValueError, RecursionError) as error:
        change, reason = {}, str(error)
    else:
        reason = "it assigns nothing"
    if not change:
        name = text.split("=", 1)[0].strip()
        raise UsageError(
            "E602",
            f"cannot use the override of '{name}'",
            why=reason,
            fix="write KEY=VALUE with a TOML value, such as train.steps=20 or name='\"other\"'",
        )
    return change


def _keys_set_once(change: dict[str, Any], changed: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The keys of one override, none of which another has set; values are not repeated, they may
    be secret."""
    keys = {tuple(part for part in path if isinstance(part, str)) for path, _ in _leaves(change)}
    for key in sorted(keys):
        for earlier in changed:
            length = min(len(key), len(earlier))
            if key[:length] == earlier[:length]:
                raise UsageError(
                    "E612",
                    f"--set gives {dotted(key)} twice",
                    why="only one of the values can hold",
                    fix="leave one of them out",
                    key=dotted(key),
                )
    return keys


def _merge(document: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        present = document.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            _merge(present, value)
        else:
            document[key] = value


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is not a container, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _inexact_integers(document: dict[str, Any], positions: Positions) -> Iterator[Problem]:
    """Integers that the plan's canonical JSON cannot carry exactly."""
    for path, value in _leaves(document):
        if isinstance(value, int) and abs(value) > _MAX_EXACT:
            place = positions.where(path)
            yield Problem(
                place.file,
                place.line,
                place.column,
                "E007",
                f"{dotted(path)} is an integer of more than 53 bits",
                "JSON readers cannot carry it exactly",
                f"set a value below {2**53}",
            )


def _secret_values(document: dict[str, Any], positions: Positions) -> Iterator[Problem]:
    """Strings that hold the value of a secret of this environment."""
    secrets = environment_secrets()
    for path, value in _leaves(document):
        for name, secret in secrets.items():
            if isinstance(value, str) and secret in value:
                place = positions.where(path)
                yield Problem(
                    place.file,
                    place.line,
                    place.column,
                    "E008",
                    f"{dotted(path)} holds the value of the environment variable {name}",
                    "a manifest is copied into plans and receipts, where secrets must not be",
                    "remove it and pass the secret through the environment",
                )


def _without(document: dict[str, Any], wrong: Sequence[KeyPath]) -> Manifest | None:
    """The manifest with its wrong keys left to their defaults, or None when they have none."""
    for path in wrong:
        _remove(document, tuple(part for part in path if isinstance(part, str)))
    try:
        return Manifest.model_validate(document)
    except ValidationError:
        return None


def _remove(document: Any, path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        document = document.get(part) if isinstance(document, dict) else None
    if isinstance(document, dict):
        document.pop(path[-1], None)
