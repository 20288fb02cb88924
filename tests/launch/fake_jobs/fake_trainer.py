"""A trainer that writes metrics, samples and a checkpoint directory."""

from __future__ import annotations

import signal
import sys
import time

from job_support import begin

from miles_olmo.base.errors import TrainingError
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.records.samples import Sample, write_samples


def write_step(run, step):
    rows = [
        Sample(
            f"{step}.{i}", f"train:{i}", step, f"{i}{i + 1}", f"{i + 1}{i}", i / 2, "stop", step, 2
        )
        for i in range(3)
    ]
    write_samples(run.samples(step), rows)


def main():
    arguments = begin()
    behave = arguments.behave.get("trainer", {"steps": 3})
    if behave.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    receipts = ReceiptLog(arguments.run.receipt_log("trainer"), "trainer")
    receipts.append("prompts-read", {"attempt": arguments.attempt})
    run, first = arguments.run, 1 + max([0, *arguments.run.checkpoint_steps()])
    with MetricsLog(run.metrics) as metrics:
        for step in range(first, first + behave.get("steps", 3)):
            metrics.append(
                "train",
                step,
                arguments.attempt,
                {"train/loss": 1 / step, "rollout/reward": step / 10},
            )
            write_step(run, step)
            print(f"step {step}", flush=True)
            time.sleep(behave.get("step_seconds", 0.02))
        metrics.append("evaluation", step, arguments.attempt, {"eval/accuracy": 0.5})
    run.checkpoint(step).mkdir(parents=True, exist_ok=True)
    for number in range(behave.get("lines", 0)):
        print(f"line {number}", flush=True)
    if behave.get("fail") == "named":
        error = TrainingError("E512", "loss is NaN", why="it is", fix="lower it", loss=float("nan"))
        receipts.append_failure(error)
        sys.exit(error.exit_code)
    if behave.get("fail") == "bare":
        raise KeyError("a bug")
    time.sleep(behave.get("linger", 0))


main()
