"""The trainer's view of the rollout engines: ask for a group, publish a version, audit it.

A group is sampled whole by one engine, checked token by token (`answers`), and sampled again whole
when an attempt fails. Nothing is dropped or repeated without being counted in `counters`.

    async with FleetClient(directory, token, settings, shape=shape, decode=decode) as client:
        await client.wait_ready()
        await client.publish(publication)
        await client.audit(publication)
        trajectories = await client.generate_group(request)
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from miles_olmo.base.errors import EngineError
from miles_olmo.manifest.models import Engines
from miles_olmo.rollout.answers import Choice, Decode, GroupRequest, PolicyShape, trajectory
from miles_olmo.rollout.barrier import Barrier
from miles_olmo.rollout.fleet import Fleet, Gate
from miles_olmo.rollout.transport import Transport, TransportFault
from miles_olmo.rollout.upkeep import POLL_SECONDS, Upkeep
from miles_olmo.wire.publication import Publication
from miles_olmo.wire.trajectory import Trajectory

__all__ = ["FleetClient", "GroupRequest", "PolicyShape"]

MAX_BACKOFF_SECONDS = 2.0


class FleetClient:
    """All engines of one run. Use inside one event loop.

    Args:
        registry_directory: `<run>/engines`, where engines register.
        token: The run's token.
        settings: The manifest's [engines].
        shape: What answers must look like.
        decode: Text of response tokens, for verifiers and people.
        model_name: Name the engines serve the policy under.
    """

    def __init__(
        self,
        registry_directory: Path,
        token: str,
        settings: Engines,
        *,
        shape: PolicyShape,
        decode: Decode,
        model_name: str = "policy",
    ) -> None:
        self._settings = settings
        self._decode = decode
        self._fleet = Fleet(registry_directory, settings.count)
        self._transport = Transport(token, settings)
        self._upkeep = Upkeep(self._fleet, self._transport, settings, shape, model_name)
        self._barrier = Barrier(self._upkeep)
        self._gate = Gate()
        self._publication: Publication | None = None

    async def __aenter__(self) -> FleetClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    @property
    def counters(self) -> dict[str, int]:
        """How often what happened since the start; see `upkeep.COUNTERS`."""
        return self._upkeep.counters

    @property
    def version(self) -> int | None:
        """The version published last; None before the first."""
        return self._publication.version if self._publication else None

    async def wait_ready(self) -> None:
        """Wait until every engine registered and answers its health check.

        Raises:
            EngineError: E220, engines missing after startup_seconds, each with the reason; E221,
                a registered address is not an engine; E225, an engine of another run.
        """
        deadline = time.monotonic() + self._settings.startup_seconds
        while missing := await self._missing():
            if time.monotonic() >= deadline:
                raise EngineError(
                    "E220",
                    f"{len(missing)} of {self._settings.count} engines are missing after "
                    f"{self._settings.startup_seconds:g} s: {'; '.join(missing.values())}",
                    why="the run needs all of them to start",
                    fix="read their logs; raise engines.startup_seconds if they are only slow",
                    engines=sorted(missing),
                )
            await asyncio.sleep(POLL_SECONDS)
        for member in list(self._fleet.members.values()):
            answer = await self._transport.get(member.entry, "/version")
            if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
                raise EngineError(
                    "E221",
                    f"{member.entry.name} at {member.entry.url} reports no version",
                    why="another program listens there",
                    fix="end the stray process and launch again",
                )

    async def health(self) -> dict[int, str]:
        """Per engine "ok" or why it does not answer; not delayed by generation."""
        self._fleet.refresh()
        members = dict(self._fleet.members)  # a restart may replace one meanwhile
        faults = await asyncio.gather(
            *(self._transport.health_fault(member.entry) for member in members.values())
        )
        answers = {
            i: fault.what if fault else "ok" for i, fault in zip(members, faults, strict=True)
        }
        answers.update((i, f"engine-{i} has not registered") for i in self._fleet.missing())
        return answers

    async def _missing(self) -> dict[int, str]:
        return {index: fault for index, fault in (await self.health()).items() if fault != "ok"}

    # Generation.

    async def generate_group(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Sample all answers to one prompt with the version published last, in sample order.

        Ends within (retries + 1) x (request_seconds + 2 x health_seconds) plus backoff, and
        startup_seconds more for each attempt that finds no engine while one may be restarted;
        time spent waiting for a free connection or a publication is not counted.

        Raises:
            EngineError: E226, nothing published; E222 or E223, every attempt failed; E224, no
                engine left; E225, refused; E230-E246, an answer failed a check.
        """
        async with self._gate.generation():
            if self._publication is None:
                raise EngineError(
                    "E226",
                    f"group {request.group_id} was asked for before anything was published",
                    why="engines have no weights",
                    fix="publish a version first",
                )
            version = self._publication.version
            choices = await self._attempt_until_answered(request, self._publication)
        self.counters["groups"] += 1
        return tuple(
            trajectory(request, index, choice, version, self._decode)
            for index, choice in enumerate(choices)
        )

    async def _attempt_until_answered(
        self, request: GroupRequest, publication: Publication
    ) -> list[Choice]:
        faults: list[TransportFault] = []
        tried: set[int] = set()
        while len(faults) <= self._settings.retries:
            member = await self._upkeep.usable_engine(request, tried, publication)
            self.counters["requests"] += 1
            self.counters["retries"] += bool(faults)
            try:
                return await self._upkeep.ask(member, request, publication.version)
            except TransportFault as fault:
                faults.append(fault)
                tried.add(member.entry.index)
                await self._upkeep.after_fault(member, fault, publication.version)
            if len(faults) <= self._settings.retries:
                await asyncio.sleep(min(0.05 * 4 ** (len(faults) - 1), MAX_BACKOFF_SECONDS))
        self.counters["group_failures"] += 1
        hung = all(fault.kind == "timeout" for fault in faults)
        raise EngineError(
            "E223" if hung else "E222",
            f"group {request.group_id} failed in {len(faults)} attempts: "
            + "; ".join(fault.what for fault in faults),
            why="a group is sampled whole or not at all",
            fix="read the engines' logs; raise engines.request_seconds or engines.retries if they "
            "are only slow",
            group_id=request.group_id,
        )

    # Publication.

    async def publish(self, publication: Publication) -> None:
        """Bring every engine to a version; a barrier: no sequence runs while it happens.

        An engine that is down is left out (and counted) if it may be restarted; it gets the
        version when it is back, and if all are down this waits for one, at most startup_seconds. Any other failure leaves the version before as the current one.

        Raises:
            EngineError: E250 or E252, an engine did not take it; E224, no engine left; E24x, an
                engine's first answer has unusable routes.
        """
        async with self._gate.publication():
            try:
                await self._barrier.publish(publication)
            except BaseException:
                self.counters["publication_failures"] += 1
                raise
            self._publication = publication
            self.counters["publications"] += 1

    async def audit(self, publication: Publication) -> None:
        """Compare the bytes every usable engine holds with the publication, tensor by tensor.

        Raises:
            EngineError: E251, listing missing, extra and different tensors per engine.
        """
        await self._barrier.audit(publication)

    async def differences(self, publication: Publication) -> dict[str, dict[str, list[str]]]:
        """Per usable engine the tensors it holds otherwise: "missing", "extra" or "different".

        Raises:
            EngineError: E224, no engine is usable.
        """
        return await self._barrier.differences(publication)
