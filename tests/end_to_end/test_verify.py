"""`miles verify` on the checkpoint of a real run: what passes, and what must not."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Launch
from miles_olmo.base.rundir import RunDirectory

TAMPERING = Path(__file__).parents[1] / "tampering"


def verify(run: Launch, *options: str, **environment: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "miles_olmo", "verify", str(run.run.root), *options, "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, json.loads(done.stdout)


def test_the_newest_checkpoint_agrees_in_every_bit_and_the_run_is_not_touched(whole: Launch):
    before = {p: p.stat().st_mtime_ns for p in whole.run.root.rglob("*") if "verify" not in p.parts}
    exit_code, result = verify(whole)
    assert exit_code == 0
    measured = result["report"]["measured"]
    assert (result["step"], measured["mean"], measured["max"], measured["kl"]) == (12, 0, 0, 0)
    assert measured["coverage"] == 1.0
    assert measured["num_tokens"] >= 16 * 4
    assert set(measured["native_mismatch_L"]) == {0.0}
    assert measured["num_tensors"] == 75
    after = {p: p.stat().st_mtime_ns for p in whole.run.root.rglob("*") if "verify" not in p.parts}
    assert {p for p in before if before[p] != after[p]} <= {whole.run.root}


def test_one_experts_weights_changed_in_the_engine_fail_with_exit_code_7(whole: Launch):
    exit_code, result = verify(whole, "--step", "8", PYTHONPATH=str(TAMPERING))
    assert exit_code == 7
    assert result["error"]["code"] == "E370"
    failures = result["report"]["failures"]
    assert any("max |difference|" in failure for failure in failures)
    assert any("experts.3.down_proj" in failure for failure in failures)


@pytest.mark.parametrize("options", [("--step", "5"), ("--step", "-1"), ("--step", "0")])
def test_a_step_without_a_checkpoint_is_refused(whole: Launch, options):
    exit_code, result = verify(whole, *options)
    assert exit_code == 2
    assert result["errors"][0]["code"] == "E371"
    assert "8, 12" in result["errors"][0]["why"]
    assert f"of step {options[1]}" in result["errors"][0]["what"]


@pytest.fixture
def finished(whole: Launch, tmp_path: Path) -> RunDirectory:
    """A run of its own, to be changed."""
    shutil.copytree(whole.run.root, tmp_path / "run", ignore=shutil.ignore_patterns("verify"))
    return RunDirectory(tmp_path / "run")


@contextlib.contextmanager
def verifying(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "miles_olmo", "verify", str(run.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            child.wait(60)


def wait_for(path: Path, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert child.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.002)


def test_a_checkpoint_that_a_living_run_removes_is_verified_whole(finished: RunDirectory):
    with verifying(finished) as child:
        wait_for(finished.root / "verify/verify-1/verify.json", child)
        shutil.rmtree(finished.checkpoint(12))
        output, errors = child.communicate(timeout=200)
    assert child.returncode == 0 and "every bound is met" in output, output + errors
    assert not (finished.root / "verify/verify-1/checkpoint").exists()


@pytest.mark.parametrize(
    "moment", ["plan.json", "receipts/launcher.jsonl", "engines/engine-0.json"]
)
def test_an_interrupt_before_the_result_leaves_nothing(finished: RunDirectory, moment):
    with verifying(finished) as child:
        wait_for(finished.root / "verify/verify-1" / moment, child)
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=60)
    assert (child.returncode, output, errors.strip()) == (130, "", "interrupted")
    assert not (finished.root / "verify").exists()


def test_an_interrupt_after_the_measurement_does_not_change_the_result(finished: RunDirectory):
    with verifying(finished) as child:
        wait_for(finished.root / "verify/verify-1/verification.json", child)
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=60)
    assert child.returncode == 0 and "every bound is met" in output, output + errors
