"""Real runs of a small manifest: real trainer, engines and supervisor processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.records.metrics import MetricRow, read_metrics
from miles_olmo.records.samples import read_samples, sample_steps

QUICKSTART = Path(__file__).parents[2] / "manifests" / "quickstart.toml"
CANARY = "canary-8d1f7c-never-written"
LIMIT_SECONDS = 240


def small_manifest(directory: Path) -> Path:
    """The quickstart with two digits and few steps: learns something within seconds."""
    text = QUICKSTART.read_text()
    for old, new in (
        ("digits = 4", "digits = 2"),
        ("num_train = 4096", "num_train = 72"),
        ("num_evaluation = 256", "num_evaluation = 28"),
        ("num_prompts = 256", "num_prompts = 28"),
        ("evaluate_every = 5\n", "evaluate_every = 2\n"),
        ("max_accuracy = 0.40", "max_accuracy = 0.80"),
        ("max_response_tokens = 6", "max_response_tokens = 4"),
        ("prompts_per_step = 16", "prompts_per_step = 8"),
        ("samples_per_prompt = 8", "samples_per_prompt = 4"),
        ("steps = 300", "steps = 12"),
        ("max_tokens = 1024", "max_tokens = 128"),
        ("every_steps = 100", "every_steps = 4"),
        ("every_steps = 50", "every_steps = 6"),
    ):
        assert text.count(old) >= 1, f"the quickstart has no {old!r} any more"
        text = text.replace(old, new)
    path = directory / "small.toml"
    path.write_text(text)
    return path


@dataclass
class Launch:
    """A `miles launch` in a process of its own."""

    process: subprocess.Popen[str]
    run: RunDirectory
    output: Path

    def wait(self) -> int:
        return self.process.wait(LIMIT_SECONDS)

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition()` holds; fails if the run ends first."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.text()}"
            time.sleep(0.02)

    def train_rows(self) -> tuple[MetricRow, ...]:
        return read_metrics(self.run.metrics).of("train")

    def job_pid(self, job: str) -> int:
        """Process id of a live job, from the supervisor's receipts."""
        lines = self.run.receipt_log("launcher").read_text().splitlines()
        started = [json.loads(line) for line in lines]
        pids = [
            e["body"]["pid"]
            for e in started
            if e["type"] == "job-started" and e["body"]["job"] == job
        ]
        return pids[-1]


@dataclass
class Launcher:
    """Starts launches and ends those that a failing test left running."""

    directory: Path
    launches: list[Launch] = field(default_factory=list)

    def __call__(self, manifest: Path, name: str, *options: str) -> Launch:
        output = self.directory / f"{name}-{len(self.launches)}.out"
        command = [sys.executable, "-m", "miles_olmo", "launch", str(manifest), *options]
        resumes = "--resume" in options
        if not resumes:
            command += ["--name", name]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, "--runs", str(self.directory / "runs")],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "MILES_CANARY_SECRET": CANARY, "HF_TOKEN": CANARY},
            )
        launch = Launch(process, RunDirectory(self.directory / "runs" / name), output)
        self.launches.append(launch)
        return launch


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    yield launcher
    for item in launcher.launches:
        if item.process.poll() is None:
            item.process.send_signal(signal.SIGINT)
            item.process.wait(60)


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_manifest(tmp_path_factory.mktemp("manifest"))


@pytest.fixture(scope="session")
def whole(launch: Launcher, manifest: Path) -> Launch:
    """A run that nothing happened to."""
    run = launch(manifest, "whole")
    assert run.wait() == 0, run.text()
    return run


def consumed(run: Launch) -> dict[int, list[tuple[str, str, float]]]:
    """Sample ids, completions and rewards per step."""
    directory = run.run.root / "samples"
    return {
        step: [(s.sample_id, s.completion, s.reward) for s in read_samples(run.run.samples(step))]
        for step in sample_steps(directory)
    }


def losses(run: Launch) -> list[tuple[int, float | None, float | None]]:
    """Step, loss and gradient norm: the curve that a resumed run must continue exactly."""
    return [
        (row.step, row.values.get("train/loss"), row.values.get("train/grad_norm"))
        for row in run.train_rows()
    ]
