"""TensorBoard event files in `<run>/tensorboard`, one per attempt.

Written with the `tensorboard` package's own protocol buffers and record writer (TensorFlow's TFRecord
framing); its file writer is not used, because it puts the host's name into the file's. A resumed
attempt marks its first step as a restart, so that TensorBoard drops the steps that it walks again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
from tensorboard.summary.writer.record_writer import RecordWriter

from miles_olmo.records.tracking import TENSORBOARD, tag


class TensorBoardTracker:
    """Writes every row of the metrics as scalars; each row is on disk before the next."""

    name = TENSORBOARD

    def __init__(self, directory: Path, attempt: int) -> None:
        directory.mkdir(exist_ok=True)
        self._file = (directory / f"events.out.tfevents.{attempt:06d}.miles").open("ab")
        self._writer = RecordWriter(self._file)
        self._is_resumed = attempt > 1
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        if self._is_resumed:
            self._is_resumed = False
            restart = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=step, session_log=restart))
        scalars = [
            Summary.Value(tag=tag(phase, name), simple_value=value)
            for name, value in values.items()
        ]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def faults(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()
