"""Metrics and samples: finite, readable at any moment, and the newest attempt is the truth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.base.errors import TrainingError, UsageError
from miles_olmo.records.metrics import MetricsLog, read_metrics
from miles_olmo.records.samples import Sample, read_samples, sample_steps, write_samples


def write(path, *rows):
    with MetricsLog(path) as log:
        for phase, step, attempt, value in rows:
            log.append(phase, step, attempt, {"v": value})


def values(path, phase):
    return [(row.step, row.values["v"]) for row in read_metrics(path).of(phase)]


def test_rows_read_back_by_phase(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, ("warmup", 5, 1, 0.1), ("evaluation", 0, 1, 0.3), ("train", 1, 1, 0.4))
    metrics = read_metrics(path)
    assert values(path, "train") == [(1, 0.4)]
    latest = metrics.latest("evaluation")
    assert latest is not None and latest.values == {"v": 0.3}
    assert [row.phase for row in metrics.rows] == ["warmup", "evaluation", "train"]
    assert read_metrics(tmp_path / "none.jsonl").rows == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True])
def test_a_value_that_is_no_finite_number_is_refused_and_writes_nothing(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log, pytest.raises(TrainingError) as caught:
        log.append("train", 1, 1, {"train/loss": value})
    assert caught.value.code == "E532" and path.read_bytes() == b""


def test_a_torn_last_line_is_skipped_and_cut_by_the_next_attempt(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, ("train", 1, 1, 0.1), ("train", 2, 1, 0.2))
    path.write_bytes(path.read_bytes()[:-9])
    assert values(path, "train") == [(1, 0.1)] and read_metrics(path).problems == ()
    write(path, ("train", 2, 2, 0.5))
    assert values(path, "train") == [(1, 0.1), (2, 0.5)] and read_metrics(path).problems == ()


@pytest.mark.parametrize(
    "line",
    [
        b"{oops",
        b"[" * 100_000,
        b'{"phase": "train", "step": 2, "attempt": 1, "at": "", "values": {"x": 1%s}}'
        % (b"0" * 400),
    ],
    ids=["no json", "nested too deep", "an integer that no float holds"],
)
def test_a_damaged_line_inside_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    write(path, ("train", 1, 1, 0.1))
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert values(path, "train") == [(1, 0.1)]
    assert read_metrics(path).problems == (f"{path}:1: not a metrics row",)


def test_a_resumed_attempt_supersedes_the_steps_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = [("train", step, 1, 1.0) for step in range(1, 6)]
    evaluations = [("evaluation", 0, 1, 1.0), ("evaluation", 2, 1, 1.0), ("evaluation", 4, 1, 1.0)]
    write(path, ("warmup", 5, 1, 1.0), *first, *evaluations)
    write(path, ("train", 3, 2, 2.0))  # resumed from the checkpoint of step 2, then killed
    assert values(path, "train") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert values(path, "evaluation") == [(0, 1.0), (2, 1.0)]
    write(path, ("train", 3, 3, 3.0), ("train", 4, 3, 3.0))
    assert values(path, "train") == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)]
    write(path, ("warmup", 5, 4, 4.0))  # began anew: nothing of the old training counts
    assert values(path, "train") == [] and values(path, "warmup") == [(5, 4.0)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=5))
def test_every_step_counts_once_and_comes_from_the_newest_attempt_that_ran_it(
    tmp_path_factory, attempts
):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    expected: dict[int, int] = {}
    for attempt, (start, length) in enumerate(attempts, 1):
        if length:
            expected = {step: by for step, by in expected.items() if step < start}
        for step in range(start, start + length):
            write(path, ("train", step, attempt, float(attempt)))
            expected[step] = attempt
    assert values(path, "train") == sorted((step, float(by)) for step, by in expected.items())


def sample(**changes):
    base = dict(
        sample_id="3.1", prompt_id="train:4", step=1, prompt="12\n", completion="21 é", reward=1.0,
        finish_reason="stop", version=2, num_tokens=3,
    )  # fmt: skip
    return Sample(**{**base, **changes})


def test_samples_read_back_with_their_line_breaks_and_odd_characters(tmp_path):
    rows = [sample(), sample(sample_id="3.2", completion="a\nb\u2028c\x00\ud800")]
    path = tmp_path / "samples" / "step-000001.jsonl"
    write_samples(path, rows)
    assert read_samples(path) == rows and sample_steps(path.parent) == [1]


def test_a_line_that_is_no_sample_is_named(tmp_path):
    path = tmp_path / "step-000001.jsonl"
    write_samples(path, [sample()])
    path.write_bytes(path.read_bytes() + b'{"step": 1}\n')
    with pytest.raises(UsageError, match=r"step-000001.jsonl:2") as caught:
        read_samples(path)
    assert caught.value.code == "E533"


def test_samples_that_are_not_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "step-000001.jsonl"
    path.write_bytes(b"\xff\xfe\x80 not text\n")
    with pytest.raises(UsageError, match=r"E533.*step-000001.jsonl:1"):
        read_samples(path)
