"""How the trainer's processes find each other: a file of the run that names the leader's port."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from miles_olmo.base.files import write_json
from miles_olmo.jobs.entry import JobContext
from miles_olmo.manifest.models import Parallel
from miles_olmo.policy.ranks import (
    ALONE,
    MEETING_SECONDS,
    Ranks,
    connect_ranks,
    listen_for_ranks,
    never_came,
)

_POLL_SECONDS = 0.05


def join_ranks(context: JobContext, parallel: Parallel, device: torch.device) -> Ranks:
    """This process among the trainer's; returns when all of them are there.

    Raises:
        TrainingError: E300 or E301, not all of them came.
    """
    if parallel.data * parallel.expert == 1:
        return ALONE
    meeting = context.run.root / "trainer.json"
    listener = None
    if context.rank == 0:
        listener = listen_for_ranks()
        port = listener.getsockname()[1]
        write_json(meeting, {"attempt": context.attempt, "port": port})
    else:
        port = _port_of_leader(meeting, context)
    return connect_ranks(
        context.rank,
        parallel.data,
        parallel.expert,
        port=port,
        listener=listener,
        device=device,
        timeout_seconds=parallel.timeout_seconds,
    )


def _port_of_leader(meeting: Path, context: JobContext) -> int:
    deadline = time.monotonic() + MEETING_SECONDS
    while time.monotonic() < deadline:
        try:
            content = json.loads(meeting.read_bytes())
            if content["attempt"] == context.attempt:
                return int(content["port"])
        except FileNotFoundError:
            pass
        time.sleep(_POLL_SECONDS)
    raise never_came(context.rank, MEETING_SECONDS, [0])
