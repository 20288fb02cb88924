"""One thread owns the model; the event loop talks to it through a queue of commands.

Commands are carried out in the order they were posted, between two decoding steps. The event loop
therefore decides (admission, pausing, updates) without locks, and never waits for the model.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from miles_olmo.base.errors import EngineError, MilesError
from miles_olmo.wire.generation import EngineModel, SampledSequence, SamplingRequest

QUIET_SECONDS = 0.002
"""An idle engine that gets a request starts once none has followed for this long: a trainer asks for
all groups of a step at once, and passes over a part of them would cost as much as over all."""

GATHER_SECONDS = 0.02
"""It starts after this long in any case."""

STOP_SECONDS = 5.0
"""A step that takes longer is left behind; the thread ends with the process."""

Result = TypeVar("Result")
Finished = Sequence[tuple[str, SampledSequence | None]]


@dataclass(eq=False)
class Job:
    """The sequences of one HTTP request."""

    keys: tuple[str, ...]
    """Keys of its sequences in the model, in sample order."""
    future: asyncio.Future[list[SampledSequence | None]]
    """All results in sample order; None for a sequence aborted before its first token."""
    results: dict[str, SampledSequence | None] = field(default_factory=dict)


class _Stop(BaseException):
    """Ends the thread."""


class Scheduler:
    """Runs an `EngineModel` on its own thread. All methods belong to the event loop.

    Args:
        model: Used by the compute thread only, from `start` on.
        on_failure: Called on the event loop, once, when the model raised.
    """

    def __init__(self, model: EngineModel, on_failure: Callable[[EngineError], None]) -> None:
        self._model = model
        self._on_failure = on_failure
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._jobs: dict[str, Job] = {}  # by sequence key; event loop only
        self._calls: set[asyncio.Future] = set()
        self._num_submitted = 0
        self._live: set[str] = set()  # keys in the model; compute thread only
        self._frozen = False  # compute thread only
        self.failure: EngineError | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in; unfinished sequences are dropped."""
        self._commands.put(_raise_stop)
        self._thread.join(timeout=STOP_SECONDS)

    @property
    def num_unfinished(self) -> int:
        """Sequences that were submitted and have no result yet."""
        return len(self._jobs)

    def submit(self, requests: Sequence[SamplingRequest]) -> Job:
        """Queue the sequences of one request in the model."""
        self._check_alive()
        self._num_submitted += 1
        keys = tuple(f"{self._num_submitted}.{index}" for index in range(len(requests)))
        job = Job(keys, self._loop.create_future())
        self._jobs.update(dict.fromkeys(keys, job))
        pairs = tuple(zip(keys, requests, strict=True))
        self._commands.put(lambda: self._add(pairs))
        return job

    def drop(self, job: Job) -> None:
        """Abort a job whose answer nobody wants any more."""
        for key in job.keys:
            self._jobs.pop(key, None)
        job.future.cancel()
        self._commands.put(lambda: self._abort(job.keys, deliver=False))

    def abort_all(self) -> None:
        """End every unfinished job with what it sampled so far."""
        self._commands.put(lambda: self._abort(sorted(self._live), deliver=True))

    def freeze(self, frozen: bool) -> None:
        """Stop (or go on) decoding; queued and running sequences stay in the model."""
        self._commands.put(lambda: setattr(self, "_frozen", frozen))

    async def drain(self) -> None:
        """Wait until no job is unfinished."""
        while self._jobs:
            await asyncio.wait({job.future for job in self._jobs.values()})

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the compute thread, between two steps.

        Raises:
            MilesError: what the function raised; any other exception fails the engine.
        """
        self._check_alive()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def command() -> None:
            try:
                result = function()
            except MilesError as error:
                self._post(_set_exception, future, error)
            else:
                self._post(_set_result, future, result)

        self._commands.put(command)
        return await future

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure

    # Compute thread.

    def _run(self) -> None:
        try:
            while True:
                idle = self._frozen or not self._live
                self._carry_out_commands(wait=idle)
                if idle and self._live:
                    self._gather()
                if self._live and not self._frozen:
                    self._deliver(self._model.step())
        except _Stop:
            return
        except BaseException as error:
            if isinstance(error, MilesError):  # says all there is to say
                self._post(self._fail, str(error))
                return
            traceback.print_exc()  # the engine's log keeps the whole story
            self._post(self._fail, f"{type(error).__name__}: {error}")

    def _carry_out_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def _gather(self) -> None:
        """Carry out commands until none comes for a moment. What is sampled does not depend on it."""
        deadline = time.monotonic() + GATHER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._commands.get(timeout=min(QUIET_SECONDS, left))()
            except Empty:
                return

    def _add(self, pairs: Sequence[tuple[str, SamplingRequest]]) -> None:
        for key, request in pairs:
            self._model.add(key, request)
            self._live.add(key)

    def _abort(self, keys: Sequence[str], *, deliver: bool) -> None:
        aborted = [(key, self._model.abort(key)) for key in keys if key in self._live]
        if deliver:
            self._deliver(aborted)
        else:
            self._live.difference_update(key for key, _ in aborted)

    def _deliver(self, finished: Finished) -> None:
        if finished:
            self._live.difference_update(key for key, _ in finished)
            self._post(self._resolve, finished)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the server is gone, nobody waits
            raise _Stop from None

    # Event loop, called from the compute thread.

    def _resolve(self, finished: Finished) -> None:
        for key, sequence in finished:
            job = self._jobs.pop(key, None)
            if job is None:
                continue  # dropped while its last step ran
            job.results[key] = sequence
            if len(job.results) == len(job.keys):
                _set_result(job.future, [job.results[key] for key in job.keys])

    def _fail(self, reason: str) -> None:
        self.failure = EngineError(
            "E203",
            f"the engine's compute thread failed ({reason})",
            why="its sequences are lost and its weights cannot be trusted",
            fix="read the engine's log; the engine ends itself",
        )
        for future in {job.future for job in self._jobs.values()} | self._calls:
            _set_exception(future, self.failure)
        self._jobs.clear()
        self._on_failure(self.failure)


def _raise_stop() -> None:
    raise _Stop


def _set_result(future: asyncio.Future, result: object) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
