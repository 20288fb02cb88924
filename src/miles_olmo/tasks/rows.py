"""Rows of a JSONL data set, in the form that open-instruct's data sets have.

    {"messages": [{"role": "user", "content": "rev 1234="}], "ground_truth": "4321", "dataset": "exact_match"}

`dataset` names the verifier, without regard to case. A list of one name with a list of one ground truth
means the same; several verifiers per row are refused. A trailing assistant message is dropped: it is a
reference answer, and the policy has to find its own. Other columns are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import InputError
from miles_olmo.base.problems import Problem, ProblemReport
from miles_olmo.base.suggest import closest
from miles_olmo.tasks.chat import Message

COLUMNS = ("messages", "ground_truth", "dataset")
MAX_REPORTED = 20
"""Bad lines in one report; more are only counted."""


class DataErrors(ProblemReport, InputError):
    """Lines of a data file that cannot be used."""


@dataclass(frozen=True, slots=True)
class Row:
    """One data row."""

    line: int
    """Line number in the file, from 1."""
    messages: tuple[Message, ...]
    """The conversation up to the answer; at least one message."""
    ground_truth: str
    """What the verifier compares the answer with."""
    verifier: str
    """Lower-case name of the verifier."""


class RowFault(Exception):
    """Why one line cannot be used: code and the three clauses."""

    def __init__(self, code: str, what: str, why: str, fix: str) -> None:
        super().__init__(code, what, why, fix)
        self.code, self.what, self.why, self.fix = code, what, why, fix

    def at(self, file: str, line: int) -> Problem:
        return Problem(file, line, 1, self.code, self.what, self.why, self.fix)


def read_rows(path: Path, *, shown_as: str | None = None) -> tuple[list[Row], list[Problem]]:
    """All rows of a file and a problem for each line that is not one; blank lines are skipped.

    Args:
        path: The JSONL file.
        shown_as: Its name in problems; `path` when None.

    Raises:
        InputError: E124, the file cannot be opened.
    """
    file = shown_as or str(path)
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, raw in _lines(path, file):
        try:
            rows.append(parse_row(raw, number))
        except RowFault as fault:
            problems.append(fault.at(file, number))
    return rows, problems


def limit_problems(problems: list[Problem], file: str) -> list[Problem]:
    """The first `MAX_REPORTED` problems of a file, the last of them saying how many more there are."""
    if len(problems) <= MAX_REPORTED:
        return problems
    rest = problems[MAX_REPORTED - 1 :]
    last = rest[0]
    summary = Problem(
        file, last.line, 1, last.code, f"{len(rest)} more lines cannot be used", last.what, last.fix
    )
    return [*problems[: MAX_REPORTED - 1], summary]


def parse_row(raw: bytes, line: int) -> Row:
    """One line of the file.

    Raises:
        RowFault: E128 not a JSON object; E129 a column is missing; E130 a column has another form.
    """
    value = _parse_object(raw)
    missing = [column for column in COLUMNS if column not in value]
    if missing:
        near = closest(missing[0], (key for key in value if key not in COLUMNS))
        raise RowFault(
            "E129",
            f"the row has no {_quoted(missing)}",
            "every row needs messages, ground_truth and dataset",
            f"rename '{near}' to '{missing[0]}'" if near else f"add {_quoted(missing)}",
        )
    verifiers = _texts(value["dataset"], "dataset")
    truths = _texts(value["ground_truth"], "ground_truth")
    if len(verifiers) != len(truths):
        raise RowFault(
            "E130",
            f"dataset has {len(verifiers)} entries and ground_truth {len(truths)}",
            "each verifier needs a ground truth of its own",
            "give both lists the same length",
        )
    if len(verifiers) != 1:
        raise RowFault(
            "E130",
            f"the row names {len(verifiers)} verifiers",
            "a row is scored by exactly one",
            "keep one entry in dataset and one in ground_truth",
        )
    return Row(line, _messages(value["messages"]), truths[0], verifiers[0].lower())


def _lines(path: Path, file: str) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise InputError(
            "E124",
            f"cannot read {file}",
            why=error.strerror or str(error),
            fix="name a readable JSONL file",
        ) from error


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RowFault(
            "E128",
            "the line is not JSON",
            str(error),
            "write one JSON object per line",
        ) from error
    if not isinstance(value, dict):
        raise RowFault(
            "E128",
            f"the line is a JSON {type(value).__name__}, not an object",
            "a row has named columns",
            "write one JSON object per line",
        )
    return value


def _texts(value: Any, column: str) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise RowFault(
            "E130",
            f"{column} is neither a string nor a list of strings",
            "verifiers compare text",
            f"write {column} as a string",
        )
    return texts


def _messages(value: Any) -> tuple[Message, ...]:
    good = isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
    if not good:
        raise RowFault(
            "E130",
            "messages is not a list of {role, content} objects with string values",
            "the chat template needs a role and a content for each turn",
            'write [{"role": "user", "content": "..."}]',
        )
    messages = [Message(message["role"], message["content"]) for message in value]
    if messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise RowFault(
            "E130",
            "messages holds no prompt",
            "there is nothing to answer",
            "add a user message",
        )
    return tuple(messages)


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
