"""What vLLM's server lacks as an engine of this project, as ASGI middleware in front of it.

- Versions: an answer says which policy version sampled it, a version counts once every tensor of it
  was taken, and before the first there is nothing to sample from.
- Barriers: a request is admitted before a pause or waits for the end of it, so that no answer
  mixes versions; an update is refused while a sequence is half sampled.
- Health: the server is not healthy when its engine core answers nothing.
- `GET /weight_version`, `GET /weight_checksums` and `GET /engine`.

`miles_olmo.rollout.auth.BearerAuth` stands in front of this one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.auth import App, Message, Receive, Scope, Send
from miles_olmo.rollout.weight_update import ServedVersion, WeightUpdate
from miles_olmo.serving.core_watch import CoreWatch
from miles_olmo.wire import protocol
from miles_olmo.wire.publication import EXPECTED_NAME, read_expected

DIRECTORY_VARIABLE = "MILES_SERVED_DIRECTORY"
"""Environment variable that names the directory the engine serves from."""

SILENCE_VARIABLE = "MILES_CORE_SILENCE_SECONDS"
"""Environment variable with the longest time that the engine core may take for a step."""

STATUS = {"E204": 400, "E206": 503, "E207": 503, "E209": 400}
"""HTTP status of an error code; others are conflicts with the engine's state (409)."""

ABORT_AGAIN_SECONDS = 0.05
"""A request may reach vLLM's scheduler just after it aborted all others."""

Handler = Callable[["VersionGate", Scope, Receive, Send], Awaitable[None]]


class VersionGate(ServedVersion):
    """State of one served policy, in the server's process. One event loop, no locks but `_updating`."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._expected = frozenset(
            read_expected(Path(os.environ[DIRECTORY_VARIABLE]) / EXPECTED_NAME)
        )
        self._core = CoreWatch()
        self._longest_silence = float(os.environ[SILENCE_VARIABLE])
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http":
            handler = _HANDLERS.get((scope["method"], scope["path"]))
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            await handler(self, scope, receive, send)
        except EngineError as error:
            await _respond(send, STATUS.get(error.code, 409), _error_body(error))

    # Generation

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._admit()
        version = self.version
        self._in_flight += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, _Tagging(send, version))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    # Pausing

    async def _pause(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode())
        mode = query.get("mode", ["abort"])[-1]
        if mode not in ("abort", "wait"):
            raise EngineError(
                "E204",
                f"pause mode {mode!r}",
                why="an answer that goes on after an update would mix two versions",
                fix="send /pause?mode=wait or mode=abort",
            )
        self._running.clear()
        status, body = await self._inner(scope, receive)
        while status == 200 and self._in_flight:
            if mode == "wait":
                await self._idle.wait()
            else:
                await asyncio.sleep(ABORT_AGAIN_SECONDS)
            status, body = await self._inner(scope, receive)
        if status != 200:
            self._running.set()
        await _respond(send, status, body)

    async def _resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._updating:  # never between the load of a version and its completion
            given_up = self._update is not None
            if given_up:
                await self._give_up(scope)
            status, body = await self._inner(scope, receive)
            if status == 200:
                self._running.set()
                body = json.dumps({"status": "resumed", "gave_up_update": given_up}).encode()
        await _respond(send, status, body)

    # Updates

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._updating:
            if self._in_flight:
                raise EngineError(
                    "E208",
                    f"{self._in_flight} requests are half sampled",
                    why="their tokens would come from two versions in one answer",
                    fix="call /pause?mode=wait or mode=abort first",
                )
            await self._give_up(scope)  # left open by an earlier trainer
            status, body = await self._inner(scope, receive)
            if status == 200:
                self._update = WeightUpdate(self._expected)
        await _respond(send, status, body)

    async def _add(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._updating:
            update = self._open_update()
            try:
                content = await _body(receive)
                update.add(_json_object(content).get("update_info"))
                status, body = await self._inner(scope, _replay(content))
            except EngineError:
                await self._give_up(scope)
                raise
            if status != 200:
                status, body = await self._refusal(scope, status, body)
        await _respond(send, status, body)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._updating:
            update = self._open_update()
            try:
                version = update.check_complete()
            except EngineError:
                await self._give_up(scope)
                raise
            # From here until the end, parameters are of no version.
            before, self.version = self.version, None
            status, body = await self._inner(scope, _replay(await _body(receive)))
            if status == 200:
                self.version, self._update = version, None
                body = json.dumps({"weight_version": version}).encode()
            else:
                status, body = await self._refusal(scope, status, body)
                print(
                    f"version {version} was not taken after {before}: the engine serves none now",
                    flush=True,
                )
        await _respond(send, status, body)

    async def _give_up(self, scope: Scope) -> dict[str, Any] | None:
        self._update = None
        return (await _rpc(scope, "miles_give_up_update"))[0]

    async def _refusal(self, scope: Scope, status: int, body: bytes) -> tuple[int, bytes]:
        """The worker's own reason for a failed step, where it had one."""
        reason = await self._give_up(scope)
        if reason is None:
            return status, body
        message = {"message": reason["message"], "type": "EngineError", "code": 400}
        return 400, json.dumps({"error": {**message, "miles": reason}}).encode()

    # Questions

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own answer, unless the core is silent: see `SILENCE_VARIABLE`."""
        silent = self._core.seconds_silent(scope["app"].state.engine_client)
        if silent <= self._longest_silence:
            await self._app(scope, receive, send)
            return
        message = f"the engine core has answered nothing for {silent:.1f} s"
        await _respond(send, 503, json.dumps({"error": {"message": message}}).encode())

    async def _weight_version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _respond(send, 200, json.dumps({"weight_version": self.version}).encode())

    async def _weight_checksums(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._updating:
            checksums = (await _rpc(scope, "miles_weight_checksums"))[0]
            answer = {"weight_version": self.version, "checksums": checksums}
        await _respond(send, 200, json.dumps(answer).encode())

    async def _engine(self, scope: Scope, receive: Receive, send: Send) -> None:
        description = (await _rpc(scope, "miles_describe"))[0]
        await _respond(send, 200, json.dumps({"kind": "vllm", **description}).encode())

    async def _inner(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        """Status and body of vLLM's own answer."""
        status, parts = 500, bytearray()

        async def collect(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.extend(message.get("body", b""))

        await self._app(scope, receive, collect)
        return status, bytes(parts)


_HANDLERS: dict[tuple[str, str], Handler] = {
    ("GET", protocol.HEALTH): VersionGate._health,
    ("POST", protocol.COMPLETIONS): VersionGate._completions,
    ("POST", protocol.PAUSE): VersionGate._pause,
    ("POST", protocol.RESUME): VersionGate._resume,
    ("POST", protocol.START_WEIGHT_UPDATE): VersionGate._start,
    ("POST", protocol.UPDATE_WEIGHTS): VersionGate._add,
    ("POST", protocol.FINISH_WEIGHT_UPDATE): VersionGate._finish,
    ("GET", protocol.WEIGHT_VERSION): VersionGate._weight_version,
    ("GET", protocol.WEIGHT_CHECKSUMS): VersionGate._weight_checksums,
    ("GET", protocol.ENGINE): VersionGate._engine,
}


class _Tagging:
    """Puts the version in front of vLLM's JSON answer, which stays as it is."""

    def __init__(self, send: Send, version: int | None) -> None:
        self._send = send
        self._field = f'"weight_version":{version},'.encode()
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message  # its length is only known with the body
            return
        if message["type"] == "http.response.body" and self._start is not None:
            start, self._start = self._start, None
            body = message.get("body", b"")
            if body.startswith(b"{"):
                message = {**message, "body": b"{" + self._field + body[1:]}
                start = {**start, "headers": _longer(start["headers"], len(self._field))}
            await self._send(start)
        await self._send(message)


def _longer(headers: Any, more: int) -> list[tuple[bytes, bytes]]:
    return [
        (name, str(int(value) + more).encode() if name.lower() == b"content-length" else value)
        for name, value in headers
    ]


async def _rpc(scope: Scope, method: str) -> list[Any]:
    return await scope["app"].state.engine_client.collective_rpc(method)


async def _body(receive: Receive) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(parts)
        parts.extend(message.get("body", b""))
        if not message.get("more_body"):
            return bytes(parts)


def _replay(content: bytes) -> Receive:
    """A receive channel that delivers a body which was read before."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client is still there
        raise AssertionError

    return receive


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise EngineError(
            "E204", f"the body is not JSON ({error})", why="nothing can be read", fix="send JSON"
        ) from error
    return value if isinstance(value, dict) else {}


def _error_body(error: EngineError) -> bytes:
    body = {"message": str(error), "type": "EngineError", "code": STATUS.get(error.code, 409)}
    return json.dumps({"error": {**body, "miles": error.as_json()}}).encode()


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
