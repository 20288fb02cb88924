"""HTTP to the engines, with a time limit on everything and one name per kind of fault.

Generation has its own connections: a fleet busy with long answers still answers `/health`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import aiohttp

from miles_olmo.base.errors import EngineError
from miles_olmo.manifest.models import Engines
from miles_olmo.rollout.registry import EngineEntry
from miles_olmo.wire import protocol

MAX_GENERATIONS = 256
"""Generation requests in flight from one client; more wait here, outside their time limit."""

IDLE_SECONDS = 3.0
"""Idle connections are closed by us, before a server's own limit (vLLM: 5 s) closes them under us."""

FaultKind = Literal["timeout", "connection", "server", "aborted"]


class TransportFault(EngineError):
    """A fault of one attempt that another attempt may not meet."""

    def __init__(self, kind: FaultKind, entry: EngineEntry, what: str) -> None:
        code = "E223" if kind == "timeout" else "E222"
        super().__init__(
            code,
            f"{entry.name} at {entry.url}: {what}",
            why="the engine is gone, overloaded or broken",
            fix="read the engine's log",
        )
        self.kind = kind


class Transport:
    """Two pools of connections to all engines. Use inside one event loop; `close` it."""

    def __init__(self, token: str, settings: Engines) -> None:
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._settings = settings
        self._slots = asyncio.Semaphore(MAX_GENERATIONS)
        self._generation = self._session()
        self._control = self._session()

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # Pools are unbounded: _slots bounds generation, control calls are few.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.health_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._generation.close()
        await self._control.close()

    async def complete(self, entry: EngineEntry, body: dict[str, Any]) -> Any:
        """One generation request, within request_seconds once it is sent."""
        async with self._slots:
            return await self._call(
                self._generation,
                entry,
                "POST",
                protocol.COMPLETIONS,
                body=body,
                seconds=self._settings.request_seconds,
            )

    async def get(self, entry: EngineEntry, path: str, seconds: float | None = None) -> Any:
        """A control GET, within health_seconds unless told otherwise."""
        seconds = seconds or self._settings.health_seconds
        return await self._call(self._control, entry, "GET", path, seconds=seconds)

    async def post(self, entry: EngineEntry, path: str, body: dict[str, Any] | None = None) -> Any:
        """A control POST; it may have to wait for answers in flight: request_seconds."""
        seconds = self._settings.request_seconds
        return await self._call(self._control, entry, "POST", path, body=body, seconds=seconds)

    async def health_fault(self, entry: EngineEntry) -> TransportFault | None:
        """Why `/health` does not answer 200 in time, or None."""
        try:
            await self.get(entry, protocol.HEALTH)
        except TransportFault as fault:
            return fault
        except EngineError as error:  # 4xx or not JSON: some other program
            return TransportFault("server", entry, error.what)
        return None

    async def _call(
        self,
        session: aiohttp.ClientSession,
        entry: EngineEntry,
        method: str,
        path: str,
        *,
        seconds: float,
        body: dict[str, Any] | None = None,
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(
                    method,
                    entry.url + path,
                    data=data,
                    headers=self._headers,
                    allow_redirects=False,  # the token goes to the registered address only
                ) as response,
            ):
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            what = f"{method} {path} was not answered within {seconds:g} s"
            raise TransportFault("timeout", entry, what) from error
        except aiohttp.ClientError as error:
            what = f"{method} {path} failed ({type(error).__name__}: {error})"
            raise TransportFault("connection", entry, what) from error
        return _content(entry, f"{method} {path}", status, content)


def _content(entry: EngineEntry, call: str, status: int, content: bytes) -> Any:
    if status >= 500:
        what = f"{call} answered {status}: {_message(content)}"
        raise TransportFault("server", entry, what)
    if status != 200:
        raise EngineError(
            "E225",
            f"{entry.name} at {entry.url}: {call} answered {status}: {_message(content)}",
            why="the engine refuses the request, so repeating it cannot help",
            fix="fix what its message names; for 401 launch the run again",
            status=status,
        )
    try:
        return json.loads(content) if content else {}
    except ValueError as error:
        raise EngineError(
            "E230",
            f"{entry.name} at {entry.url}: {call} answered no JSON ({content[:60]!r})",
            why="the answer cannot be read",
            fix="use a supported engine version",
        ) from error


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return content[:200].decode(errors="replace")
