"""Real trainer processes, forked from one process that has everything imported.

Importing torch and OLMo-core takes seconds, forking takes none. The parent never runs a backward
pass, whose threads would not survive a fork.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch

from miles_olmo.policy.ranks import Ranks, connect_ranks, disconnect_ranks, listen_for_ranks

Body = Callable[[Ranks], None]


def run_ranks(
    data: int,
    expert: int,
    body: Body,
    *,
    timeout_seconds: float = 60.0,
    limit_seconds: float = 90.0,
    peaceful: bool = True,
) -> list[int]:
    """Run `body` in every rank; the exit codes (negative: signals) in the order of ranks."""
    listener = listen_for_ranks()
    port = listener.getsockname()[1]
    pids = []
    for rank in range(data * expert):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_child(
                lambda rank=rank: connect_ranks(
                    rank,
                    data,
                    expert,
                    port=port,
                    listener=listener if rank == 0 else None,
                    device=torch.device("cpu"),
                    timeout_seconds=timeout_seconds,
                ),
                body,
                peaceful,
            )
        pids.append(pid)
    listener.close()
    return _wait(pids, limit_seconds)


def _run_child(connect: Callable[[], Ranks], body: Body, peaceful: bool) -> None:
    code = 0
    try:
        ranks = connect()
        body(ranks)
        if peaceful:
            disconnect_ranks(ranks)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: list[int], limit_seconds: float) -> list[int]:
    deadline = time.monotonic() + limit_seconds
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
