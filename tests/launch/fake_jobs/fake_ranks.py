"""One process of a trainer of several; each ends as it is told to."""

from __future__ import annotations

import os
import signal
import sys
import time

from job_support import begin

from miles_olmo.base.errors import TrainingError
from miles_olmo.records.receipts import ReceiptLog


def main():
    arguments = begin()
    rank = arguments.rank
    behave = arguments.behave["ranks"][rank]
    time.sleep(behave.get("after", 0.0))
    end = behave["end"]
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(120)
    if end.startswith("E"):
        name = f"trainer-rank-{rank}" if rank else "trainer"
        error = TrainingError(
            end, f"process {rank} says {end}", why="so", fix="so", sample_ids=["7.1"]
        )
        ReceiptLog(arguments.run.receipt_log(name), name).append_failure(error)
        sys.exit(error.exit_code)
    assert end == "well"


main()
