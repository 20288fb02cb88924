"""An ASGI middleware in front of a real vLLM server that breaks its answers on demand."""

import asyncio
import json
import os
from pathlib import Path

FAULT_VARIABLE = "MILES_TEST_FAULT_FILE"


class Faulty:
    """The file that the variable names holds the fault; none, or an empty one, is no fault."""

    def __init__(self, app):
        self._app = app
        self._file = Path(os.environ[FAULT_VARIABLE])

    async def __call__(self, scope, receive, send):
        fault = self._file.read_text() if self._file.is_file() else ""
        if not fault or scope.get("path") != "/v1/completions":
            await self._app(scope, receive, send)
        elif fault == "500":
            await _answer(send, 500, b'{"error": {"message": "broken on purpose"}}')
        elif fault == "hang":
            await asyncio.sleep(3600)
        else:
            await self._changed(fault, scope, receive, send)

    async def _changed(self, fault, scope, receive, send):
        body, status = bytearray(), 500

        async def collect(message):
            nonlocal status
            status = message.get("status", status)
            body.extend(message.get("body", b""))

        await self._app(scope, receive, collect)
        content = json.loads(body)
        for choice in content["choices"]:
            if fault == "no routes":
                choice["routed_experts"] = None
            elif fault == "no logprobs":
                choice["logprobs"] = None
        if fault == "one choice less":
            content["choices"].pop()
        await _answer(send, status, json.dumps(content).encode())


async def _answer(send, status, body):
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
