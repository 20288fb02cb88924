"""The shape of one error code."""

from __future__ import annotations

from dataclasses import dataclass

# Exit codes of the command line, the same for every backend.
EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_MANIFEST = 3
EXIT_STALE = 4
EXIT_REMOTE = 5
EXIT_RUN = 6
EXIT_VERIFY = 7
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Code:
    """One error code and its explanation."""

    code: str
    """Stable name, "E" and three digits; never reused for another fault."""
    title: str
    """The fault in a few words."""
    cause: str
    """Why it happens, in one or two sentences."""
    example: str
    """A manifest snippet or command that shows it."""
    fix: str
    """What to change."""
    exit_code: int
    """Exit code of the command that ends with it."""
