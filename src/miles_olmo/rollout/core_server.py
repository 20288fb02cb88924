"""HTTP server of the core engine: any `EngineModel` behind the subset of vLLM's protocol.

Two threads: the event loop (requests, versions: `core_state`) and one compute thread that owns the
model (`core_scheduler`). The loop never waits for the model, so `/health` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from miles_olmo import __version__
from miles_olmo.base.errors import EngineError, MilesError
from miles_olmo.rollout.auth import BearerAuth
from miles_olmo.rollout.core_completions import EngineLimits, completion_answer, parse_completion
from miles_olmo.rollout.core_state import PAUSE_MODES, CoreEngine
from miles_olmo.wire import protocol
from miles_olmo.wire.generation import EngineModel

STATUS = {"E203": 500, "E204": 400, "E205": 400, "E206": 503, "E207": 503, "E209": 400}
"""HTTP status of an error code; others are conflicts with the engine's state (409)."""

FAILURE_GRACE_SECONDS = 1.0
"""A dead compute thread is reported this long through /health before the process ends."""


class Endpoints:
    """The handlers, bound to one engine."""

    def __init__(self, engine: CoreEngine) -> None:
        self._engine = engine
        self._numbers = count()

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", protocol.HEALTH, self.health),
            ("GET", "/version", self.version),
            ("GET", "/v1/models", self.models),
            ("POST", protocol.COMPLETIONS, self.completions),
            ("POST", protocol.PAUSE, self.pause),
            ("POST", protocol.RESUME, self.resume),
            ("GET", protocol.IS_PAUSED, self.is_paused),
            ("POST", protocol.INIT_WEIGHT_TRANSFER, self.init_weight_transfer),
            ("POST", protocol.START_WEIGHT_UPDATE, self.start_weight_update),
            ("POST", protocol.UPDATE_WEIGHTS, self.update_weights),
            ("POST", protocol.FINISH_WEIGHT_UPDATE, self.finish_weight_update),
            ("POST", protocol.RESET_PREFIX_CACHE, self.reset_prefix_cache),
            ("GET", protocol.WEIGHT_VERSION, self.weight_version),
            ("GET", protocol.WEIGHT_CHECKSUMS, self.weight_checksums),
        ]
        return [Route(path, handler, methods=[method]) for method, path, handler in table]

    async def health(self, request: Request) -> Response:
        if self._engine.failure is not None:
            raise self._engine.failure
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__, "engine": "core"})

    async def models(self, request: Request) -> Response:
        limits = self._engine.limits
        model = {
            "id": limits.model_name,
            "object": "model",
            "owned_by": "miles-olmo",
            "max_model_len": limits.max_sequence_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        limits = self._engine.limits
        parsed = parse_completion(await _json_body(request, limits), limits)
        work = asyncio.create_task(self._engine.generate(parsed.samples))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # nobody reads it
            sequences, version = work.result()
        finally:
            work.cancel()
            gone.cancel()
        request_id = f"cmpl-{next(self._numbers)}"
        answer = completion_answer(parsed, sequences, version, limits.model_name, request_id)
        return _Compact(answer)

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        clear_cache = request.query_params.get("clear_cache", "true").lower()
        if mode not in PAUSE_MODES or clear_cache not in ("true", "false"):
            raise EngineError(
                "E204",
                f"mode = {mode!r}, clear_cache = {clear_cache!r}",
                why=f"modes are {', '.join(PAUSE_MODES)}; clear_cache is true or false",
                fix="send /pause?mode=wait&clear_cache=true",
            )
        await self._engine.pause(mode, clear_cache=clear_cache == "true")
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        given_up = await self._engine.resume()
        return JSONResponse({"status": "resumed", "gave_up_update": given_up})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._engine.paused})

    async def init_weight_transfer(self, request: Request) -> Response:
        # Files need no connection; the call exists so that one client drives every engine.
        await _json_body(request, self._engine.limits)
        return JSONResponse({"message": "ready"})

    async def start_weight_update(self, request: Request) -> Response:
        await self._engine.start_update()
        return JSONResponse({"message": "started"})

    async def update_weights(self, request: Request) -> Response:
        body = await _json_body(request, self._engine.limits)
        await self._engine.add_to_update(
            body.get("update_info") if isinstance(body, dict) else None
        )
        return JSONResponse({"message": "announced"})

    async def finish_weight_update(self, request: Request) -> Response:
        return JSONResponse({"weight_version": await self._engine.finish_update()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._engine.reset_cache()
        return JSONResponse({"message": "reset"})

    async def weight_version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._engine.version})

    async def weight_checksums(self, request: Request) -> Response:
        checksums = await self._engine.checksums()
        return JSONResponse({"weight_version": self._engine.version, "checksums": checksums})


def create_app(engine: CoreEngine, token: str) -> Starlette:
    """The ASGI application; its lifespan starts and stops the compute thread."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        engine.start()
        yield
        # Stopping waits for the step in flight: not on the event loop.
        await asyncio.to_thread(engine.stop)

    return Starlette(
        routes=Endpoints(engine).routes(),
        middleware=[Middleware(BearerAuth, token=token)],
        exception_handlers={MilesError: _on_error, ClientDisconnect: _on_disconnect},
        lifespan=lifespan,
    )


class CoreServer:
    """One engine process's server.

    Args:
        model: What is served.
        token: The run's token.
        host: Address to bind to.
        port: 0 for any free port.
        on_bound: Called with the base address once the server answers.
        limits: What requests may ask for.

    Raises:
        EngineError: E201, the port is taken.
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        on_bound: Callable[[str], None],
        limits: EngineLimits,
    ) -> None:
        self._socket = bind(host, port)
        self.engine = CoreEngine(model, limits, self._on_failure)
        config = uvicorn.Config(
            create_app(self.engine, token),
            access_log=False,
            log_level="warning",
            lifespan="on",
            http="httptools",
            ws="none",
            timeout_keep_alive=600,  # clients close idle connections, never the server under them
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._on_bound = on_bound

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`.

        Raises:
            EngineError: E203, the compute thread died.
        """
        url = self.url
        asyncio.run(self._serve(url))
        if self.engine.failure is not None:
            raise self.engine.failure

    def stop(self) -> None:
        """End `run` once answers in flight are out, at most 2 s later; a second call ends it now.

        May be called from any thread.
        """
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True

    async def _serve(self, url: str) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.005)
        if self._server.started:
            self._on_bound(url)
        await serving

    def _on_failure(self, error: EngineError) -> None:
        asyncio.get_running_loop().call_later(FAILURE_GRACE_SECONDS, self.stop)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they raise the signal again at the end, which kills the
    process before the job that called `serve_engine` could finish its records."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def serve_engine(
    model: EngineModel,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    on_bound: Callable[[str], None],
    limits: EngineLimits,
) -> None:
    """Serve a model until SIGTERM or SIGINT; see `CoreServer`.

    Raises:
        EngineError: E201, the port is taken; E203, the compute thread died.
    """
    CoreServer(model, token=token, host=host, port=port, on_bound=on_bound, limits=limits).run()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        EngineError: E201, the address is taken or cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY only where the protocol is spelt out; without it every answer
        # waits 40 ms for a delayed acknowledgement.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise _unbound(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _unbound(host, port, error) from error
    return listener


def _unbound(host: str, port: int, error: OSError) -> EngineError:
    taken = error.errno == errno.EADDRINUSE
    return EngineError(
        "E201",
        f"cannot listen on {host}:{port}" + (", the port is taken" if taken else ""),
        why="another process listens there" if taken else str(error.strerror or error),
        fix="use port 0 for a free one, or another host",
    )


async def _json_body(request: Request, limits: EngineLimits) -> Any:
    """The request's JSON, or {} for an empty body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.max_body_bytes:
            raise EngineError(
                "E204",
                f"the body exceeds {limits.max_body_bytes} bytes",
                why="the engine keeps requests in memory",
                fix="send a shorter request",
            )
    try:
        return json.loads(body) if body else {}
    except ValueError as error:
        raise EngineError(
            "E204", f"the body is not JSON ({error})", why="nothing can be read", fix="send JSON"
        ) from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Compact(JSONResponse):
    """Answers with numbers as they are: a NaN reaches the client, whose check names it."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MilesError)
    status = STATUS.get(error.code, 409)
    body = {"message": str(error), "type": type(error).__name__, "code": status}
    return JSONResponse({"error": {**body, "miles": error.as_json()}}, status_code=status)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # it left while it was sending; nobody reads this
