"""Watching one engine: it must announce itself, answer its health check, stay alive and go on answering.

An engine announces itself in `engines/engine-<i>.json`: {"index", "url", "pid", "attempt"}.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from miles_olmo.base.errors import LaunchError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.children import JobProcess, describe_exit
from miles_olmo.launch.commands import JobCommand
from miles_olmo.manifest.models import Engines
from miles_olmo.records.runs import run_reference
from miles_olmo.wire.protocol import HEALTH

_CHECK_EVERY = 0.25
_CHECK_READY_EVERY = 1.0
HUNG_AFTER_CHECKS = 3
"""An engine that answers no health check for this many times engines.health_seconds has hung."""
_CHECK_SECONDS = 1.0
"""A health check may not hold up the supervisor's loop for longer."""


class EngineWatch:
    """The state of one engine in one attempt."""

    def __init__(
        self, command: JobCommand, run: RunDirectory, attempt: int, settings: Engines
    ) -> None:
        self.command = command
        self.url = ""
        self.is_ready = False
        self.restarts = 0
        self.job: JobProcess
        self._run = run
        self._registration = run.root / "engines" / f"engine-{command.index}.json"
        self._attempt = attempt
        self._settings = settings
        self._deadline = self._next_check = self._last_answer = 0.0

    @property
    def may_restart(self) -> bool:
        return self.command.restartable and self.restarts < self._settings.max_restarts

    def start(self, start: Callable[[JobCommand, int], JobProcess]) -> None:
        """Start the process; an earlier announcement no longer counts."""
        self._registration.unlink(missing_ok=True)
        self.url, self.is_ready = "", False
        self._deadline = time.monotonic() + self._settings.startup_seconds
        self.job = start(self.command, self.restarts)

    def restart(self, start: Callable[[JobCommand, int], JobProcess]) -> None:
        self.restarts += 1
        self.start(start)

    def became_ready(self) -> bool:
        """Check an engine that is starting; True once, when it first answers.

        Raises:
            LaunchError: E510, it took longer than engines.startup_seconds.
        """
        now = time.monotonic()
        if self.is_ready or now < self._next_check:
            return False
        self._next_check = now + _CHECK_EVERY
        self.url = self.url or self._announced_url()
        if self.url and _is_healthy(self.url):
            self.is_ready = True
            self._last_answer = now
            return True
        if now > self._deadline:
            raise self._too_late()
        return False

    def seconds_hung(self) -> float | None:
        """How long an engine that was ready has answered no health check, once that is too long.

        The engine's event loop never waits for the model, so a busy engine still answers.
        """
        now = time.monotonic()
        if not self.is_ready or now < self._next_check:
            return None
        self._next_check = now + _CHECK_READY_EVERY
        if _is_healthy(self.url):
            self._last_answer = time.monotonic()
            return None
        silent = now - self._last_answer
        return silent if silent > HUNG_AFTER_CHECKS * self._settings.health_seconds else None

    def death(self, exit_code: int) -> LaunchError:
        """The error of an engine that died and is not started again."""
        name, used = self.command.name, self.restarts
        return LaunchError(
            "E511",
            f"{name} {describe_exit(exit_code)}",
            why=f"engines.max_restarts is {self._settings.max_restarts} and {used} were used"
            if not self.may_restart
            else "it did not start, and starting it again would end the same way",
            fix=f"read its log: miles logs {run_reference(self._run.root)} --job {name}",
            job=name,
            exit_code=exit_code,
            restarts=used,
        )

    def _announced_url(self) -> str:
        try:
            entry = json.loads(self._registration.read_bytes())
            ours = entry["attempt"] == self._attempt and entry["pid"] == self.job.pid
            return str(entry["url"]) if ours else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _too_late(self) -> LaunchError:
        name, seconds = self.command.name, self._settings.startup_seconds
        state = f"does not answer {self.url}{HEALTH}" if self.url else "has not announced itself"
        return LaunchError(
            "E510",
            f"{name} {state} after {seconds:g} s",
            why="training cannot start without its engines",
            fix=f"read its log (miles logs {run_reference(self._run.root)} --job {name}), "
            "or raise engines.startup_seconds for a large model",
            job=name,
            startup_seconds=seconds,
        )


def _is_healthy(url: str) -> bool:
    """Whether GET /health answers 200. Straight to the address: no proxy of the environment."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=_CHECK_SECONDS
    )
    try:
        connection.request("GET", HEALTH)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
