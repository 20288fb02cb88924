"""A child that cannot outlive its supervisor.

The supervisor keeps the write end of a pipe and never writes; every child inherits the read end.
When the supervisor dies, by whatever means (kill -9 included), the kernel closes the write end, the
child's blocking read returns end-of-file, and the child ends itself. This needs no polling, no
parent-death signal (Linux only, and bound to a thread), and no help from the dead supervisor.

    supervisor: lifeline = Lifeline(); Popen(..., pass_fds=[lifeline.child_end],
                env={..., LIFELINE_VARIABLE: str(lifeline.child_end)})
    child:      hold_lifeline()        # first thing it does

Processes of other programs that a child starts may close what they inherit. Those that load code of ours
ask instead, every second, whether the child lives: `watched_environment` and `watch_starter`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

from miles_olmo.base.processes import ProcessIdentity, group_members

LIFELINE_VARIABLE = "MILES_LIFELINE_FD"
"""Environment variable that holds the descriptor number of the read end."""

LIFELINE_EXIT = 75
"""Exit code of a child that had to end itself the hard way."""

STARTER_VARIABLE = "MILES_STARTED_BY"
"""Environment variable that holds the identity of the process to watch, as JSON."""

WATCH_SECONDS = 1.0


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

    SIGTERM first, so that handlers run; SIGKILL after `grace_seconds`. A process that leads its
    process group takes the whole group with it, children that outlive it included.

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


def watched_environment() -> dict[str, str]:
    """Environment of a program whose processes are to end with this one."""
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    return {STARTER_VARIABLE: json.dumps(identity.as_json())}


def watch_starter(grace_seconds: float = 3.0) -> bool:
    """End this process when the one that the environment names has ended; forked children do the same.

    SIGTERM first, SIGKILL after `grace_seconds`. Processes that are started otherwise inherit the
    environment, and call this themselves.

    Returns:
        False when the environment names none.
    """
    text = os.environ.get(STARTER_VARIABLE)
    if text is None:
        return False
    starter = ProcessIdentity.from_json(json.loads(text))

    def start() -> None:
        threading.Thread(
            target=_end_with, args=(starter, grace_seconds), name="lifeline", daemon=True
        ).start()

    start()
    os.register_at_fork(after_in_child=start)  # a child has none of its parent's threads
    return True


def _end_with(starter: ProcessIdentity, grace_seconds: float) -> None:
    while starter.is_alive:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(descriptor: int, grace_seconds: float) -> None:
    while os.read(descriptor, 1):  # nothing is ever written; this blocks until end-of-file
        pass
    try:
        print("the supervisor is gone: ending this process", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
    if not (os.getpgrp() == os.getpid() and _send_undertaker(grace_seconds)):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds + 1)
    os._exit(LIFELINE_EXIT)


def _send_undertaker(grace_seconds: float) -> bool:
    """Start a process that ends our group: SIGTERM may end us at once, and our children not.

    It belongs to the group, so the group's number stays taken until the work is done.
    """
    argv = [sys.executable, "-m", __name__, str(os.getpgrp()), str(grace_seconds)]
    try:
        subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError:
        return False
    return True


def _undertake(group: int, grace_seconds: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpgrp() != group:
        raise SystemExit("not a member of the group")
    os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while group_members(group) != [os.getpid()] and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _undertake(int(sys.argv[1]), float(sys.argv[2]))
