"""Weights & Biases, in a process of its own: nothing it does can block or end the trainer.

Rows go through a bounded queue and a thread to `wandb_process`, which answers each with a line. What
is not answered when the run ends, or does not fit into the queue, is a fault.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.manifest.models import WandB
from miles_olmo.records.tracking import WANDB, tag

QUEUE_ROWS = 10_000
"""Rows that wait for a slow connection; more are lost, and counted."""
FINISH_SECONDS = 60.0
"""How long the end of a run waits for the last rows to be delivered."""


class WandbTracker:
    """Sends every row to a W&B process that it starts and ends."""

    name = WANDB

    def __init__(
        self,
        settings: WandB,
        run: RunDirectory,
        attempt: int,
        config: Mapping[str, Any],
        *,
        finish_seconds: float = FINISH_SECONDS,
    ) -> None:
        self._finish_seconds = finish_seconds
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_ROWS)
        self._found: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._num_sent = self._num_answered = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "miles_olmo.records.tracking.wandb_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        start = {
            "id": run.run_id,
            "project": settings.project,
            "mode": settings.mode,
            "directory": str(run.root),
            "attempt": attempt,
            "config": config,
            "finish_seconds": finish_seconds,
        }
        self._queue.put(json.dumps(start) + "\n")
        self._threads = [
            threading.Thread(target=work, args=(pipe,), daemon=True)
            for work, pipe in (
                (self._send, self._process.stdin),
                (self._read, self._process.stdout),
            )
        ]
        for thread in self._threads:
            thread.start()

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        axis = "step/warmup" if phase == "warmup" else "step/train"
        row = {axis: step, **{tag(phase, name): value for name, value in values.items()}}
        try:
            self._queue.put_nowait(json.dumps(row) + "\n")
            self._num_sent += 1
        except queue.Full:
            self._found.put(f"more than {QUEUE_ROWS} rows wait; this one is lost")

    def faults(self) -> Sequence[str]:
        found = []
        while not self._found.empty():
            found.append(self._found.get())
        return found

    def close(self) -> None:
        """Wait for the answers, at most `finish_seconds`, then end the process."""
        try:
            self._queue.put(None, timeout=1.0)
            self._process.wait(self._finish_seconds)
        except (queue.Full, subprocess.TimeoutExpired):
            self._found.put(f"did not finish within {self._finish_seconds:g} s")
            self._process.kill()
            self._process.wait()
        self._threads[1].join(1.0)
        for _ in range(self._num_sent - self._num_answered):
            self._found.put("a row was not delivered")

    def _send(self, pipe: IO[str]) -> None:
        try:
            while (line := self._queue.get()) is not None:
                pipe.write(line)
                pipe.flush()
            pipe.close()
        except OSError:  # the process is gone; rows without an answer are counted at the end
            pass

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            answer = json.loads(line)
            self._num_answered += answer["row"]
            if answer["fault"]:
                self._found.put(answer["fault"])
