"""Runs made with the real writers, for tests that read them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.records.catalogue import CATALOGUE
from miles_olmo.records.expert_load import ExpertLoadLog
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.records.samples import Sample, write_samples

MACHINE = {
    "python": "3.11.7",
    "platform": "Linux-x86_64",
    "cpu": "A processor",
    "cpu_count": 2,
    "packages": {"torch": "2.13.0"},
    "git_commit": "c0ffee",
}
SETTINGS = {"name": "tiny", "train": {"steps": 20}, "warmup": {}, "evaluation": {}}


def make_run(directory: Path, *, steps: int = 20, start: bool = True, **manifest) -> RunDirectory:
    """A finished run whose every metric of the catalogue has values."""
    run = begin(directory, {**SETTINGS, "warmup": {"x": 1}, "evaluation": {"x": 1}, **manifest})
    if start:
        write_steps(run, range(1, steps + 1))
        end(run)
    return run


def begin(directory: Path, manifest: dict) -> RunDirectory:
    """A plan and the receipts of a first attempt."""
    run = RunDirectory(directory)
    directory.mkdir(parents=True)
    jobs = [{"role": "trainer", "processes": 1}, {"role": "engine", "processes": 2}]
    content = {"manifest": manifest, "jobs": jobs}
    run.plan.write_text(json.dumps({"digest": "d" * 64, "content": content}))
    launcher(run).append("attempt-started", {"attempt": 1, **MACHINE})
    ReceiptLog(run.receipt_log("trainer"), "trainer").append(
        "prompts-read", {"usable": 9, "over_max_prompt_tokens": 2}
    )
    return run


def launcher(run: RunDirectory) -> ReceiptLog:
    return ReceiptLog(run.receipt_log("launcher"), "launcher")


def end(run: RunDirectory, attempt: int = 1) -> None:
    launcher(run).append("run-finished", {"attempt": attempt})


def write_steps(run: RunDirectory, steps, attempt: int = 1, completion: str = "21<eos>") -> None:
    """Rows of training steps, with a warm-up before step 1 and an evaluation every 5 steps."""
    with MetricsLog(run.metrics) as metrics, ExpertLoadLog(run.expert_load) as loads:
        if 1 in steps:
            for step in range(4):
                metrics.append("warmup", step, attempt, values("warmup", step))
            metrics.append("evaluation", 0, attempt, values("evaluation", 0))
        for step in steps:
            loads.append(step, attempt, [[0.0, 1.0 + step / 100, 2 - step / 100, 1.0]] * 2)
            metrics.append("train", step, attempt, values("train", step))
            if step % 5 == 0:
                metrics.append("evaluation", step, attempt, values("evaluation", step))
            write_samples(run.samples(step), [sample(step, i, completion) for i in range(9)])


def values(phase: str, step: int) -> dict[str, float]:
    """Every metric of a phase, from 0 to 1 and different at every step."""
    names = [metric.name for metric in CATALOGUE.values() if phase in metric.phases]
    found = {name: 0.5 + 0.4 * math.sin(step + i) for i, name in enumerate(names)}
    return {**found, **{name: 0 for name in names if CATALOGUE[name].counts}}


def sample(step: int, index: int, completion: str) -> Sample:
    return Sample(
        f"{step}.{index}", "train:4", step, "rev 12=", completion, index / 8, "stop", step, 3
    )
