"""Who a process is: a pid alone is not enough, because pids are recycled.

An identity is pid + start time + boot id, so that a stored pid is never mistaken for a later
process that got the same number. Linux reads /proc; elsewhere `ps` answers.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, once and for all."""

    pid: int
    started: str
    """Start time as the kernel states it; compared, never interpreted."""
    boot: str
    """Boot of the machine that `started` counts from."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of a living process; None when there is none (a zombie is none)."""
        started = _start_time(pid)
        return None if started is None else cls(pid, started, boot_id())

    @property
    def is_here(self) -> bool:
        """Whether the process was started on this machine since it booted."""
        return self.boot == boot_id()

    @property
    def is_alive(self) -> bool:
        """Whether this very process still lives, on this machine."""
        return self.is_here and _start_time(self.pid) == self.started

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "started": self.started, "boot": self.boot}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessIdentity:
        return cls(int(value["pid"]), str(value["started"]), str(value["boot"]))


def boot_id() -> str:
    """A text that changes with every boot and differs between machines."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _first_line(["sysctl", "-n", "kern.bootsessionuuid"])


def group_members(group: int) -> list[int]:
    """Living pids (zombies left out) of a process group."""
    if not (_PROC / "self/stat").exists():
        lines = _lines(["ps", "-A", "-o", "pid=,pgid=,stat="])
        rows = [line.split() for line in lines]
        return [int(r[0]) for r in rows if r[1] == str(group) and not r[2].startswith("Z")]
    members = []
    for entry in _PROC.iterdir():
        fields = _stat_fields(int(entry.name)) if entry.name.isdigit() else None
        if fields and fields[0] not in "ZX" and int(fields[2]) == group:
            members.append(int(entry.name))
    return members


def descendants(pid: int) -> list[ProcessIdentity]:
    """Children of a process, their children, and so on. Whose parent ended is nobody's child here."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, waiting = [], [pid]
    while waiting:
        waiting += children.get(parent := waiting.pop(), [])
        if parent != pid and (identity := ProcessIdentity.of(parent)):
            found.append(identity)
    return found


def _parents() -> list[tuple[int, int]]:
    """(pid, parent) of every process."""
    if not (_PROC / "self/stat").exists():
        rows = [line.split() for line in _lines(["ps", "-A", "-o", "pid=,ppid="])]
        return [(int(pid), int(parent)) for pid, parent in rows]
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    fields = [(pid, _stat_fields(pid)) for pid in pids]
    return [(pid, int(values[1])) for pid, values in fields if values]


def _start_time(pid: int) -> str | None:
    if pid <= 0:
        return None
    if (_PROC / "self/stat").exists():
        fields = _stat_fields(pid)
        return None if fields is None or fields[0] in "ZX" else fields[19]
    answer = _first_line(["ps", "-o", "stat=,lstart=", "-p", str(pid)])
    state, _, started = answer.partition(" ")
    return None if not started or state.startswith("Z") else started.strip()


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from `state` on; the command name before it may hold anything."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _first_line(command: list[str]) -> str:
    return next(iter(_lines(command)), "")


def _lines(command: list[str]) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
