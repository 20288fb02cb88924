"""A child that cannot outlive its supervisor.

The supervisor keeps the write end of a pipe and never writes; every child inherits the read end.
When the supervisor dies, by whatever means (kill -9 included), the kernel closes the write end, the
child's blocking read returns end-of-file, and the child ends itself. This needs no polling, no
parent-death signal (Linux only, and bound to a thread), and no help from the dead supervisor.

    supervisor: lifeline = Lifeline(); Popen(..., pass_fds=[lifeline.child_end],
                env={..., LIFELINE_VARIABLE: str(lifeline.child_end)})
    child:      hold_lifeline()        # first thing it does
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

LIFELINE_VARIABLE = "MILES_LIFELINE_FD"
"""Environment variable that holds the descriptor number of the read end."""

LIFELINE_EXIT = 75
"""Exit code of a child that had to end itself the hard way."""


class Lifeline:
    """The supervisor's side. Python opens both ends close-on-exec: no child inherits the write end."""

    def __init__(self) -> None:
        self.child_end, self._own_end = os.pipe()

    def close(self) -> None:
        """Let go: every child that holds the read end ends itself."""
        for descriptor in (self._own_end, self.child_end):
            os.close(descriptor)


def hold_lifeline(grace_seconds: float = 5.0) -> bool:
    """Watch the supervisor from a daemon thread; end this process when it dies.

    SIGTERM to this process first, so that its own handlers run; after `grace_seconds`, SIGKILL to
    its process group if it leads one (its children go too), else `os._exit`.

    Returns:
        False when this process was not started by a supervisor (nothing to hold).
    """
    text = os.environ.pop(LIFELINE_VARIABLE, None)  # our own children hold no lifeline of ours
    if text is None:
        return False
    descriptor = int(text)
    os.set_inheritable(descriptor, False)
    threading.Thread(
        target=_watch, args=(descriptor, grace_seconds), name="lifeline", daemon=True
    ).start()
    return True


def _watch(descriptor: int, grace_seconds: float) -> None:
    while os.read(descriptor, 1):  # nothing is ever written; this blocks until end-of-file
        pass
    try:
        print("the supervisor is gone: ending this process", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(LIFELINE_EXIT)
