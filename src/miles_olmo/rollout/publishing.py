"""Bringing one engine to one policy version, and comparing what it holds with what was published.

Order on every engine (the contract of `core_state` and of vLLM): pause, start, update, finish,
reset prefix cache, verify version, resume. A sequence never continues on other weights because
`pause?mode=wait` lets all of them end first.
"""

from __future__ import annotations

import asyncio

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.registry import EngineEntry
from miles_olmo.rollout.transport import Transport, TransportFault
from miles_olmo.wire import protocol
from miles_olmo.wire.publication import Publication


async def pause(transport: Transport, entry: EngineEntry) -> None:
    """Stop sampling between two answers; keys and values are forgotten."""
    await transport.post(entry, f"{protocol.PAUSE}?mode=wait&clear_cache=true")


async def load(
    transport: Transport, entry: EngineEntry, publication: Publication, *, first: bool
) -> None:
    """Load every tensor of the publication into a paused engine.

    Args:
        first: The engine process has taken no publication yet, so its transfer is set up.

    Raises:
        EngineError: the engine refused it (E225), or reports another version afterwards (E252).
    """
    if first:
        await transport.post(entry, protocol.INIT_WEIGHT_TRANSFER, {"init_info": {}})
    await transport.post(entry, protocol.START_WEIGHT_UPDATE, {})
    await transport.post(entry, protocol.UPDATE_WEIGHTS, {"update_info": publication.update_info()})
    await transport.post(entry, protocol.FINISH_WEIGHT_UPDATE, {})
    _, version = await asyncio.gather(
        transport.post(entry, protocol.RESET_PREFIX_CACHE), served_version(transport, entry)
    )
    if version != publication.version:
        raise EngineError(
            "E252",
            f"{entry.name} reports version {version} after version {publication.version} was loaded",
            why="its answers would be taken for another policy's",
            fix="make sure that one trainer alone publishes to it",
        )


async def resume(transport: Transport, entry: EngineEntry) -> None:
    await transport.post(entry, protocol.RESUME)


async def served_version(transport: Transport, entry: EngineEntry) -> int | None:
    """The version the engine serves; None before the first."""
    return _field(entry, await transport.get(entry, protocol.WEIGHT_VERSION), "weight_version")


async def differences(
    transport: Transport, entry: EngineEntry, publication: Publication, seconds: float
) -> dict[str, list[str]]:
    """Tensor names that are missing, extra or different in the engine; empty when all agree."""
    answer = await transport.get(entry, protocol.WEIGHT_CHECKSUMS, seconds)
    held = _field(entry, answer, "checksums")
    if not isinstance(held, dict):
        raise _malformed(entry, "checksums")
    published = publication.checksums
    found = {
        "missing": sorted(published.keys() - held.keys()),
        "extra": sorted(held.keys() - published.keys()),
        "different": sorted(
            name for name in published.keys() & held.keys() if published[name] != held[name]
        ),
    }
    return {kind: names for kind, names in found.items() if names}


def failure(entry: EngineEntry, step: str, version: int, error: EngineError) -> EngineError:
    """One engine's fault as the publication's error."""
    return EngineError(
        error.code if error.code == "E252" else "E250",
        f"version {version} did not reach {entry.name}: {step} failed ({error.what})",
        why="engines of one fleet must serve the same version",
        fix="see the engine's log; engines go on with the version before",
        engine=entry.index,
        kind=error.kind if isinstance(error, TransportFault) else "refused",
    )


def _field(entry: EngineEntry, answer: object, name: str):
    if not isinstance(answer, dict) or name not in answer:
        raise _malformed(entry, name)
    return answer[name]


def _malformed(entry: EngineEntry, name: str) -> EngineError:
    return EngineError(
        "E230",
        f"{entry.name} at {entry.url}: the answer lacks {name}",
        why="this is not an engine of this run",
        fix="end the stray process and launch again",
    )
