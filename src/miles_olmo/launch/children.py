"""One child process in a process group of its own: started, watched, ended, never mistaken.

The group is signalled only while the kernel still holds its number: a child that ended stays
unreaped until what is left of its group has been killed, so no recycled pid is ever hit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_olmo.base.errors import LaunchError
from miles_olmo.base.processes import ProcessIdentity
from miles_olmo.launch.commands import JobCommand
from miles_olmo.records.receipts import utc_now


class JobProcess:
    """A started job."""

    def __init__(
        self, command: JobCommand, log: Path, environment: dict[str, str], inherited: Sequence[int]
    ) -> None:
        """Start the job in its own session, its output appended to `log`.

        Args:
            inherited: Descriptors the child keeps (its lifeline, the run's lock).

        Raises:
            LaunchError: E514, the operating system refuses.
        """
        self.command = command
        self.log = log
        self.started_at = utc_now()
        self.exit_code: int | None = None
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            try:
                self._child = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=tuple(inherited),
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(
                    "E514",
                    f"cannot start job {command.name}: {error.strerror}",
                    why=f"the operating system refused to run {command.argv[0]}",
                    fix="check the machine's process and memory limits (ulimit -a)",
                    job=command.name,
                ) from error
        self.pid = self._child.pid
        # A child that is already gone has no start time left; its pid stays ours until reaped.
        self.identity = ProcessIdentity.of(self.pid) or ProcessIdentity(self.pid, "ended", "")

    def poll(self) -> int | None:
        """Exit code (negative: a signal), or None while it runs. Kills what it left behind."""
        if self.exit_code is None and self._has_ended():
            self.signal_group(signal.SIGKILL)
            self.exit_code = self._child.wait()
        return self.exit_code

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the job and every process of its group, unless it was reaped."""
        if self._child.returncode is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:  # macOS: every process of the group is a zombie
            if sys.platform != "darwin":
                raise

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._child.poll() is not None
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None


def describe_exit(exit_code: int) -> str:
    """An exit code in words: "exited with code 3", "was killed by SIGKILL"."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def last_lines(log: Path, count: int = 20) -> list[str]:
    """The last lines of a log file; none when it is absent."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 256 * max(count, 256)))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-count:] if count else []
