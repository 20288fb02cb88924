"""The token check in front of every engine, core or vLLM.

Pure ASGI, so that vLLM takes it as `--middleware miles_olmo.rollout.auth.BearerAuth`: its own
`--api-key` leaves the control endpoints open.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import EngineError
from miles_olmo.wire.protocol import HEALTH, TOKEN_VARIABLE

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REFUSAL = json.dumps(
    {"error": {"message": "a valid bearer token is needed", "type": "Unauthorized", "code": 401}}
).encode()


class BearerAuth:
    """Refuses every request without `Authorization: Bearer <token>`, except `GET /health`.

    Args:
        app: The application behind it.
        token: The run's token; read from the file that MILES_RUN_TOKEN_FILE names when None.
    """

    def __init__(self, app: App, token: str | None = None) -> None:
        self._app = app
        self._expected = b"Bearer " + (token or read_token()).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == HEALTH:
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # Constant time: the answer's delay must not tell how many characters were right.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_REFUSAL)).encode()),
        (b"www-authenticate", b"Bearer"),
        # The body was not read, so the connection cannot carry a next request.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL})


def read_token() -> str:
    """The run's token, from the 0600 file that MILES_RUN_TOKEN_FILE names.

    Raises:
        EngineError: E202, the variable or file is missing, empty, or readable by others.
    """
    name = os.environ.get(TOKEN_VARIABLE)
    if not name:
        raise _unusable(f"{TOKEN_VARIABLE} is not set")
    path = Path(name)
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except OSError as error:
        raise _unusable(f"the token file {name} cannot be read ({error.strerror})") from error
    if stat.S_IMODE(mode) & 0o077:
        raise _unusable(f"the token file {name} is open to others (mode {stat.S_IMODE(mode):04o})")
    if not token:
        raise _unusable(f"the token file {name} is empty")
    return token


def _unusable(what: str) -> EngineError:
    return EngineError(
        "E202",
        what,
        why="every endpoint but /health needs the run's token",
        fix=f"point {TOKEN_VARIABLE} to the run's token file, mode 0600",
    )
