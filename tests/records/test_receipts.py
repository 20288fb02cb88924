"""Receipts: every append is durable and every change to the file is found and named."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.base.canonical import canonical_json, digest
from miles_olmo.base.errors import LaunchError, TrainingError
from miles_olmo.records.receipts import ReceiptLog, merge_receipts, read_chain


def write_events(path, count):
    log = ReceiptLog(path, "trainer")
    return [log.append("step", {"number": number}) for number in range(count)]


def kinds(path):
    return [problem.kind for problem in read_chain(path).problems]


def test_a_chain_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "receipts" / "trainer.jsonl"
    written = write_events(path, 5)
    chain = read_chain(path)
    assert list(chain.events) == written and chain.problems == () and chain.is_intact
    assert [event["seq"] for event in written] == [1, 2, 3, 4, 5]
    assert all(b["prev"] == a["id"] for a, b in itertools.pairwise(written))


@settings(max_examples=30, deadline=None)
@given(
    body=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**53) + 1, 2**53 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(codec="utf-8"), max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=4,
    )
)
def test_any_json_body_survives(tmp_path_factory, body):
    try:
        canonical_json(body)
    except Exception:
        return
    path = tmp_path_factory.mktemp("chain") / "x.jsonl"
    ReceiptLog(path, "x").append("event", body)
    chain = read_chain(path)
    assert chain.problems == () and chain.events[0]["body"] == body


def test_a_missing_file_is_named(tmp_path):
    assert kinds(tmp_path / "none.jsonl") == ["missing"]
    assert merge_receipts(tmp_path / "none").problems[0].kind == "missing"


def test_a_torn_last_line_is_reported_then_repaired_by_the_next_append(tmp_path):
    path = tmp_path / "x.jsonl"
    write_events(path, 3)
    raw = path.read_bytes()
    path.write_bytes(raw[:-20])
    assert kinds(path) == ["torn"] and len(read_chain(path).events) == 2
    assert read_chain(path).is_intact
    assert ReceiptLog(path, "trainer").append("again", {})["seq"] == 3
    assert kinds(path) == []


def test_an_edited_line_is_named_and_refuses_further_appends(tmp_path):
    path = tmp_path / "x.jsonl"
    log = ReceiptLog(path, "trainer")
    for number in range(4):
        log.append("step", {"number": number})
    path.write_bytes(path.read_bytes().replace(b'"number":1', b'"number":7'))
    (problem,) = read_chain(path).problems
    assert (problem.kind, problem.line) == ("edited", 2)
    before = path.read_bytes()
    with pytest.raises(LaunchError) as caught:
        log.append("step", {})
    assert caught.value.code == "E530" and path.read_bytes() == before


def test_an_edit_that_also_forges_the_id_is_found_by_the_next_line(tmp_path):
    path = tmp_path / "x.jsonl"
    write_events(path, 4)
    lines = path.read_bytes().splitlines()
    event = json.loads(lines[1])
    event["body"] = {"number": 99}
    event["id"] = digest({key: value for key, value in event.items() if key != "id"})
    lines[1] = canonical_json(event)
    path.write_bytes(b"\n".join(lines) + b"\n")
    (problem,) = read_chain(path).problems
    assert (problem.kind, problem.line) == ("edited", 2)


@pytest.mark.parametrize("junk", [b"{}", b"[1]", b"not json", b"\xff", b"", b'{"id":1}'])
def test_a_line_that_is_no_receipt_counts_as_edited(tmp_path, junk):
    path = tmp_path / "x.jsonl"
    write_events(path, 3)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], junk, lines[2]]) + b"\n")
    (problem,) = read_chain(path).problems
    assert (problem.kind, problem.line) == ("edited", 2)


def rewrite(path, order):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[index] for index in order))


@pytest.mark.parametrize("order", [[1, 2, 3], [0, 2, 3], [0, 3]])
def test_dropped_lines_are_told_from_reordered_ones(tmp_path, order):
    path = tmp_path / "x.jsonl"
    write_events(path, 4)
    rewrite(path, order)
    assert kinds(path) == ["dropped"]


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3, 1], [0, 0, 1, 2, 3]])
def test_reordered_and_repeated_lines_are_told_from_dropped_ones(tmp_path, order):
    path = tmp_path / "x.jsonl"
    write_events(path, 4)
    rewrite(path, order)
    assert set(kinds(path)) == {"reordered"}


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.sets(st.integers(0, 4), max_size=2))
def test_any_shuffle_or_drop_inside_is_found(tmp_path_factory, order, dropped):
    path = tmp_path_factory.mktemp("chain") / "x.jsonl"
    write_events(path, 5)
    kept = [index for index in order if index not in dropped]
    rewrite(path, kept)
    is_a_prefix = kept == list(range(len(kept)))
    assert (not kinds(path)) == is_a_prefix


def test_appends_of_several_processes_and_threads_form_one_chain(tmp_path):
    path = tmp_path / "x.jsonl"
    script = (
        "import sys; from pathlib import Path; from miles_olmo.records.receipts import ReceiptLog\n"
        "log = ReceiptLog(Path(sys.argv[1]), 'p')\n"
        "for i in range(15): log.append('e', {'i': i})\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for _ in range(2)]
    log = ReceiptLog(path, "t")
    threads = [
        threading.Thread(target=lambda: [log.append("e", {"i": i}) for i in range(15)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait() for child in children] == [0, 0]
    chain = read_chain(path)
    assert chain.problems == () and len(chain.events) == 60


def test_an_append_costs_the_same_in_a_long_file(tmp_path):
    path = tmp_path / "x.jsonl"
    write_events(path, 400)
    log = ReceiptLog(path, "trainer")
    log.append("first", {})  # verifies the file once
    started = time.process_time()
    for _ in range(50):
        log.append("step", {})
    assert (time.process_time() - started) / 50 < 0.002  # verifying 400 lines takes 10 ms


def test_a_full_disk_is_named_and_leaves_no_part_of_the_line(tmp_path):
    path = tmp_path / "x.jsonl"
    log = ReceiptLog(path, "trainer")
    log.append("step", {})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
    try:
        with pytest.raises(LaunchError) as caught:
            log.append("step", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert caught.value.code == "E531" and path.read_bytes() == before
    assert log.append("step", {})["seq"] == 2 and kinds(path) == []


def test_receipts_of_all_writers_merge_by_time(tmp_path):
    for writer in ("launcher", "trainer", "launcher"):
        ReceiptLog(tmp_path / f"{writer}.jsonl", writer).append("event", {})
        time.sleep(0.002)
    merged = merge_receipts(tmp_path)
    assert [event["writer"] for event in merged.events] == ["launcher", "trainer", "launcher"]
    os.truncate(tmp_path / "trainer.jsonl", 30)
    assert [problem.kind for problem in merge_receipts(tmp_path).problems] == ["torn"]


def test_a_failure_receipt_holds_the_error_even_when_its_numbers_are_not_finite(tmp_path):
    log = ReceiptLog(tmp_path / "trainer.jsonl", "trainer")
    error = TrainingError("E300", "loss is NaN", loss=float("nan"), samples=("3.1",), path=tmp_path)
    body = log.append_failure(error)["body"]
    assert body["code"] == "E300" and body["details"]["loss"] == "nan"
    assert log.append_failure(KeyError("x"))["body"]["what"] == "KeyError: 'x'"
    assert kinds(log.path) == []
