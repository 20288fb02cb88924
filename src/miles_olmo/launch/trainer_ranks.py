"""Which of several trainer processes is to blame when they end together.

One that fails takes the others along: their connections to it break (E300) or their waits run out
(E301). These accounts are about somebody else, so they count only when nobody has a better one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_olmo.launch.children import JobProcess

LAST_WORDS_SECONDS = 5.0
"""How long the other trainer processes may take to end by themselves after the first has."""

_LOST_CONNECTION = "E300"
_WAITED_IN_VAIN = "E301"


def first_cause(
    ended: Sequence[JobProcess], reports: Mapping[str, Mapping[str, Any] | None]
) -> JobProcess:
    """The process whose end explains the others'.

    In this order: an error of its own; an end without a word (killed, out of memory); a wait in
    vain, which names who did not come; a lost connection. Among equals the lowest rank.

    Args:
        ended: Trainer processes that failed, in the order of ranks; at least one.
        reports: The `job-failed` body of each, by name; None when it left none.
    """

    def order(job: JobProcess) -> int:
        report = reports[job.command.name]
        if report is None:
            return 1
        return {_WAITED_IN_VAIN: 2, _LOST_CONNECTION: 3}.get(report["code"], 0)

    return min(ended, key=order)
