"""Away from a terminal, progress is a line when something happened and otherwise now and then."""

from __future__ import annotations

import io

from launch_support import make_plan
from rich.console import Console

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch import progress
from miles_olmo.launch.progress import Progress
from miles_olmo.plan.read import write_plan
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.receipts import ReceiptLog


def test_lines_come_with_events_not_with_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "LIVE_SECONDS", 0.0)
    run = RunDirectory(tmp_path / "r")
    plan = make_plan(steps=40)
    write_plan(plan, run.plan)
    ReceiptLog(run.receipt_log("launcher"), "launcher").append("attempt-started", {"attempt": 1})
    text = io.StringIO()
    view = Progress(run, plan, Console(file=text, width=200))

    def shown():
        view._next_read = 0.0
        view.update()
        return [line.split(" · ")[0] for line in text.getvalue().splitlines()][1:]

    assert shown() == ["starting"]
    with MetricsLog(run.metrics) as metrics:
        metrics.append("train", 1, 1, {"rollout/reward": 0.5})
        assert shown() == ["starting", "train 1/40"]
        for step in range(2, 9):
            metrics.append("train", step, 1, {"rollout/reward": 0.5})
            assert len(shown()) == 2
        metrics.append("evaluation", 8, 1, {"eval/accuracy": 0.75})
        assert shown()[2:] == ["train 8/40"] and "accuracy 0.750" in text.getvalue()
    view.close()
    assert len(shown()) == 3 and "\x1b" not in text.getvalue()
