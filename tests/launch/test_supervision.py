"""A run ends as it should, says why, and leaves nothing behind, whatever happens to its processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat

import pytest
from launch_support import make_plan, wait_until

from miles_olmo.base.processes import group_members
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.status import read_control, read_status

pytestmark = pytest.mark.process
LONG = {"trainer": {"steps": 500, "step_seconds": 0.1}}


def types(run):
    chain = merge_receipts(run.receipts)
    assert chain.problems == ()
    return [event["type"] for event in chain.events if event["writer"] == "launcher"]


def event(run, type):
    return [e for e in merge_receipts(run.receipts).events if e["type"] == type][-1]["body"]


def is_training(launcher, name):
    return lambda: read_status(launcher.runs / name).step > 0


def start_training(launcher, plan, *options, **more):
    more.setdefault("behave", LONG)
    child = launcher.start(plan, "--name", "r", *options, **more)
    assert wait_until(is_training(launcher, "r")), child.communicate(timeout=5)
    return child


def test_a_run_prepares_serves_trains_and_finishes(launcher):
    plan = make_plan(engines=2, prepare=True)
    code, result, errors = launcher.launch(plan)
    assert code == 0, errors
    assert result["run_id"] == f"tiny-{plan.digest[:8]}-1" and result["outcome"] == "finished"
    run = launcher.run(result["run_id"])
    order = types(run)
    assert order[:3] == ["plan-accepted", "attempt-started", "job-started"]
    assert order[-1] == "run-finished" and order.count("job-exited") == 4
    started = [
        e["body"]["job"] for e in merge_receipts(run.receipts).events if e["type"] == "job-started"
    ]
    assert started[0] == "prepare" and sorted(started[1:]) == ["engine-0", "engine-1", "trainer"]
    facts = event(run, "attempt-started")
    assert (
        facts["packages"]["pydantic"]
        and facts["cpu"]
        and os.uname().nodename not in json.dumps(facts)
    )
    assert not run.token.exists()
    status = read_status(run.root)
    assert (status.outcome, status.phase, status.step, status.total_steps) == (
        "finished",
        "train",
        3,
        3,
    )
    assert status.checkpoints == (3,) and status.evaluations[0].values == {"eval/accuracy": 0.5}
    assert not any(job.alive for job in status.jobs) and status.problems == ()
    logs = {path.name for path in run.logs(1).iterdir()}
    assert logs == {"prepare.log", "trainer.log", "engine-0.log", "engine-1.log"}
    tokens = [(run.logs(1) / f"engine-{i}.log").read_text().split("token ")[1] for i in (0, 1)]
    assert tokens[0] == tokens[1]


def test_a_secret_of_the_environment_reaches_the_jobs_and_no_file(launcher):
    secret = "canary-5f1d0c2e77"
    code, _, _ = launcher.launch(make_plan(prepare=True), MILES_CANARY_SECRET=secret)
    assert code == 0
    files = [path for path in launcher.runs.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_killing_the_supervisor_leaves_no_process(launcher):
    child = start_training(
        launcher, make_plan(engines=2), behave={**LONG, "engine-0": "child", "trainer": {**LONG["trainer"], "stubborn": True}}
    )  # fmt: skip
    groups = launcher.groups()
    assert wait_until(lambda: sum(len(group_members(group)) for group in groups) == 5)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert launcher.nothing_left(10)
    status = read_status(launcher.runs / "r")
    assert status.outcome == "crashed" and not any(job.alive for job in status.jobs)
    assert status.step > 0 and status.attempts[0].ended_at is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_run_in_an_orderly_way(launcher, number):
    child = start_training(launcher, make_plan())
    assert launcher.run("r").token.exists()
    assert stat.S_IMODE(launcher.run("r").token.stat().st_mode) == 0o600
    child.send_signal(number)
    output, _ = child.communicate(timeout=10)
    assert child.returncode == 130 and json.loads(output)["outcome"] == "cancelled"
    assert types(launcher.run("r"))[-1] == "run-cancelled"
    assert read_status(launcher.runs / "r").outcome == "cancelled"
    assert not launcher.run("r").token.exists() and launcher.nothing_left(0.5)


def test_a_second_interrupt_does_not_wait_for_the_grace_period(launcher):
    behave = {"trainer": {**LONG["trainer"], "stubborn": True}}
    child = start_training(launcher, make_plan(launch__stop_seconds=50.0), behave=behave)
    child.send_signal(signal.SIGINT)
    assert wait_until(lambda: read_control(launcher.run("r"))["state"] == "stopping")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=5)
    assert child.returncode == 130 and launcher.nothing_left(0.5)


def test_a_process_of_a_job_that_ignores_sigterm_is_ended_too(launcher):
    code, _, _ = launcher.launch(make_plan(), "--name", "r", behave={"engine-0": "child"})
    assert code == 0 and launcher.nothing_left(0.5)


def test_a_failing_trainer_gives_its_own_error_and_its_last_lines(launcher):
    behave = {"trainer": {"fail": "named", "lines": 40}}
    code, result, _ = launcher.launch(make_plan(), "--name", "r", behave=behave)
    assert code == 6 and result["outcome"] == "failed"
    assert (result["error"]["job"], result["error"]["what"]) == ("trainer", "loss is NaN")
    assert result["last_lines"] == [f"line {number}" for number in range(20, 40)]
    assert event(launcher.run("r"), "run-failed")["error"]["details"]["loss"] == "nan"
    assert launcher.nothing_left(0.5)


def test_a_trainer_that_crashes_shows_its_traceback(launcher):
    code, result, _ = launcher.launch(make_plan(), behave={"trainer": {"fail": "bare"}})
    assert code == 6 and result["last_lines"][-1] == "KeyError: 'a bug'"
    assert result["error"]["code"] == "E512" and "exited with code 1" in result["error"]["what"]


def test_a_killed_trainer_is_named_with_its_signal(launcher):
    child = start_training(launcher, make_plan())
    trainer = read_control(launcher.run("r"))["jobs"]["trainer"]["process"]["pid"]
    os.kill(trainer, signal.SIGKILL)
    output, _ = child.communicate(timeout=10)
    assert child.returncode == 6 and "SIGKILL" in json.loads(output)["error"]["what"]


def test_a_failing_prepare_job_ends_the_run_before_anything_else_starts(launcher):
    code, result, _ = launcher.launch(
        make_plan(prepare=True), "--name", "r", behave={"prepare": "fail"}
    )
    assert code == 6 and result["error"]["code"] == "E513"
    assert result["last_lines"] == ["cannot prepare"]
    assert types(launcher.run("r")).count("job-started") == 1


def kill_engine(launcher):
    status = read_status(launcher.runs / "r")
    os.kill(status.engines[0].pid, signal.SIGKILL)
    return status.engines[0]


def test_a_dead_engine_is_restarted_once_then_the_run_fails_naming_it(launcher):
    child = start_training(launcher, make_plan(engines=1))
    assert wait_until(lambda: types(launcher.run("r")).count("engine-ready") == 1)
    first = kill_engine(launcher)
    ready = lambda: types(launcher.run("r")).count("engine-ready") == 2  # noqa: E731
    assert wait_until(ready)
    status = read_status(launcher.runs / "r")
    assert status.outcome == "running" and status.engines[0].pid != first.pid
    assert event(launcher.run("r"), "engine-restarted")["exit_code"] == -9
    assert [job.restarts for job in status.jobs if job.name == "engine-0"] == [1]
    log = (launcher.run("r").logs(1) / "engine-0.log").read_text()
    assert log.count("threads 1") == 2 and "--- started again, restart 1 ---" in log
    kill_engine(launcher)
    output, _ = child.communicate(timeout=10)
    error = json.loads(output)["error"]
    assert child.returncode == 6 and (error["code"], error["job"]) == ("E511", "engine-0")


def test_an_engine_that_stops_answering_is_killed_and_restarted(launcher):
    child = start_training(launcher, make_plan(engines=1, engines__health_seconds=0.3))
    assert wait_until(lambda: types(launcher.run("r")).count("engine-ready") == 1)
    first = read_status(launcher.runs / "r").engines[0]
    os.kill(first.pid, signal.SIGSTOP)
    assert wait_until(lambda: types(launcher.run("r")).count("engine-ready") == 2)
    assert event(launcher.run("r"), "engine-hung")["seconds"] >= 0.9
    assert read_status(launcher.runs / "r").engines[0].pid != first.pid
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=10)
    assert launcher.nothing_left(5)


@pytest.mark.parametrize("detached", [False, True])
def test_a_directory_that_is_moved_ends_the_run_and_can_be_resumed_where_it_is(launcher, detached):
    options = ["--detach"] if detached else []
    child = launcher.start(make_plan(), "--name", "r", *options, behave=LONG)
    assert wait_until(is_training(launcher, "r")), child.communicate(timeout=5)
    if detached:
        child.communicate(timeout=15)
    old = launcher.run("r")
    old.root.rename(launcher.runs / "moved")
    moved = launcher.run("moved")
    assert wait_until(lambda: read_status(moved.root).outcome == "failed")
    assert launcher.nothing_left(10)
    status = read_status(moved.root)
    assert status.error and status.error["code"] == "E521" and status.problems == ()
    assert f"moved to {moved.root}" in status.error["what"]
    assert str(moved.root) in status.error["fix"]
    assert not old.root.exists() and not moved.token.exists()
    if not detached:
        output, _ = child.communicate(timeout=10)
        result = json.loads(output)
        assert (child.returncode, result["error"]["code"]) == (6, "E521")
        assert result["directory"] == str(moved.root)
    code, result, errors = launcher.launch(None, "--resume", str(moved.root))
    assert (code, result["outcome"]) == (0, "finished"), errors


def test_a_directory_that_is_removed_ends_the_run_and_is_not_made_anew(launcher):
    child = start_training(launcher, make_plan())
    groups = launcher.groups()
    root = launcher.run("r").root
    root.rename(launcher.directory / "bin")  # at once, as a removal takes a while
    shutil.rmtree(launcher.directory / "bin", ignore_errors=True)
    output, errors = child.communicate(timeout=20)
    assert child.returncode == 6 and "E521" in errors, output + errors
    assert wait_until(lambda: not any(group_members(group) for group in groups), 10)
    assert not root.exists()


def test_an_engine_that_says_why_it_cannot_start_is_not_started_again(launcher):
    code, result, _ = launcher.launch(
        make_plan(), "--name", "r", behave={**LONG, "engine-0": "refuse"}
    )
    assert code == 6 and result["error"]["what"] == "no weights"
    assert "engine-restarted" not in types(launcher.run("r"))


def test_an_engine_that_does_not_come_up_in_time_is_named(launcher):
    plan = make_plan(engines=2, engines__startup_seconds=1.0)
    code, result, _ = launcher.launch(plan, behave={**LONG, "engine-1": "never"})
    assert code == 6 and (result["error"]["code"], result["error"]["job"]) == ("E510", "engine-1")


def test_other_processes_are_left_alone(launcher):
    """The supervisor's own session holds another process, which must outlive the run."""
    child = start_training(launcher, make_plan(), program="beside.py")
    assert child.stdout is not None
    bystander = int(child.stdout.readline())
    child.send_signal(signal.SIGINT)
    child.wait(timeout=10)
    os.kill(bystander, 0)
    os.kill(bystander, signal.SIGKILL)
