"""Whole runs whose trainer is several processes: the same run, killed, refused and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from conftest import Launch, Launcher, consumed
from miles_olmo.base.processes import group_members
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.status import read_status

pytestmark = pytest.mark.process

SAME = ("train/loss", "train/entropy", "router/load_imbalance", "rollout/reward")
SPREAD = ("--set", "train.parallel.expert=2", "--set", "engines.count=1")
SHORT = ("--set", "train.steps=8", "--set", "checkpoint.export=false")
BOUND = 1e-4
"""Metrics of later steps carry the roundings of earlier updates, which AdamW enlarges."""


def test_experts_and_data_over_four_processes_give_the_run_of_one(
    launch: Launcher, manifest: Path, whole: Launch
):
    data = ("--set", "train.parallel.data=2", "--set", "train.steps=6")
    run = launch(manifest, "four", *SPREAD, *data)
    assert run.wait() == 0, run.text()
    assert (run.run.export / "config.json").is_file()  # its logits were checked
    assert run.run.checkpoint_steps()[-1] == 6
    chain = merge_receipts(run.run.receipts)
    assert not chain.problems
    exits = [e["body"] for e in chain.events if e["type"] == "job-exited"]
    trainers = {e["job"]: e["exit_code"] for e in exits if e["role"] == "trainer"}
    assert trainers == {"trainer": 0, **{f"trainer-rank-{rank}": 0 for rank in (1, 2, 3)}}

    one, spread = consumed(whole), consumed(run)
    for step in range(1, 7):
        ours, theirs = (r.train_rows()[step - 1].values for r in (run, whole))
        assert ours["train/train_rollout_logprob_abs_diff_max"] == 0.0
        assert ours["router/replay_coverage"] == 1.0
        for name in SAME:
            assert ours[name] == pytest.approx(theirs[name], rel=BOUND, abs=BOUND), (step, name)
        if spread[step] != one[step]:  # a rounding sent a sample another way: runs part here
            break
    assert step >= 2, "the runs part at once"


def test_a_killed_process_is_named_and_the_run_resumes_exactly_where_it_was_saved(
    launch: Launcher, manifest: Path
):
    first = launch(manifest, "two", *SPREAD, *SHORT)
    first.wait_for(lambda: len(first.train_rows()) >= 6, "step 6")
    jobs = [first.job_pid(job) for job in ("trainer", "trainer-rank-1", "engine-0")]
    os.kill(jobs[1], signal.SIGKILL)
    started = time.monotonic()
    assert first.wait() == 6, first.text()
    assert time.monotonic() - started < 30
    assert "trainer-rank-1 was killed by SIGKILL" in first.text()
    error = read_status(first.run.root).error
    assert error and (error["job"], error["code"]) == ("trainer-rank-1", "E512")
    assert not any(group_members(pid) for pid in jobs)

    other = launch(manifest, "two", *SPREAD[2:], *SHORT, "--resume", "two")
    assert other.wait() == 4, other.text()
    assert "E144" in other.text() and "train.parallel.expert" in other.text()

    second = launch(manifest, "two", *SPREAD, *SHORT, "--resume", "two")
    assert second.wait() == 0, second.text()
    assert [row.step for row in second.train_rows()] == list(range(1, 9))
    rows = [json.loads(line) for line in second.run.metrics.read_text().splitlines()]
    repeated = {row["step"] for row in rows if row["phase"] == "train" and row["attempt"] == 1}
    repeated -= {1, 2, 3, 4}  # the newest checkpoint
    assert {5, 6} <= repeated
    for step in repeated:
        before, after = (_learned(rows, step, attempt) for attempt in (1, 2))
        assert before == after, step


def _learned(rows: list[dict], step: int, attempt: int) -> dict[str, float]:
    """What a step computed: every value but times."""
    (row,) = [r for r in rows if (r["phase"], r["step"], r["attempt"]) == ("train", step, attempt)]
    return {n: v for n, v in row["values"].items() if n.startswith(("train/", "router/"))}
