"""The error tree: every fault a user can cause or meet is one of these, with a stable code.

A message has three clauses: what is wrong (key and value), why it cannot work, what to set instead.
Codes and their long explanations live in `miles_olmo.base.codes`; the exit code belongs to the code.
"""

from __future__ import annotations

from typing import Any


class MilesError(Exception):
    """A fault with a stable code.

    Args:
        code: A key of `miles_olmo.base.codes.CODES`, such as "E003".
        what: What is wrong, naming the key or file and its value.
        why: Why it cannot work.
        fix: What to set or do instead.
        details: JSON-safe facts for `--json` and receipts (sample ids, byte counts, ...).
    """

    def __init__(
        self, code: str, what: str, *, why: str = "", fix: str = "", **details: Any
    ) -> None:
        super().__init__(code, what, why, fix)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix
        self.details = details

    @property
    def exit_code(self) -> int:
        from miles_olmo.base.codes import CODES

        return CODES[self.code].exit_code

    def __str__(self) -> str:
        clauses = [clause.rstrip(".;") for clause in (self.what, self.why, self.fix) if clause]
        return f"{self.code}: " + "; ".join(clauses)

    def report(self, *, color: bool = False) -> str:
        """What a person reads; reports of several problems have a line for each."""
        return f"\x1b[31m{self.code}\x1b[0m{str(self)[len(self.code) :]}" if color else str(self)

    def as_json_list(self) -> list[dict[str, Any]]:
        """Every fault that this error stands for, usually one."""
        return [self.as_json()]

    def __reduce__(self):  # keeps keyword fields when an error crosses a process pool
        return (_rebuild, (type(self), self.code, self.what, self.why, self.fix, self.details))

    def as_json(self) -> dict[str, Any]:
        """The error as one JSON-safe object, the same in `--json` output and in receipts."""
        return {
            "code": self.code,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "details": self.details,
        }


def _rebuild(cls: type[MilesError], code: str, what: str, why: str, fix: str, details: dict):
    return cls(code, what, why=why, fix=fix, **details)


class UsageError(MilesError):
    """The command line or the environment cannot serve the request."""


class InputError(MilesError):
    """An input file is missing, unreadable, or not what the plan hashed."""


class PlanError(MilesError):
    """A plan file cannot be used: digest mismatch, stale, or made by other code."""


class EngineError(MilesError):
    """A rollout engine answered wrongly, too late, or not at all."""


class TrainingError(MilesError):
    """The trainer cannot take a step without breaking a rule (NaN, missing routes, ...)."""


class CheckpointError(MilesError):
    """A checkpoint is incomplete, incompatible, or could not be written."""


class VerificationError(MilesError):
    """A checked engine or checkpoint is not what it should be (E37x)."""


class LaunchError(MilesError):
    """A job could not be started or supervised."""
