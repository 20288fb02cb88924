"""Real servers on loopback for tests: engines in threads or processes, and a proxy that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from table_model import MAX_TOKENS, SHAPE, VOCAB, TableModel

import miles_olmo
from miles_olmo.manifest.models import Engines
from miles_olmo.rollout.client import FleetClient, GroupRequest
from miles_olmo.rollout.core_completions import EngineLimits
from miles_olmo.rollout.core_server import CoreServer
from miles_olmo.rollout.registry import EngineEntry, read_registry, register

TOKEN = "test-token-0123456789"
LIMITS = EngineLimits(vocab_size=VOCAB, max_sequence_tokens=MAX_TOKENS)


class EngineThread:
    """A core engine served from a thread of this process."""

    def __init__(self, model: Any = None, *, port: int = 0) -> None:
        self.model = model if model is not None else TableModel()
        self.url = ""
        self.error: BaseException | None = None
        self._bound = threading.Event()
        self.server = CoreServer(
            self.model, token=TOKEN, port=port, on_bound=self._on_bound, limits=LIMITS
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        assert self._bound.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        if isinstance(self.model, TableModel):
            self.model.gate.set()
        self.server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _on_bound(self, url: str) -> None:
        self.url = url
        self._bound.set()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.error = error

    def call(self, method: str, path: str, body: Any = None, token: str | None = TOKEN):
        return call(self.url, method, path, body, token)

    def publish(self, publication) -> None:
        """The update sequence, by hand."""
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": publication.update_info()}),
            ("/finish_weight_update", {}),
        ):
            assert self.call("POST", path, body)[0] == 200, path

    def complete(self, **fields: Any):
        return self.call("POST", "/v1/completions", completion_body(**fields))


def completion_body(**fields: Any) -> dict[str, Any]:
    body = {
        "prompt": [3, 1, 4],
        "n": 1,
        "seed": 11,
        "max_tokens": 5,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return {name: value for name, value in {**body, **fields}.items() if value is not ...}


def call(url: str, method: str, path: str, body: Any = None, token: str | None = TOKEN):
    """(status, JSON) of one request."""
    data = (
        body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
    )
    if method == "POST" and data is None:
        data = b""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    request = urllib.request.Request(url + path, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.005)


def announce(directory: Path, index: int, url: str, attempt: int = 1, pid: int = 0) -> None:
    started = f"2026-01-01T00:00:{attempt:02d}Z"
    register(directory, EngineEntry(index, url, pid or os.getpid(), attempt, started))


def settings(**fields: Any) -> Engines:
    quick = {
        "count": 1,
        "startup_seconds": 10.0,
        "request_seconds": 10.0,
        "health_seconds": 1.0,
        "retries": 2,
        "max_restarts": 0,
    }
    return Engines(**{**quick, **fields})


def fleet(directory: Path, token: str = TOKEN, **fields: Any) -> FleetClient:
    """Make it inside the event loop."""
    return FleetClient(
        directory,
        token,
        settings(**fields),
        shape=SHAPE,
        decode=lambda ids: " ".join(map(str, ids)),
    )


def group(group_id: int = 0, **fields: Any) -> GroupRequest:
    values: dict[str, Any] = {
        "group_id": group_id,
        "prompt_ids": (3, 1, 4),
        "num_samples": 4,
        "max_tokens": 6,
        "temperature": 1.0,
        "seed": 1000 * group_id,
        "stop_token_ids": (7,),
    }
    return GroupRequest(**{**values, **fields})


Fault = Callable[[web.Request, Callable[[], Awaitable[Any]]], Awaitable[web.StreamResponse]]


class Proxy:
    """An HTTP server in front of an engine whose completions go wrong on demand.

    `fault` gets the request and a function that fetches the true answer.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault: Fault | None = None
        self.answers: dict[str, Any] = {}
        """Answers of its own, by path."""
        self.url = ""
        self.num_completions = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()

        async def forward() -> Any:
            headers = {"Authorization": request.headers.get("Authorization", "")}
            async with self._session.request(
                request.method, self.target + request.path_qs, data=body or None, headers=headers
            ) as response:
                self._status = response.status
                return await response.json()

        completion = request.path == "/v1/completions"
        self.num_completions += completion
        if completion and self.fault is not None:
            return await self.fault(request, forward)
        answer = await forward()
        return web.json_response(self.answers.get(request.path, answer), status=self._status)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Proxy]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        async with aiohttp.ClientSession() as self._session:
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            try:
                yield self
            finally:
                await runner.cleanup()


def changed(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """The true answer after `change(answer)`, which edits it or returns another."""

    async def fault(request: web.Request, forward: Callable[[], Awaitable[Any]]):
        answer = await forward()
        other = change(answer)
        return web.Response(
            text=json.dumps(answer if other is None else other), content_type="application/json"
        )

    return fault


async def hang(request: web.Request, forward: Callable[[], Awaitable[Any]]):
    await asyncio.sleep(60)
    raise AssertionError("nobody waits this long")


async def dribble(request: web.Request, forward: Callable[[], Awaitable[Any]]):
    """Bytes keep coming, the answer never ends."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def reset(request: web.Request, forward: Callable[[], Awaitable[Any]]):
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def half_answer(request: web.Request, forward: Callable[[], Awaitable[Any]]):
    text = json.dumps(await forward()).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(text))})
    await response.prepare(request)
    await response.write(text[: len(text) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def error_500(request: web.Request, forward: Callable[[], Awaitable[Any]]):
    return web.json_response({"error": {"message": "out of memory"}}, status=500)


def times(count: int, fault: Fault, then: Fault | None = None) -> Fault:
    """The fault for the first `count` completions only."""
    left = [count]

    async def limited(request: web.Request, forward: Callable[[], Awaitable[Any]]):
        if left[0] > 0:
            left[0] -= 1
            return await fault(request, forward)
        return web.json_response(await forward()) if then is None else await then(request, forward)

    return limited


@contextlib.contextmanager
def engine_process(
    directory: Path,
    index: int = 0,
    attempt: int = 1,
    program: str = "table_engine.py",
    **options: Any,
) -> Iterator[subprocess.Popen]:
    """An engine in its own process, registered; killed at the end by its own pid."""
    token_file = directory.parent / "token"
    if not token_file.exists():
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
    script = Path(__file__).with_name(program)
    source = str(Path(miles_olmo.__file__).parents[1])
    process = subprocess.Popen(
        [
            sys.executable,
            str(script),
            str(directory),
            str(index),
            str(attempt),
            json.dumps(options),
        ],
        env={**os.environ, "PYTHONPATH": source, "MILES_RUN_TOKEN_FILE": str(token_file)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: _registered(directory, index, process.pid) or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.communicate()


def _registered(directory: Path, index: int, pid: int) -> bool:
    entry = read_registry(directory).get(index)
    return entry is not None and entry.pid == pid


def in_background(function):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def hold_half_sampled(engine: EngineThread, **fields):
    """A completion that has sampled at least one token and cannot go on."""
    before = engine.model.num_steps
    engine.model._step_seconds = 0.02
    answer = in_background(lambda: engine.complete(max_tokens=60, **fields))
    wait_until(lambda: engine.model.num_steps >= before + 2)
    return answer


@contextlib.contextmanager
def engines(directory: Path, count: int, **options):
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(EngineThread(TableModel(**options))) for _ in range(count)]
        for index, engine in enumerate(running):
            announce(directory, index, engine.url)
        yield running


@contextlib.asynccontextmanager
async def proxied(directory: Path, running: list[EngineThread]):
    """A misbehaving server in front of every engine."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy(engine.url).serve()) for engine in running]
        for index, proxy in enumerate(proxies):
            announce(directory, index, proxy.url)
        yield proxies


async def until(condition, seconds: float = 10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def started(client, publication):
    await client.wait_ready()
    await client.publish(publication)
    await client.audit(publication)
