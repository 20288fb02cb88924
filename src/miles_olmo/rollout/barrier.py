"""Publication to the whole fleet as a barrier, and the audit of what engines hold.

Every engine does each step before any engine does the next, so no sequence runs while two versions
exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout import publishing
from miles_olmo.rollout.fleet import Member
from miles_olmo.rollout.transport import TransportFault
from miles_olmo.rollout.upkeep import Upkeep
from miles_olmo.wire.publication import Publication


class Barrier:
    """Steps that all engines take together."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        self._fleet = upkeep.fleet
        self._transport = upkeep.transport

    async def publish(self, publication: Publication) -> None:
        """See `FleetClient.publish`; nobody may be sampling."""
        version, transport = publication.version, self._transport
        members = await self._targets(version)
        for member in members:
            member.state = "stale"  # until all steps are done; a failure leaves it to _bring_back

        async def pause(member: Member) -> None:
            await publishing.pause(transport, member.entry)

        async def load(member: Member) -> None:
            await publishing.load(transport, member.entry, publication, first=not member.probed)

        async def resume(member: Member) -> None:
            await publishing.resume(transport, member.entry)

        try:
            members = await self._each(members, "pause", version, pause)
            members = await self._each(members, "update", version, load)
        except BaseException:
            # Back to the version before; the failure itself is what the caller must hear of.
            await asyncio.gather(*(resume(member) for member in members), return_exceptions=True)
            raise
        members = await self._each(members, "resume", version, resume)
        for member in members:
            await self._probe(member, version)
        if not self._fleet.in_state("ready"):
            await self._upkeep.wait_for_one(publication)

    async def _probe(self, member: Member, version: int) -> None:
        """A first answer that fails a check is an error; an engine that dies over it may come back."""
        try:
            await self._upkeep.probe(member, version)
        except TransportFault as fault:
            if not await self._may_be_excluded(member, fault):
                raise
            self._upkeep.counters["engines_excluded"] += 1
        else:
            member.state = "ready"

    async def _targets(self, version: int) -> list[Member]:
        """All engines that answer."""
        self._fleet.refresh()
        members = [member for _, member in sorted(self._fleet.members.items())]
        if self._fleet.missing():
            raise self._upkeep.no_engine(f"version {version} cannot reach the whole fleet")
        return await self._each(members, "health check", version, self._check_health)

    async def _check_health(self, member: Member) -> None:
        fault = await self._transport.health_fault(member.entry)
        if fault is not None:
            raise fault

    async def _each(
        self,
        members: Sequence[Member],
        step: str,
        version: int,
        function: Callable[[Member], Awaitable[None]],
    ) -> list[Member]:
        """One step on all engines at once; returns those that did it, none if all may be restarted."""
        results = await asyncio.gather(
            *(function(member) for member in members), return_exceptions=True
        )
        done: list[Member] = []
        for member, error in zip(members, results, strict=True):
            if error is None:
                done.append(member)
            elif not isinstance(error, EngineError):
                raise error
            elif await self._may_be_excluded(member, error):
                self._upkeep.counters["engines_excluded"] += 1
            else:
                raise publishing.failure(member.entry, step, version, error) from error
        return done

    async def _may_be_excluded(self, member: Member, error: EngineError) -> bool:
        """An engine that is down, not one that refuses; and only if it may be restarted."""
        if not isinstance(error, TransportFault):
            return False
        if await self._transport.health_fault(member.entry) is None:
            return False
        self._upkeep.mark_down(member, error)
        return self._upkeep.settings.max_restarts > 0

    async def differences(self, publication: Publication) -> dict[str, dict[str, list[str]]]:
        """See `FleetClient.differences`."""
        members = self._fleet.in_state("ready")
        if not members:
            raise self._upkeep.no_engine(f"version {publication.version} cannot be audited")
        seconds = self._upkeep.settings.request_seconds
        found = await asyncio.gather(
            *(
                publishing.differences(self._transport, member.entry, publication, seconds)
                for member in members
            )
        )
        return {m.entry.name: kinds for m, kinds in zip(members, found, strict=True) if kinds}

    async def audit(self, publication: Publication) -> None:
        """See `FleetClient.audit`."""
        wrong = await self.differences(publication)
        if wrong:
            lines = [
                f"{engine} {kind}: {', '.join(names)}"
                for engine, kinds in wrong.items()
                for kind, names in kinds.items()
            ]
            raise EngineError(
                "E251",
                f"version {publication.version} is not what engines hold: {'; '.join(lines)}",
                why="the engine would sample from another policy than is trained",
                fix="check names, shapes and dtypes of the family's publication",
                engines=wrong,
            )
