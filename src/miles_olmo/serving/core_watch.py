"""Whether vLLM's engine core still answers: its HTTP server calls itself healthy without asking it.

The core takes questions between two steps of the model. One that takes no time is always on its way;
how long it has not been answered is how long no step has ended.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol


class Core(Protocol):
    """The part of vLLM's engine client that is asked."""

    async def is_sleeping(self) -> bool: ...


class CoreWatch:
    """One question at a time. Use inside one event loop."""

    def __init__(self) -> None:
        self._question: asyncio.Task[Any] | None = None
        self._asked_at = 0.0

    def seconds_silent(self, core: Core) -> float:
        """How long the core has owed an answer; it is asked again when it owes none."""
        if self._question is None or self._question.done():
            if self._question is not None and not self._question.cancelled():
                self._question.exception()  # of a core that died: the server itself reports it
            self._question = asyncio.create_task(_ask(core))
            self._asked_at = time.monotonic()
        return time.monotonic() - self._asked_at


async def _ask(core: Core) -> bool:
    return await core.is_sleeping()
