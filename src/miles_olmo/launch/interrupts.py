"""Ctrl-C and its relatives, counted instead of raised, so that a run ends in an orderly way."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """A context in which SIGINT, SIGTERM and SIGHUP are counted.

    Outside the main thread Python delivers no signals: nothing is counted there.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # nohup asks for SIGHUP to be ignored; that wish is kept
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._counted)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _counted(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
