"""One small run, whole, and the same run with its processes killed: the records must agree."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from conftest import CANARY, Launch, Launcher, consumed, losses
from miles_olmo.api import report
from miles_olmo.base.processes import group_members
from miles_olmo.records.catalogue import CATALOGUE
from miles_olmo.records.metrics import read_metrics
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.samples import sample_steps

pytestmark = pytest.mark.process

LARGEST = "train/train_rollout_logprob_abs_diff_max"


def test_a_run_leaves_checkpoint_export_metrics_samples_and_an_intact_receipt_chain(whole: Launch):
    assert whole.run.checkpoint_steps()[-1] == 12
    assert (whole.run.export / "config.json").is_file()
    assert [row.step for row in whole.train_rows()] == list(range(1, 13))
    assert sample_steps(whole.run.root / "samples") == list(range(1, 13))
    chain = merge_receipts(whole.run.receipts)
    assert not chain.problems
    kinds = [event["type"] for event in chain.events]
    for kind in (
        "inputs-prepared",
        "warmup-finished",
        "checkpoint-saved",
        "exported",
        "run-finished",
    ):
        assert kind in kinds


def test_a_runs_metrics_are_those_of_the_catalogue_in_the_phases_and_rows_that_it_names(
    whole: Launch,
):
    rows = read_metrics(whole.run.metrics).rows
    for row in rows:
        for name in row.values:
            assert row.phase in CATALOGUE[name].phases, name
    for metric in CATALOGUE.values():
        for phase in metric.phases:
            of_phase = [row for row in rows if row.phase == phase]
            if metric.name.startswith("train/") and phase == "train":
                of_phase = [row for row in of_phase if "train/num_groups" in row.values]
            has = [metric.name in row.values for row in of_phase[1 if phase == "warmup" else 0 :]]
            if "is on" in metric.when and not metric.name.startswith("router/"):
                assert not any(has), f"{metric.name} is recorded although {metric.when} is not so"
            else:
                assert any(has) if metric.when else all(has), f"{metric.name} in {phase}"


def test_the_report_of_a_run_has_data_in_every_plot(whole: Launch, tmp_path: Path):
    result = report(whole.run.root, output=tmp_path / "index.html")
    assert {plot.name: plot.notes for plot in result.plots if plot.notes} == {}


def test_the_policy_changes_and_is_evaluated(whole: Launch):
    rows = whole.train_rows()
    assert any(row.values["rollout/skipped_step"] == 0 for row in rows)
    assert [row.step for row in read_metrics(whole.run.metrics).of("evaluation")] == [0, 6, 12]


def test_trainer_and_engine_logprobs_are_bit_identical_and_every_route_is_replayed(whole: Launch):
    trained = [row.values for row in whole.train_rows() if LARGEST in row.values]
    assert trained
    assert {values[LARGEST] for values in trained} == {0.0}
    assert {values["router/replay_coverage"] for values in trained} == {1.0}


def test_no_secret_of_the_environment_and_no_token_is_left_in_any_file(whole: Launch):
    assert not whole.run.token.exists()
    for path in whole.run.root.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in whole.text()


def test_a_trainer_killed_in_mid_run_resumes_with_the_same_samples_and_losses(
    launch: Launcher, manifest: Path, whole: Launch
):
    first = launch(manifest, "resumed")
    first.wait_for(lambda: len(first.train_rows()) >= 6, "step 6")
    os.kill(first.job_pid("trainer"), signal.SIGKILL)
    assert first.wait() == 6, first.text()
    assert "trainer" in first.text()
    second = launch(manifest, "resumed", "--resume", "resumed")
    assert second.wait() == 0, second.text()
    assert consumed(second) == consumed(whole)
    assert losses(second) == losses(whole)
    for name in ("rollout/engine/groups", "rollout/engine/requests", "rollout/engine/publications"):
        after, expected = ([row.values[name] for row in r.train_rows()] for r in (second, whole))
        assert after == sorted(after), name
        # A resume publishes its checkpoint's version once more.
        assert after[-1] - expected[-1] == (name == "rollout/engine/publications"), name


def test_a_collapse_alarm_stops_the_run_at_a_checkpoint_from_which_it_can_go_on(
    launch: Launcher, manifest: Path
):
    changes = (
        *("--set", 'train.collapse_alarm={share=1.0, steps=3, action="stop"}'),
        *("--set", "logging.tensorboard=true"),
    )
    first = launch(manifest, "collapsed", *changes)  # some expert is always below its share
    assert first.wait() == 6, first.text()
    assert "E318: experts collapsed at step" in first.text()
    steps = [row.step for row in first.train_rows()]
    assert len(steps) < 12 and first.run.checkpoint_steps()[-1] == steps[-1]
    (warning,) = [
        event["body"]
        for event in merge_receipts(first.run.receipts).events
        if event["type"] == "experts-collapsed"
    ]
    assert warning["step"] == steps[-1] and warning["layers"]
    assert {"router/collapsed_experts", "logging/tensorboard_faults"} <= set(
        first.train_rows()[-1].values
    )
    more = (*changes[:1], 'train.collapse_alarm={share=1.0, steps=3, action="warn"}', *changes[2:])
    second = launch(manifest, "collapsed", *more, "--resume", "collapsed", "--accept-changes")
    assert second.wait() == 0, second.text()
    assert [row.step for row in second.train_rows()] == list(range(1, 13))
    assert len(list((second.run.root / "tensorboard").iterdir())) == 2


def test_an_engine_killed_in_mid_run_is_restarted_and_changes_no_sample(
    launch: Launcher, manifest: Path, whole: Launch
):
    run = launch(manifest, "engine-killed")
    run.wait_for(lambda: len(run.train_rows()) >= 3, "step 3")
    os.kill(run.job_pid("engine-0"), signal.SIGKILL)
    assert run.wait() == 0, run.text()
    kinds = [
        json.loads(line)["type"]
        for line in run.run.receipt_log("launcher").read_text().splitlines()
    ]
    assert "engine-restarted" in kinds
    assert consumed(run) == consumed(whole)
    assert losses(run) == losses(whole)


def test_a_killed_supervisor_leaves_no_process_and_the_run_resumes_with_the_same_samples(
    launch: Launcher, manifest: Path, whole: Launch
):
    first = launch(manifest, "supervisor-killed")
    first.wait_for(lambda: len(first.train_rows()) >= 2, "step 2")
    jobs = [first.job_pid(job) for job in ("trainer", "engine-0", "engine-1")]
    first.process.kill()
    first.process.wait()
    deadline = time.monotonic() + 10
    while any(group_members(pid) for pid in jobs):  # each leads a group
        assert time.monotonic() < deadline, "a job outlived its supervisor"
        time.sleep(0.05)
    second = launch(manifest, "supervisor-killed", "--resume", "supervisor-killed")
    assert second.wait() == 0, second.text()
    assert consumed(second) == consumed(whole)
    assert losses(second) == losses(whole)
