"""One vLLM server as a child process: start it, wait until it answers, notice its end.

Each of vLLM's processes loads the plug-in, which ends it when this one is gone. The child writes
through a pipe, so that its last lines are known when it dies; every line goes on to the job's own log.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from miles_olmo.base.errors import EngineError
from miles_olmo.base.lifeline import watched_environment
from miles_olmo.base.processes import ProcessIdentity, descendants
from miles_olmo.manifest.models import Manifest
from miles_olmo.serving.command import ServerCommand
from miles_olmo.wire import protocol
from miles_olmo.wire.protocol import SUPPORTED_VLLM, release_number

LAST_LINES = 30
_RAISED = re.compile(r"\w+(?:Error|Exception)\b|out of memory|Killed")
"""Lines of the server's output that may say why it ended; much may follow them."""
_FOLLOWED = re.compile(r"root cause|EngineDeadError|died unexpectedly")
"""Lines of one process about the end of another: a request that met a dead engine, and the like."""
_HARMLESS = re.compile(r"\b(?:DEBUG|INFO|WARNING) \d|(?:^|[\])]) {2,}\S")
"""Lines that may name an error and report none: by their level, or as source code in a traceback."""
CAUSE_SECONDS = 10.0
"""An error that came longer before the end than this was survived."""
POLL_SECONDS = 0.25
STOP_SECONDS = 5.0
"""Between SIGTERM and SIGKILL when the job ends."""

ARCHITECTURES = {"olmo3moe": "Olmo3MoeForCausalLM", "olmoe": "OlmoeForCausalLM"}
"""The class that serves each model family."""


class VllmServer:
    """A started server.

    Args:
        command: From `server_command`.
        host, port: Where it was told to listen.
        token: The run's token, for questions to it.
    """

    def __init__(self, command: ServerCommand, *, host: str, port: int, token: str) -> None:
        self.host, self.port = host, port
        self._token = token
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._raised: tuple[float, str] | None = None
        self._followed: tuple[float, str] | None = None
        self._child = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.environment, **watched_environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._forward, name="vllm-log", daemon=True)
        self._reader.start()
        self._others: dict[int, ProcessIdentity] = {}

    @property
    def pid(self) -> int:
        """Process id of the HTTP server; vLLM's other processes are its children."""
        return self._child.pid

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def wait_until_answering(self, seconds: float) -> None:
        """Wait for the first healthy answer.

        Raises:
            EngineError: E210, the server ended or does not answer in time.
        """
        deadline = time.monotonic() + seconds
        while not self._is_healthy():
            self._note_others()
            if self._child.poll() is not None:
                raise self._error("E210", f"the vLLM server {self._end()} while it was starting")
            if time.monotonic() > deadline:
                raise self._error("E210", f"the vLLM server does not answer after {seconds:g} s")
            time.sleep(POLL_SECONDS)
        self._note_others()

    def ask(self, path: str, seconds: float = 30.0) -> Any:
        """JSON of a GET, with the run's token.

        Raises:
            EngineError: E210, no such answer.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 200:
                return json.loads(content)
            what = f"GET {path} answered {answer.status}: {content[:200].decode(errors='replace')}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            what = f"GET {path} failed: {error}"
        finally:
            connection.close()
        raise self._error("E210", what)

    def wait_for_end(self) -> EngineError:
        """Block until the server ends; the error that says so, with its last lines."""
        self._child.wait()
        return self._error("E212", f"the vLLM server {self._end()}")

    def stop(self) -> None:
        """End the server and all processes that it started: SIGTERM, then SIGKILL."""
        self._note_others()
        if self._child.poll() is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_SECONDS)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        for process in self._others.values():
            if process.is_alive:  # vLLM's engine outlives a server that was killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def _note_others(self) -> None:
        """Remember the server's children while they can be told from other processes."""
        if self._child.poll() is None:
            self._others |= {process.pid: process for process in descendants(self._child.pid)}

    def _forward(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.append(line.rstrip("\n"))
            self._note_cause(line.rstrip())
            sys.stdout.write(line)
            sys.stdout.flush()

    def _note_cause(self, line: str) -> None:
        """Remember the last error before the first line that is about the end of a process."""
        if self._followed or _HARMLESS.search(line):
            return
        if _FOLLOWED.search(line):
            self._followed = (time.monotonic(), line)
        elif _RAISED.search(line):
            self._raised = (time.monotonic(), line)

    def _cause(self) -> str:
        """The line of the output that says most about why the server ended or does not answer."""
        if self._raised:
            raised, line = self._raised
            has_ended = self._child.poll() is not None
            end = self._followed[0] if self._followed else time.monotonic() if has_ended else raised
            if end - raised <= CAUSE_SECONDS:
                return line
        lines = [line for line in self._lines if line.strip()]
        return self._followed[1] if self._followed else (lines or ["nothing"])[-1].strip()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2.0)
        try:
            connection.request("GET", protocol.HEALTH)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self) -> str:
        code = self._child.returncode
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def _error(self, code: str, what: str) -> EngineError:
        self._reader.join(timeout=1.0)  # what it wrote last may still be in the pipe
        lines = list(self._lines)
        return EngineError(
            code,
            what,
            why=f"its output says: {self._cause()[:300]}",
            fix="read the engine's log; free memory if it was killed",
            last_lines=lines,
        )


def free_port(host: str) -> int:
    """A port that nobody listens on now; vLLM binds it within a second of its start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_was_taken(error: EngineError) -> bool:
    """Whether a server did not start because another program listens on its port."""
    return any("address already in use" in line.lower() for line in error.details["last_lines"])


def check_description(manifest: Manifest, version: Any, described: dict[str, Any]) -> None:
    """Whether a server is what the plan asked for, before it is announced.

    Args:
        version: Answer of `/version`.
        described: Answer of `/engine`.

    Raises:
        EngineError: E213, an unsupported vLLM; E211, something else is served than was planned.
    """
    text = str(version.get("version")) if isinstance(version, dict) else ""
    if not SUPPORTED_VLLM[0] <= release_number(text) < SUPPORTED_VLLM[1]:
        raise EngineError(
            "E213",
            f"vLLM {text or 'of unknown version'} answers",
            why="routes, logprobs and weight updates were tested with 0.26 to 0.30",
            fix="install a supported version: see docs/install.md",
        )
    model = manifest.model
    wanted = {
        "architecture": ARCHITECTURES[model.family],
        "dtype": model.dtype,
        "logprobs_mode": "processed_logprobs",
        "routed_experts": manifest.train.replay.enabled,
        "max_model_len": model.shape.max_position_embeddings,
    }
    wrong = {key: described.get(key) for key in wanted if described.get(key) != wanted[key]}
    if wrong:
        raise EngineError(
            "E211",
            "; ".join(
                f"{key} is {value!r}, planned {wanted[key]!r}" for key, value in wrong.items()
            ),
            why="answers would come from something else than the plan says",
            fix="use a supported vLLM version; remove VLLM_* variables from the environment",
            found=described,
        )
