"""Several trainer processes: the run ends soon after the first of them, with the error that matters."""

from __future__ import annotations

import time

import pytest
from launch_support import make_plan

from miles_olmo.launch.trainer_ranks import LAST_WORDS_SECONDS
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.status import read_status

pytestmark = pytest.mark.process


def run_ranks(launcher, *behave):
    """Launch trainer processes that end as told: exit code, the run-failed event, status."""
    plan = make_plan(ranks=len(behave))
    code, result, errors = launcher.launch(plan, "--name", "r", behave={"ranks": behave})
    assert result, errors
    run = launcher.run("r")
    chain = merge_receipts(run.receipts)
    assert chain.problems == ()
    failed = [event["body"] for event in chain.events if event["type"] == "run-failed"]
    assert launcher.nothing_left()
    return code, failed[0] if failed else None, read_status(run.root)


def test_a_run_finishes_when_all_processes_have(launcher):
    code, failed, status = run_ranks(launcher, {"end": "well"}, {"end": "well", "after": 0.5})
    assert (code, failed, status.outcome) == (0, None, "finished")
    names = {job.name for job in status.jobs}
    assert {"trainer", "trainer-rank-1"} <= names
    logs = {path.name for path in launcher.run("r").logs(1).iterdir()}
    assert {"trainer.log", "trainer-rank-1.log"} <= logs


def test_the_error_of_one_process_comes_before_the_broken_connections_of_the_others(launcher):
    lost = {"end": "E300"}
    code, failed, status = run_ranks(launcher, lost, lost, {"end": "E315", "after": 0.5})
    assert code == 6
    assert failed["job"] == "trainer-rank-2"
    assert failed["error"]["code"] == "E315"
    assert failed["error"]["details"]["sample_ids"] == ["7.1"]
    assert status.error["what"] == "process 2 says E315"


def test_a_killed_process_is_named_although_others_report_its_loss(launcher):
    code, failed, status = run_ranks(
        launcher, {"end": "E300", "after": 0.3}, {"end": "killed"}, {"end": "E301", "after": 0.3}
    )
    assert code == 6
    assert failed["job"] == "trainer-rank-1"
    assert failed["error"]["code"] == "E512"
    assert "trainer-rank-1 was killed by SIGKILL" in status.error["what"]


def test_a_process_that_hangs_is_ended_within_the_bounds_and_the_one_that_named_it_is_heard(
    launcher,
):
    started = time.monotonic()
    code, failed, _ = run_ranks(launcher, {"end": "E301"}, {"end": "hangs"}, {"end": "E300"})
    assert code == 6
    assert failed["error"]["code"] == "E301"
    stop_seconds = 1.0  # of these plans
    assert time.monotonic() - started < LAST_WORDS_SECONDS + stop_seconds + 15
