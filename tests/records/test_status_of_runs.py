"""The state of a run from its files alone, whatever state the files are in."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from miles_olmo.base.processes import ProcessIdentity
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.summary import (
    curve,
    duration,
    figures,
    outcome_text,
    progress_text,
    sparkline,
)
from miles_olmo.records.expert_load import ExpertLoadLog
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.records.samples import Sample, write_samples
from miles_olmo.records.status import directory_identity, list_runs, read_status

DEAD = ProcessIdentity(2**22 + 5, "1", "an earlier boot")


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "tiny-00000000-1")
    directory.root.mkdir(parents=True)
    manifest = {"name": "tiny", "train": {"steps": 50}}
    directory.plan.write_text(json.dumps({"digest": "d" * 64, "content": {"manifest": manifest}}))
    return directory


def supervise(run, identity, attempt=1, age=0.0):
    control = {
        "directory": directory_identity(run),
        **{"supervisor": identity.as_json(), "attempt": attempt, "state": "running", "jobs": {}},
    }
    run.control.write_text(json.dumps(control))
    moment = time.time() - age
    os.utime(run.control, (moment, moment))


def receive(run, *events, attempt=1, writer="launcher"):
    log = ReceiptLog(run.receipt_log(writer), writer)
    for type, body in events:
        log.append(type, {"attempt": attempt, **body})


def me():
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    return identity


def test_a_living_supervisor_means_running(run):
    supervise(run, me())
    receive(run, ("attempt-started", {}))
    status = read_status(run.root)
    assert (status.outcome, status.phase, status.step, status.total_steps) == (
        "running",
        "starting",
        0,
        50,
    )
    assert status.name == "tiny" and status.attempts[0].ended_at is None


def test_a_supervisor_that_is_gone_without_an_ending_means_crashed(run):
    receive(run, ("attempt-started", {}))
    supervise(run, ProcessIdentity(me().pid, "1", me().boot), age=100)
    status = read_status(run.root)
    assert status.outcome == "crashed" and status.since < status.attempts[0].started_at


def test_on_another_machine_a_fresh_control_file_means_running(run):
    receive(run, ("attempt-started", {}))
    supervise(run, DEAD, age=1)
    assert read_status(run.root).outcome == "running"
    supervise(run, DEAD, age=100)
    assert read_status(run.root).outcome == "crashed"


@pytest.mark.parametrize("identity", ["here", "elsewhere"])
def test_a_copy_of_a_living_run_is_told_from_the_run(run, identity):
    supervise(run, me() if identity == "here" else DEAD)
    receive(run, ("attempt-started", {}))
    copy = run.root.with_name("copy")
    shutil.copytree(run.root, copy)
    assert read_status(run.root).outcome == "running"
    status = read_status(copy)
    assert (status.outcome, status.copied_from) == ("crashed", str(run.root))
    assert outcome_text(status) == "a copy, not running" and not status.jobs
    run.root.rename(moved := run.root.with_name("moved"))
    assert read_status(moved).outcome == "running"
    receive(RunDirectory(copy), ("run-finished", {}))
    assert read_status(copy).copied_from is None  # a whole record, wherever it lies


@pytest.mark.parametrize("ending", ["finished", "failed", "cancelled"])
def test_an_ending_counts_even_while_the_supervisor_still_lives(run, ending):
    supervise(run, me())
    receive(run, ("attempt-started", {}), (f"run-{ending}", {"job": None, "error": None}))
    status = read_status(run.root)
    assert status.outcome == ending and status.since == status.attempts[0].ended_at


def test_a_new_attempt_forgets_the_failure_of_the_old_one(run):
    error = {"code": "E301", "what": "loss is NaN"}
    receive(run, ("attempt-started", {}), ("run-failed", {"job": "trainer", "error": error}))
    failed = read_status(run.root)
    assert failed.error == {"job": "trainer", **error}
    receive(run, ("attempt-started", {}), attempt=2)
    supervise(run, me(), attempt=2)
    status = read_status(run.root)
    assert (status.outcome, status.attempt, status.error) == ("running", 2, None)
    assert [attempt.outcome for attempt in status.attempts] == ["failed", "running"]


def test_after_a_crash_the_error_is_the_one_a_job_reported(run):
    receive(run, ("attempt-started", {}))
    time.sleep(0.002)
    receive(run, ("job-failed", {"code": "E301", "what": "loss is NaN"}), writer="trainer")
    error = read_status(run.root).error
    assert error is not None and (error["job"], error["code"]) == ("trainer", "E301")


def test_phases_follow_receipts_then_metrics_of_the_attempt(run):
    supervise(run, me())
    receive(run, ("attempt-started", {}), ("job-started", {"role": "prepare", "job": "prepare"}))
    assert progress_text(read_status(run.root)) == "preparing data"
    receive(run, ("job-exited", {"role": "prepare", "job": "prepare"}))
    assert progress_text(read_status(run.root)) == "starting"
    with MetricsLog(run.metrics) as metrics:
        metrics.append("warmup", 5, 1, {"eval/accuracy": 0.2})
        metrics.append("warmup", 6, 1, {"train/loss": 1.0})
        status = read_status(run.root)
        assert progress_text(status) == "warm-up step 6"
        assert figures(status) == {"warm-up accuracy": "0.200"}
        metrics.append("train", 1, 1, {"rollout/reward": 0.25, "perf/tokens_per_sec": 1234.5})
        metrics.append("train", 2, 1, {"rollout/reward": 0.5, "train/loss": 2.0})
    status = read_status(run.root)
    assert progress_text(status) == "train 2/50"
    assert figures(status)["tokens/s"] == "1,234" and figures(status)["reward"] == "0.500"
    assert curve(status, "train", "rollout/reward") == [(1, 0.25), (2, 0.5)]


def test_a_run_directory_that_holds_nothing_readable_is_still_shown(run):
    run.plan.write_bytes(b"\xff\xfe")
    run.control.write_text("[]")
    status = read_status(run.root)
    assert status.outcome == "crashed" and len(status.problems) == 1
    assert json.dumps(status.as_json(), allow_nan=False)
    (run.root / "engines").mkdir()
    (run.root / "engines" / "engine-0.json").write_text("{")
    assert read_status(run.root).engines == ()


def test_records_that_were_written_once_and_are_gone_are_damage(run):
    receive(run, ("attempt-started", {}), ("run-finished", {}))
    assert read_status(run.root).problems == ()  # the trainer never got to write anything
    receive(run, ("prompts-read", {}), writer="trainer")
    run.checkpoint(3).mkdir(parents=True)
    (problem,) = read_status(run.root).problems
    assert "metrics.jsonl: it is missing" in problem
    with MetricsLog(run.metrics) as metrics:
        metrics.append("train", 1, 1, {"rollout/reward": 0.5})
    assert read_status(run.root).problems == ()
    for writer in ("launcher", "trainer"):
        run.receipt_log(writer).rename(run.root / "moved")
        status = read_status(run.root)
        assert [f"{writer}.jsonl: it is missing" in p for p in status.problems] == [True]
        assert outcome_text(status).endswith("records damaged")
        (run.root / "moved").rename(run.receipt_log(writer))


def records(run):
    """A finished run of two steps, whole."""
    receive(run, ("attempt-started", {}), ("run-finished", {}))
    receive(run, ("prompts-read", {}), writer="trainer")
    with MetricsLog(run.metrics) as metrics, ExpertLoadLog(run.expert_load) as loads:
        for step in (1, 2):
            metrics.append("train", step, 1, {"rollout/reward": 0.5})
            loads.append(step, 1, [[1.0, 1.0]])
            sample = Sample(f"{step}.0", "train:1", step, "12", "21", 1.0, "stop", step, 2)
            write_samples(run.samples(step), [sample, sample])
    return {"metrics": run.metrics, "expert_load": run.expert_load, "samples": run.samples(1)}


@pytest.mark.parametrize("name", ["metrics", "expert_load", "samples"])
@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda lines: [b"{", *lines[1:]], ":1: not "),
        (lambda lines: [lines[0], b'{"step": 2}', b""], ":2: not "),
        (lambda lines: [lines[0], b"\xff\xfe", b""], ":2: not "),
        (lambda lines: [lines[0], lines[1][:-5]], ""),  # cut off
    ],
)
def test_every_damaged_line_of_every_record_is_named(run, name, damage, place):
    paths = records(run)
    assert read_status(run.root, every_record=True).problems == ()
    path = paths[name]
    path.write_bytes(b"\n".join(damage(path.read_bytes().split(b"\n"))))
    (problem,) = read_status(run.root, every_record=True).problems
    assert problem.startswith(f"{path}{place}")


def test_a_line_that_is_being_written_is_no_damage(run):
    records(run)
    receive(run, ("attempt-started", {}), attempt=2)
    for path in (run.metrics, run.expert_load):
        path.write_bytes(path.read_bytes() + b'{"step": 3')
    assert read_status(run.root, every_record=True).problems == ()


def test_samples_are_looked_through_from_the_newest_back_within_a_bound(run, monkeypatch):
    records(run)
    for step in (1, 2):
        run.samples(step).write_bytes(b"damaged\n" * 20)
    assert len(read_status(run.root, every_record=True).problems) == 40
    assert read_status(run.root).problems == ()
    monkeypatch.setattr("miles_olmo.records.samples.CHECKED_BYTES", 200)
    problems = read_status(run.root, every_record=True).problems
    assert len(problems) == 20 and all("step-000002" in problem for problem in problems)


DAMAGES = {
    "a directory for receipts": lambda run: _replace(run.receipt_log("launcher"), b"directory"),
    "a directory for metrics": lambda run: _replace(run.metrics, b"directory"),
    "a directory for the plan": lambda run: _replace(run.plan, b"directory"),
    "a file for all receipts": lambda run: (shutil.rmtree(run.receipts), run.receipts.touch()),
    "an edited receipt": lambda run: _replace(
        run.receipt_log("launcher"), run.receipt_log("launcher").read_bytes().replace(b"2", b"3")
    ),
    "jobs that are none": lambda run: _replace(run.control, b'{"jobs": {"trainer": 7}}'),
    "a plan that is none": lambda run: _replace(run.plan, b'{"content": 5, "digest": 7}'),
    "a manifest that is none": lambda run: _replace(run.plan, b'{"content": {"manifest": [1]}}'),
}


def _replace(path, content):
    path.unlink(missing_ok=True)
    path.mkdir() if content == b"directory" else path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_damaged_run_never_hides_the_others(run, tmp_path, damage):
    other = RunDirectory(tmp_path / "runs" / "whole")
    for each in (run, other):
        each.root.mkdir(exist_ok=True)
        each.plan.write_text("{}")
        receive(each, ("attempt-started", {}), ("run-finished", {}))
        receive(each, ("prompts-read", {}), writer="trainer")
        with MetricsLog(each.metrics) as metrics:
            metrics.append("train", 1, 1, {"rollout/reward": 0.5})
    DAMAGES[damage](run)
    statuses = {status.run_id: status for status in list_runs(tmp_path / "runs")}
    assert outcome_text(statuses["whole"]) == "finished"
    damaged = statuses[run.run_id]
    assert json.dumps(damaged.as_json(), allow_nan=False)
    assert bool(damaged.problems) == (
        "that is none" not in damage and "that are none" not in damage
    )


def test_a_run_that_trained_nothing_does_not_look_finished(run):
    receive(run, ("attempt-started", {}), ("run-finished", {}))
    receive(run, ("prompts-read", {}), writer="trainer")
    with MetricsLog(run.metrics) as metrics:
        metrics.append("train", 1, 1, {"rollout/skipped_step": 1.0})
        metrics.append("train", 2, 1, {"rollout/skipped_step": 1.0})
        status = read_status(run.root)
        assert outcome_text(status) == "finished, every step skipped"
        assert status.skipped_steps == 2
        metrics.append("train", 3, 1, {"rollout/skipped_step": 0.0})
    assert outcome_text(read_status(run.root)) == "finished"


def test_runs_are_listed_by_their_start(run, tmp_path):
    receive(run, ("attempt-started", {}))
    time.sleep(0.002)
    other = RunDirectory(tmp_path / "runs" / "a-later-run")
    other.root.mkdir()
    other.plan.write_text("{}")
    receive(other, ("attempt-started", {}))
    (tmp_path / "runs" / "no-run").mkdir()
    assert [s.run_id for s in list_runs(tmp_path / "runs")] == ["tiny-00000000-1", "a-later-run"]
    assert list_runs(tmp_path / "none") == []


def test_texts_for_people():
    assert [duration(s) for s in (5, 65, 7500, 180000)] == [
        "5 s",
        "1 min 5 s",
        "2 h 5 min",
        "2 d 2 h",
    ]
    assert sparkline([0, 1]) == "▁█" and sparkline([]) == "" and sparkline([3, 3]) == "▁▁"
    assert len(sparkline(list(range(1000)), width=40)) == 40
