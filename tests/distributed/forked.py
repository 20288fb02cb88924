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
from pathlib import Path

import torch

from miles_olmo.base.files import write_json
from miles_olmo.policy.ranks import Ranks, connect_ranks, disconnect_ranks, listen_for_ranks
from miles_olmo.records.receipts import failure_body

Body = Callable[[Ranks], None]


def run_ranks(
    data: int,
    expert: int,
    body: Body,
    *,
    timeout_seconds: float = 60.0,
    limit_seconds: float = 90.0,
    peaceful: bool = True,
    meeting_seconds: float = 60.0,
    absent: int | None = None,
    errors: Path | None = None,
) -> list[int]:
    """Run `body` in every rank; the exit codes (negative: signals) in the order of ranks.

    Args:
        peaceful: Part in peace at the end.
        absent: A rank that never comes to the meeting.
        errors: Where `<errors>-<rank>.json` tells why a rank could not join.
    """
    listener = listen_for_ranks()
    port = listener.getsockname()[1]
    pids = []
    for rank in range(data * expert):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            if rank == absent:
                time.sleep(meeting_seconds + 2)
                os._exit(0)
            _run_child(
                lambda rank=rank: connect_ranks(
                    rank,
                    data,
                    expert,
                    port=port,
                    listener=listener if rank == 0 else None,
                    device=torch.device("cpu"),
                    timeout_seconds=timeout_seconds,
                    meeting_seconds=meeting_seconds,
                ),
                body,
                peaceful,
                errors and errors.with_name(f"{errors.name}-{rank}.json"),
            )
        pids.append(pid)
    listener.close()
    return _wait(pids, limit_seconds)


def _run_child(
    connect: Callable[[], Ranks], body: Body, peaceful: bool, errors: Path | None
) -> None:
    code = 0
    try:
        ranks = connect()
        body(ranks)
        if peaceful:
            disconnect_ranks(ranks)
    except BaseException as error:
        traceback.print_exc()
        if errors:
            write_json(errors, failure_body(error))
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
