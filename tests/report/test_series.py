"""What a report reads: the attempt that counts, and counts of everything that went wrong."""

from __future__ import annotations

from recorded_runs import begin, launcher, make_run, write_steps

from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.records.series import RunSeries, read_series


def counts(series: RunSeries) -> dict[str, int]:
    return {counter.name: counter.count for counter in series.counters}


def test_a_resumed_run_shows_the_attempt_that_counts(tmp_path):
    run = begin(tmp_path / "run", {"train": {"steps": 8}})
    write_steps(run, range(1, 7), completion="old")
    write_steps(run, range(4, 6), attempt=2, completion="new")  # resumed from step 3, still going
    series = read_series(run.root)
    assert series.curve("train", "rollout/reward").steps == (1, 2, 3, 4, 5)
    assert [(load.step, load.attempt) for load in series.expert_load] == [
        (1, 1), (2, 1), (3, 1), (4, 2), (5, 2)
    ]  # fmt: skip
    assert {(sample.step, sample.completion) for sample in series.samples} == {(5, "new")}


def test_trouble_is_added_up_over_attempts_also_where_steps_were_walked_again(tmp_path):
    run = begin(tmp_path / "run", {"train": {"steps": 4}})
    retries, refills = "rollout/engine/retries", "rollout/refills"
    with MetricsLog(run.metrics) as metrics:
        for step, count in ((1, 0), (2, 3), (3, 5)):
            metrics.append("train", step, 1, {retries: count, refills: 1})
        metrics.append("train", 2, 2, {retries: 1, refills: 2})
    for kind in ("engine-restarted", "engine-restarted", "resumed"):
        launcher(run).append(kind, {"attempt": 2})
    found = counts(read_series(run.root))
    assert found[retries] == 5 + 1  # a retry of a step that was lost did happen
    assert found[refills] == 1 + 2  # a refill belongs to its step
    assert found["engine-restarted"] == 2 and found["resumed"] == 1
    assert found["over_max_prompt_tokens"] == 2


def test_what_a_resumed_attempt_started_from_is_counted_once(tmp_path):
    run = begin(tmp_path / "run", {"train": {"steps": 4}})
    retries, faults = "rollout/engine/retries", "logging/tensorboard_faults"
    with MetricsLog(run.metrics) as metrics:
        for step, count in ((1, 2), (2, 3), (3, 7)):
            metrics.append("train", step, 1, {retries: count, faults: count})
        for step, count in ((3, 4), (4, 6)):
            metrics.append("train", step, 2, {retries: count, faults: count})
    body = {"attempt": 2, "step": 2, "counters": {retries: 3}}
    ReceiptLog(run.receipt_log("trainer"), "trainer").append("resumed", body)
    found = counts(read_series(run.root))
    assert found[retries] == 7 + (6 - 3)
    assert found[faults] == 7 + 6  # a tracker counts anew in each process


def test_a_counter_that_was_not_recorded_is_not_shown_as_zero(tmp_path):
    series = read_series(make_run(tmp_path / "run", start=False).root)
    recorded = {counter.name: counter.is_recorded for counter in series.counters}
    assert not recorded["rollout/refills"] and not recorded["steps_back"]
    assert recorded["engine-restarted"]
