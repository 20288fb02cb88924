"""Where each key of a TOML document stands: tomli reads values and forgets their places.

The scanner runs only on text that tomli has accepted, so it may trust the grammar and needs no errors of its
own. Every key path that tomli produces gets the line and column of the key (or array element) that made it;
a table gets the place of its header.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import tomli

KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t]*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_STRING = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}|'
    r"'''[\s\S]*?'{3,5}|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'[^'\n]*'"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text the user wrote."""

    file: str
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""


class Positions:
    """The place of every key path of a document."""

    def __init__(self, file: str, places: Mapping[KeyPath, Place]) -> None:
        self.file = file
        self._places = dict(places)

    def where(self, path: KeyPath) -> Place:
        """The place of a key, else of the nearest table around it, else the document's start."""
        for length in range(len(path), 0, -1):
            place = self._places.get(path[:length])
            if place is not None:
                return place
        return Place(self.file, 1, 1)

    def __contains__(self, path: object) -> bool:
        return path in self._places

    def with_places(self, places: Mapping[KeyPath, Place]) -> Positions:
        """These positions, with those of some paths replaced."""
        return Positions(self.file, {**self._places, **places})

    def renamed(self, old: KeyPath, new: KeyPath) -> Positions:
        """These positions, with everything below one path also known below another."""
        below = {
            (*new, *path[len(old) :]): place
            for path, place in self._places.items()
            if path[: len(old)] == old
        }
        return self.with_places(below)


def find_positions(text: str, file: str) -> Positions:
    """Positions of a document that tomli accepts.

    Args:
        text: The document.
        file: Its name in reports.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return Positions(
        file,
        {path: Place(file, *scanner.line_and_column(at)) for path, at in scanner.offsets.items()},
    )


class _Scanner:
    """One pass over a valid document, recording the offset of every key."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.offsets: dict[KeyPath, int] = {}
        self._array_lengths: dict[KeyPath, int] = {}
        self._line_starts = [0] + [match.end() for match in re.finditer("\n", text)]

    def line_and_column(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def document(self) -> None:
        at, table = 0, ()
        while (at := self._skip(at, _BLANK_LINES)) < len(self.text):
            if self.text[at] == "[":
                table, at = self._header(at)
            else:
                at = self._key_value(at, table)

    def _header(self, at: int) -> tuple[KeyPath, int]:
        is_array = self.text.startswith("[[", at)
        parts, at = self._dotted_key(at + 1 + is_array)
        names = [name for name, _ in parts]
        for length in range(1, len(names)):
            self._record(self._resolve(names[:length]), parts[length - 1][1])
        if is_array:
            array = (*self._resolve(names[:-1]), names[-1])
            index = self._array_lengths.get(array, 0)
            self._array_lengths[array] = index + 1
            self._record(array, parts[-1][1])
            table: KeyPath = (*array, index)
        else:
            table = self._resolve(names)
        self._record(table, parts[-1][1])
        return table, at + 1 + is_array

    def _resolve(self, names: list[str]) -> KeyPath:
        """`[a.b]` below `[[a]]` means the last element of a."""
        path: KeyPath = ()
        for name in names:
            path = (*path, name)
            if path in self._array_lengths:
                path = (*path, self._array_lengths[path] - 1)
        return path

    def _key_value(self, at: int, table: KeyPath) -> int:
        parts, at = self._dotted_key(at)
        path = table
        for name, offset in parts:
            path = (*path, name)
            self._record(path, offset)
        return self._value(self._skip(at + 1, _BLANK), path)

    def _dotted_key(self, at: int) -> tuple[list[tuple[str, int]], int]:
        """The parts of a key with their offsets, and the offset of what follows it."""
        parts: list[tuple[str, int]] = []
        while True:
            at = self._skip(at, _BLANK)
            quoted = self.text[at] in "\"'"
            match = (_STRING if quoted else _BARE_KEY).match(self.text, at)
            assert match is not None, "tomli accepted a key that this scanner does not know"
            name = tomli.loads(f"k={match[0]}")["k"] if quoted else match[0]
            parts.append((name, at))
            at = self._skip(match.end(), _BLANK)
            if self.text[at : at + 1] != ".":
                return parts, at
            at += 1

    def _value(self, at: int, path: KeyPath) -> int:
        first = self.text[at]
        if first == "[":
            return self._array(at, path)
        if first == "{":
            return self._inline_table(at, path)
        match = (_STRING if first in "\"'" else _SCALAR).match(self.text, at)
        assert match is not None, "tomli accepted a value that this scanner does not know"
        return match.end()

    def _array(self, at: int, path: KeyPath) -> int:
        at, index = self._skip(at + 1, _BLANK_LINES), 0
        while self.text[at] != "]":
            element = (*path, index)
            self._record(element, at)
            at = self._comma(self._value(at, element))
            index += 1
        return at + 1

    def _inline_table(self, at: int, path: KeyPath) -> int:
        at = self._skip(at + 1, _BLANK_LINES)
        while self.text[at] != "}":
            at = self._comma(self._key_value(at, path))
        return at + 1

    def _comma(self, at: int) -> int:
        at = self._skip(at, _BLANK_LINES)
        return self._skip(at + 1, _BLANK_LINES) if self.text[at] == "," else at

    def _skip(self, at: int, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, at)
        assert match is not None
        return match.end()

    def _record(self, path: KeyPath, offset: int) -> None:
        self.offsets.setdefault(path, offset)
