"""Keeping engines usable: asking one, finding out what a fault meant, bringing it back.

A restarted engine has no weights and answers 503. It is noticed by its registry entry, gets the
current version, answers one probe through every check, and only then serves groups again.
"""

from __future__ import annotations

import asyncio
import time

from miles_olmo.base.errors import EngineError
from miles_olmo.manifest.models import Engines
from miles_olmo.rollout import publishing
from miles_olmo.rollout.answers import AnswerCheck, Choice, GroupRequest, PolicyShape, is_aborted
from miles_olmo.rollout.fleet import Fleet, Member
from miles_olmo.rollout.transport import Transport, TransportFault
from miles_olmo.wire.publication import Publication

COUNTERS = (
    "groups",  # groups answered
    "group_failures",  # groups given up after all attempts
    "answers_refused",  # answers that failed a check
    "requests",  # generation requests sent
    "retries",  # of them, sent again after a fault
    "timeouts",  # attempts that ran into request_seconds
    "connection_faults",  # attempts refused or cut
    "server_faults",  # attempts answered 5xx
    "aborted",  # attempts whose samples the engine gave up
    "engines_lost",  # engines found down
    "engines_excluded",  # engines left out of a publication because they were down
    "engines_returned",  # engines brought to the current version outside a publication
    "publications",  # versions that reached the fleet
    "publication_failures",  # versions that did not
)
_FAULT_COUNTER = {
    "timeout": "timeouts",
    "connection": "connection_faults",
    "server": "server_faults",
    "aborted": "aborted",
}
POLL_SECONDS = 0.1
PROBE_GROUP = -1


class Upkeep:
    """The engines of one run, with counts of all that went wrong."""

    def __init__(
        self,
        fleet: Fleet,
        transport: Transport,
        settings: Engines,
        shape: PolicyShape,
        model_name: str,
    ) -> None:
        self.fleet = fleet
        self.transport = transport
        self.settings = settings
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._shape = shape
        self._model_name = model_name
        self._bringing_back = asyncio.Lock()

    async def ask(self, member: Member, request: GroupRequest, version: int) -> list[Choice]:
        entry = member.entry
        member.in_flight += request.num_samples
        try:
            answer = await self.transport.complete(entry, request.body(self._model_name))
        finally:
            member.in_flight -= request.num_samples
        if is_aborted(answer):
            raise TransportFault("aborted", entry, "gave up samples of the group")
        source = f"{entry.name} at {entry.url}, group {request.group_id}"
        try:
            return AnswerCheck(request, self._shape, version, source).choices(answer)
        except EngineError:
            self.counters["answers_refused"] += 1
            raise

    async def after_fault(self, member: Member, fault: TransportFault, version: int) -> None:
        """Find out whether the engine is down, or alive without the current weights."""
        self.counters[_FAULT_COUNTER[fault.kind]] += 1
        if fault.kind == "aborted" or member.state != "ready":
            return
        if await self.transport.health_fault(member.entry) is not None:
            self.mark_down(member, fault)
        elif fault.kind == "server":
            try:
                served = await publishing.served_version(self.transport, member.entry)
            except TransportFault as second:
                self.mark_down(member, second)
            else:
                if served != version and member.state == "ready":
                    member.state = "stale"

    def mark_down(self, member: Member, fault: TransportFault) -> None:
        if member.state != "down":  # other groups may have found out at the same time
            member.state, member.fault = "down", fault.what
            self.counters["engines_lost"] += 1

    async def usable_engine(
        self, request: GroupRequest, tried: set[int], publication: Publication
    ) -> Member:
        """An engine that serves the current version; waits for a restart if one may come."""
        deadline = time.monotonic() + self.settings.startup_seconds
        while True:
            if len(self.fleet.in_state("ready")) < self.settings.count:
                await self._bring_back(publication)
            member = self.fleet.pick(request.group_id, tried)
            if member is not None:
                return member
            if self.settings.max_restarts == 0 or time.monotonic() >= deadline:
                self.counters["group_failures"] += 1
                raise self.no_engine(f"group {request.group_id} cannot be sampled")
            await asyncio.sleep(POLL_SECONDS)

    async def wait_for_one(self, publication: Publication) -> None:
        """Wait until an engine is back and serves a version that reached nobody.

        Raises:
            EngineError: E224, none came back within startup_seconds.
        """
        deadline = time.monotonic() + self.settings.startup_seconds
        while not self.fleet.in_state("ready"):
            if time.monotonic() >= deadline:
                raise self.no_engine(f"version {publication.version} reached nobody")
            await self._bring_back(publication)
            await asyncio.sleep(POLL_SECONDS)

    async def _bring_back(self, publication: Publication) -> None:
        """Bring restarted engines to the current version before they are used."""
        if self._bringing_back.locked() and self.fleet.in_state("ready"):
            return  # another group does it; there are engines to go on with
        async with self._bringing_back:
            self.fleet.refresh()
            for member in self.fleet.in_state("stale"):
                try:
                    await self._bring_to(member, publication)
                except TransportFault as fault:
                    self.mark_down(member, fault)
                else:
                    self.counters["engines_returned"] += 1

    async def _bring_to(self, member: Member, publication: Publication) -> None:
        entry = member.entry
        try:
            await publishing.pause(self.transport, entry)
            await publishing.load(self.transport, entry, publication, first=not member.probed)
            await publishing.resume(self.transport, entry)
        except TransportFault:
            raise
        except EngineError as error:
            raise publishing.failure(entry, "update", publication.version, error) from error
        await self.probe(member, publication.version)
        member.state = "ready"

    async def probe(self, member: Member, version: int) -> None:
        """One short answer through every check, once per engine process."""
        if member.probed:
            return
        prompt = tuple(min(token, self._shape.vocab_size - 1) for token in (1, 2))
        request = GroupRequest(PROBE_GROUP, prompt, 1, 2, 1.0, 0, (), ignore_stop=True)
        await self.ask(member, request, version)
        member.probed = True

    def no_engine(self, what: str) -> EngineError:
        return EngineError(
            "E224",
            f"{what}, no engine is left: {self.fleet.describe_down()}",
            why="engines are down and none came back in time",
            fix="read their logs; raise engines.max_restarts or engines.count",
        )
