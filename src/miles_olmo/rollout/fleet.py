"""Which engines there are, which of them may be used, and who may use them now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_olmo.rollout.registry import EngineEntry, read_registry

State = Literal["stale", "ready", "down"]


@dataclass(eq=False)
class Member:
    """One engine process, as the client sees it."""

    entry: EngineEntry
    """Where it listens; a restarted engine is a new member."""
    state: State = "stale"
    """stale: needs the current weights; ready: serves them; down: does not answer."""
    fault: str = ""
    """Why it is down."""
    in_flight: int = 0
    """Samples it was asked for and has not answered."""
    probed: bool = False
    """Its answer to a probe passed every check."""


class Fleet:
    """The members, kept in step with the registry."""

    def __init__(self, registry_directory: Path, count: int) -> None:
        self._directory = registry_directory
        self._count = count
        self.members: dict[int, Member] = {}

    def refresh(self) -> None:
        """Read the registry; an entry that changed is another process, without weights.

        Raises:
            EngineError: E227, an entry is not complete.
        """
        for index, entry in read_registry(self._directory).items():
            known = self.members.get(index)
            if index < self._count and (known is None or known.entry != entry):
                self.members[index] = Member(entry)

    def missing(self) -> list[int]:
        """Indices that never registered."""
        return [index for index in range(self._count) if index not in self.members]

    def in_state(self, state: State) -> list[Member]:
        return [member for _, member in sorted(self.members.items()) if member.state == state]

    def pick(self, group_id: int, tried: Collection[int]) -> Member | None:
        """The least loaded ready engine not yet tried; ties go round robin by group id.

        Which engine serves a group never changes its tokens: they depend on weights, prompt and
        seed alone.
        """
        ready = self.in_state("ready")
        fresh = [member for member in ready if member.entry.index not in tried] or ready
        return min(
            fresh,
            key=lambda member: (member.in_flight, (member.entry.index - group_id) % self._count),
            default=None,
        )

    def describe_down(self) -> str:
        """Every engine that cannot be used, with the reason."""
        reasons = [f"engine-{index} never registered" for index in self.missing()]
        reasons += [
            f"{member.entry.name} (pid {member.entry.pid}): {member.fault}"
            for member in self.in_state("down")
        ]
        return "; ".join(reasons) or "no reason known"


class Gate:
    """Many generations at a time, or one publication."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0
        self._one_publication = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def generation(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def publication(self) -> AsyncIterator[None]:
        """Waits for the generations inside to end; new ones wait for this to end."""
        async with self._one_publication:
            self._open.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._open.set()
