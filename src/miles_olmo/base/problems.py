"""Several faults in one report, each with its place in a file.

A problem is one line, place, code, what, why, fix:

    run.toml:12:5: E003 unknown key 'tempreature'; [rollout] has no such key; set 'temperature'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_olmo.base.errors import MilesError

_BOLD, _RED, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def one_line(text: str) -> str:
    """The text with line breaks and control characters escaped: values come from files."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault at one place."""

    file: str
    """As the user wrote it, or relative to the working directory."""
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""
    code: str
    """A key of `miles_olmo.base.codes.CODES`."""
    what: str
    """What is wrong, naming the key or file and its value."""
    why: str = ""
    """Why it cannot work."""
    fix: str = ""
    """What to set instead."""

    def render(self, *, color: bool = False) -> str:
        """One line: place, code, and the three clauses."""
        place = f"{self.file}:{self.line}:{self.column}"
        parts = (self.what, self.why, self.fix)
        clauses = one_line("; ".join(part.rstrip(".;") for part in parts if part))
        if color:
            return f"{_BOLD}{place}:{_RESET} {_RED}{self.code}{_RESET} {clauses}"
        return f"{place}: {self.code} {clauses}"

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
        }


class ProblemReport(MilesError):
    """All problems that were found, in the order of their places; at least one."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.code, first.what, why=first.why, fix=first.fix)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return self.report()

    def __reduce__(self):
        return (type(self), (self.problems,))

    def report(self, *, color: bool = False) -> str:
        """One line per problem, a count, and how to learn more."""
        count = len(self.problems)
        lines = [problem.render(color=color) for problem in self.problems]
        codes = {problem.code for problem in self.problems}
        summary = "1 problem" if count == 1 else f"{count} problems"
        code = next(iter(codes)) if len(codes) == 1 else "CODE"
        lines.append(f"{summary}; more: miles explain {code}")
        return "\n".join(lines)

    def as_json_list(self) -> list[dict[str, Any]]:
        return [problem.as_json() for problem in self.problems]
