"""Receipts: what happened in a run, in append-only files that show when they were touched.

One file per writer (`receipts/<writer>.jsonl`), one line per event, in canonical JSON (RFC 8785):

    {"at": "2026-01-31T10:00:00.000Z", "body": {...}, "id": "<sha256>", "prev": "<sha256>",
     "schema": "miles-olmo/receipt/v1", "seq": 3, "type": "job-started", "writer": "launcher"}

`id` is the sha256 of the line without `id`; `prev` is the `id` of the line before (64 zeros in the
first). An edited, dropped or moved line therefore breaks the chain. Two limits, stated plainly: a
chain cut at its end looks like a shorter chain, and whoever may write the file can forge all of it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from miles_olmo.base.canonical import canonical_json, digest
from miles_olmo.base.errors import LaunchError, MilesError

RECEIPT_SCHEMA = "miles-olmo/receipt/v1"
GENESIS = "0" * 64

ProblemKind = Literal["missing", "unreadable", "torn", "edited", "dropped", "reordered"]


@dataclass(frozen=True, slots=True)
class ChainProblem:
    """Why a receipt file cannot be trusted from some line on."""

    kind: ProblemKind
    """missing file; unreadable (a directory, no permission); torn last line (a crash inside a write); edited, dropped or reordered lines."""
    path: str
    line: int
    """1-based line of the file; 0 for the file as a whole."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Chain:
    """The events of one receipt file, in file order, and what is wrong with it."""

    events: tuple[dict[str, Any], ...]
    """Every line that parses, the doubtful ones too."""
    problems: tuple[ChainProblem, ...]

    @property
    def is_intact(self) -> bool:
        """No problem but, at most, a torn last line, which the next append repairs."""
        return all(problem.kind == "torn" for problem in self.problems)


@dataclass(slots=True)
class _Tail:
    """Where a verified file ended when this process last saw it."""

    inode: int
    size: int
    modified_ns: int
    seq: int
    id: str


class ReceiptLog:
    """Appends events to one receipt file; safe between threads' and processes' appends.

    Every append takes an exclusive lock, writes one line with O_APPEND and returns after fsync.
    It costs the same however long the file is: the file is verified when it is first seen and
    when somebody else has changed it.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self.path = path
        self.writer = writer
        self._tail: _Tail | None = None

    def append(self, type: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Add one event and return it as written.

        Args:
            type: What happened, such as "job-started".
            body: JSON values; see `json_safe` for values that may be NaN or a path.

        Raises:
            LaunchError: E530 the chain is broken (nothing is written); E531 the disk refuses.
            rfc8785.CanonicalizationError: `body` is no JSON (NaN, integers from 2**53, ...).
        """
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            tail = self._verified_tail(descriptor)
            event = {
                "schema": RECEIPT_SCHEMA,
                "seq": tail.seq + 1,
                "prev": tail.id,
                "at": utc_now(),
                "writer": self.writer,
                "type": type,
                "body": dict(body),
            }
            event["id"] = digest(event)
            self._write(descriptor, canonical_json(event) + b"\n", tail.size)
            self._remember(descriptor, event["seq"], event["id"])
            return event
        finally:
            os.close(descriptor)

    def append_failure(self, error: BaseException) -> dict[str, Any]:
        """The `job-failed` event that a job writes before it exits with an error."""
        return self.append("job-failed", failure_body(error))

    def _verified_tail(self, descriptor: int) -> _Tail:
        state, tail = os.fstat(descriptor), self._tail
        if tail and (state.st_ino, state.st_size, state.st_mtime_ns) == (
            tail.inode,
            tail.size,
            tail.modified_ns,
        ):
            return tail
        chain = read_chain(self.path)
        broken = [problem for problem in chain.problems if problem.kind != "torn"]
        if broken:
            raise LaunchError(
                "E530",
                f"receipts {broken[0]}",
                why="a receipt file is append-only, so this one was changed by something else",
                fix="keep the file as evidence and continue under a new run id",
                path=str(self.path),
                problems=[str(problem) for problem in broken],
            )
        if chain.problems:  # a torn last line was never acknowledged: drop it
            os.ftruncate(descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        last = chain.events[-1] if chain.events else {"seq": 0, "id": GENESIS}
        self._remember(descriptor, last["seq"], last["id"])
        assert self._tail is not None
        return self._tail

    def _write(self, descriptor: int, line: bytes, good_size: int) -> None:
        try:
            rest = line
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, good_size)
            self._tail = None
            raise self._unwritable(error) from error

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> LaunchError:
        return LaunchError(
            "E531",
            f"cannot write the receipt {self.path}: {error.strerror}",
            why="a run without receipts cannot be trusted or resumed",
            fix="free space on this disk or make the file writable, then resume the run",
            path=str(self.path),
        )

    def _remember(self, descriptor: int, seq: int, id: str) -> None:
        state = os.fstat(descriptor)
        self._tail = _Tail(state.st_ino, state.st_size, state.st_mtime_ns, seq, id)


def read_chain(path: Path) -> Chain:
    """Read and verify one receipt file; never raises for what is in it."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Chain((), (ChainProblem("missing", str(path), 0, "no such receipt file"),))
    except OSError as error:
        text = f"cannot be read: {error.strerror or error}"
        return Chain((), (ChainProblem("unreadable", str(path), 0, text),))
    *lines, torn = raw.split(b"\n")
    problems: list[ChainProblem] = []
    events: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        event = _parse(line)
        if event is None or event["id"] != digest({k: v for k, v in event.items() if k != "id"}):
            problems.append(ChainProblem("edited", str(path), number, "the line was edited"))
        if event is not None:
            events.append((number, event))
    problems += _link_problems(path, events, {p.line for p in problems})
    if torn:
        text = "the last line is incomplete (a crash inside a write)"
        problems.append(ChainProblem("torn", str(path), len(lines) + 1, text))
    problems.sort(key=lambda problem: problem.line)
    return Chain(tuple(event for _, event in events), tuple(problems))


def _parse(line: bytes) -> dict[str, Any] | None:
    """The event of one line, or None when its bytes are not a canonical receipt."""
    try:
        event = json.loads(line, parse_int=_integer)
        is_receipt = (
            canonical_json(event) == line
            and event["schema"] == RECEIPT_SCHEMA
            and isinstance(event["seq"], int)
            and all(isinstance(event[key], str) for key in ("id", "prev", "at", "type", "writer"))
            and isinstance(event["body"], dict)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event if is_receipt else None


def _integer(text: str) -> int | float:
    """Canonical JSON writes the float 1e16 like an integer; integers from 2**53 are not allowed."""
    return int(text) if abs(int(text)) < 2**53 else float(text)


def _link_problems(
    path: Path, events: Sequence[tuple[int, dict[str, Any]]], edited: set[int]
) -> list[ChainProblem]:
    """Breaks between neighbours: a gap in `seq` is a drop, or a move when the number is elsewhere."""
    present = {event["seq"] for _, event in events}
    problems = []
    seq, prev, previous_line = 0, GENESIS, 0
    for number, event in events:
        skipped = [n for n in range(seq + 1, event["seq"]) if n not in present]
        unreadable = edited & set(range(previous_line + 1, number))
        if event["seq"] <= seq or (event["seq"] > seq + 1 and not skipped and not unreadable):
            text = f"receipt {event['seq']} stands where receipt {seq + 1} belongs"
            problems.append(ChainProblem("reordered", str(path), number, text))
        elif len(skipped) > len(unreadable):
            text = f"receipts {skipped[0]} to {skipped[-1]} are missing before this line"
            problems.append(ChainProblem("dropped", str(path), number, text))
        elif event["prev"] != prev and not unreadable and not ({number, previous_line} & edited):
            text = "the line was rewritten: the next line names another id"
            problems.append(ChainProblem("edited", str(path), max(previous_line, 1), text))
        previous_line = number
        if event["seq"] > seq:
            seq, prev = event["seq"], event["id"]
    return problems


def merge_receipts(directory: Path) -> Chain:
    """All receipts of a run in order of time; ties keep each writer's own order.

    Args:
        directory: `RunDirectory.receipts`.
    """
    if not directory.is_dir():
        return Chain((), (ChainProblem("missing", str(directory), 0, "no such directory"),))
    chains = [read_chain(path) for path in sorted(directory.glob("*.jsonl"))]
    events = [event for chain in chains for event in chain.events]
    events.sort(key=lambda event: (event["at"], event["writer"], event["seq"]))
    return Chain(tuple(events), tuple(p for chain in chains for p in chain.problems))


def failure_body(error: BaseException) -> dict[str, Any]:
    """An exception as a receipt body: `MilesError.as_json()`, or the same shape with code ""."""
    if isinstance(error, MilesError):
        return json_safe(error.as_json())
    what = f"{type(error).__name__}: {error}"
    return {"code": "", "what": what, "why": "", "fix": "", "details": {}}


def json_safe(value: Any) -> Any:
    """`value` with what canonical JSON cannot hold (NaN, big integers, paths) as text."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def utc_now() -> str:
    """The time in UTC, ISO 8601 with milliseconds and Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
