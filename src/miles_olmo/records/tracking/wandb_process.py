"""The process that talks to Weights & Biases: `python -m miles_olmo.records.tracking.wandb_process`.

Reads JSON lines from standard input: first how to start, then one row each. Answers every line with
`{"row": is it a row, "fault": null or why it failed}`. Ends when its input does, at the latest
`finish_seconds` later, so that a dead connection or a killed trainer leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from miles_olmo.records.catalogue import CATALOGUE


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever W&B prints goes to the trainer's log

    def answer(act: Callable[[], Any], *, is_row: bool) -> Any:
        fault = result = None
        try:
            result = act()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        answers.write(json.dumps({"row": int(is_row), "fault": fault}) + "\n")
        answers.flush()
        return result

    settings = json.loads(sys.stdin.readline())
    run = answer(lambda: start(settings), is_row=False)
    for line in sys.stdin:
        answer(lambda text=line: _log(run, json.loads(text)), is_row=True)
    timer = threading.Timer(settings["finish_seconds"], os._exit, (1,))
    timer.daemon = True
    timer.start()
    if run is not None:
        answer(run.finish, is_row=False)


def start(settings: dict[str, Any]) -> Any:
    """Open the run. Nothing about the host, its user or its code is sent."""
    import wandb

    run = wandb.init(
        project=settings["project"],
        id=settings["id"],
        name=settings["id"],
        resume="allow" if settings["mode"] == "online" else None,
        mode=settings["mode"],
        dir=settings["directory"],
        config={**settings["config"], "attempt": settings["attempt"]},
        settings=wandb.Settings(
            console="off",
            quiet=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        ),
    )
    run.define_metric("warmup/*", step_metric="step/warmup")
    for prefix in sorted({name.partition("/")[0] for name in CATALOGUE}):
        run.define_metric(f"{prefix}/*", step_metric="step/train")
    return run


def _log(run: Any, row: dict[str, float]) -> None:
    if run is None:
        raise RuntimeError("W&B did not start; the row is lost")
    run.log(row)


if __name__ == "__main__":
    main()
