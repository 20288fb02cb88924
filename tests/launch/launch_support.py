"""Plans whose jobs are small real programs, and the processes that launch them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import tomli

from miles_olmo.base.processes import group_members
from miles_olmo.manifest.models import Manifest
from miles_olmo.plan.hashing import code_version
from miles_olmo.plan.model import (
    JobSpec,
    LocalFacts,
    PlanContent,
    Resolved,
    RunPlan,
    content_digest,
)
from miles_olmo.records.status import read_control

FAKE_JOBS = Path(__file__).parent / "fake_jobs"
QUICKSTART = Path(__file__).parents[2] / "manifests" / "quickstart.toml"


def make_plan(engines=1, prepare=False, name="tiny", steps=3, ranks=1, **changes) -> RunPlan:
    """A plan over the fake jobs; `changes` are keys of the manifest, "engines__max_restarts=0"."""
    values = tomli.loads(QUICKSTART.read_text())
    values["name"] = name
    values["train"]["steps"] = steps
    values["launch"] = {"stop_seconds": 1.0}
    values["engines"] |= {"count": engines, "startup_seconds": 10.0}
    for key, value in changes.items():
        table, _, field = key.partition("__")
        values.setdefault(table, {})[field] = value
    manifest = Manifest.model_validate(values)

    def job(name, role, module, processes=1):
        return JobSpec(
            name=name,
            role=role,
            module=module,
            processes=processes,
            device="cpu",
            threads=1,
            restartable=role == "engine",
        )

    jobs = [job("prepare", "prepare", "fake_prepare")] if prepare else []
    jobs += [job("trainer", "trainer", "fake_ranks" if ranks > 1 else "fake_trainer", ranks)]
    jobs += [job(f"engine-{index}", "engine", "fake_engine") for index in range(engines)]
    resolved = Resolved(
        samples_per_step=128,
        samples_per_update=128,
        max_sequence_tokens=18,
        max_tokens_per_step=2304,
        num_parameters=1000,
        num_active_parameters=1000,
        checkpoint_bytes=12000,
        constant_length=6,
        attention="blocked",
        bit_exact=True,
    )
    content = PlanContent(
        manifest=manifest, inputs=(), code=code_version(), jobs=tuple(jobs), resolved=resolved
    )
    local = LocalFacts(manifest_path=str(QUICKSTART), base_directory="/", created_at="")
    return RunPlan(digest=content_digest(content), content=content, local=local)


class Launcher:
    """Starts launches as real processes and ends what a failing test left."""

    def __init__(self, directory: Path):
        self.runs = directory / "runs"
        self.directory = directory
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(FAKE_JOBS)]),
        }
        self.children: list[subprocess.Popen] = []

    def write_plan(self, plan, name="plan.json"):
        path = self.directory / name
        path.write_text(json.dumps(plan.model_dump(mode="json")))
        return path

    def start(self, plan, *options, behave=None, program="attach.py", **environment):
        argv = [sys.executable, str(Path(__file__).parent / "programs" / program)]
        path = self.write_plan(plan) if plan else "-"
        child = subprocess.Popen(
            [*argv, str(path), str(self.runs), *options],
            env={**self.environment, "FAKE_JOBS": json.dumps(behave or {}), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def launch(self, plan, *options, behave=None, **environment):
        """Launch and wait: (exit code, the result's JSON, standard error)."""
        child = self.start(plan, *options, behave=behave, **environment)
        output, errors = child.communicate(timeout=60)
        return child.returncode, json.loads(output) if output.strip() else None, errors

    def run(self, run_id):
        from miles_olmo.base.rundir import RunDirectory

        return RunDirectory(self.runs / run_id)

    def groups(self):
        """Process groups of everything that any run here started."""
        pids = []
        for path in self.runs.glob("*/control.json"):
            control = read_control(self.run(path.parent.name))
            pids.append(control["supervisor"]["pid"])
            pids += [job["process"]["pid"] for job in control["jobs"].values()]
        return pids

    def nothing_left(self, seconds=10.0):
        return wait_until(lambda: not any(group_members(g) for g in self.groups()), seconds)


def wait_until(condition, seconds=15.0):
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
