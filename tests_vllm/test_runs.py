"""Whole runs with a real vLLM engine, started as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_olmo.base.processes import descendants
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.records.metrics import read_metrics
from miles_olmo.records.status import read_control, read_status

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "manifests" / "quickstart-vllm.toml"
STEPS = 15


def miles(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "miles_olmo", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Fifteen steps of the quickstart."""
    runs = tmp_path_factory.mktemp("runs")
    changes = [f"train.steps={STEPS}", "evaluation.every_steps=15", "checkpoint.every_steps=5"]
    done = miles(
        *("launch", MANIFEST, "--runs", runs, "--name", "first"),
        *(part for change in changes for part in ("--set", change)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "first"


def test_trainer_and_vllm_agree_on_every_token_of_every_step(run):
    rows = [row.values for row in read_metrics(run / "metrics.jsonl").rows if row.phase == "train"]
    assert len(rows) == STEPS
    trained = [row for row in rows if "train/loss" in row]
    assert trained
    for row in trained:
        assert row["router/replay_coverage"] == 1.0
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert row["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
    assert all(row["rollout/engine/answers_refused"] == 0 for row in rows)


def test_the_engine_says_in_its_receipt_what_it_serves(run):
    events = [json.loads(line) for line in (run / "receipts" / "engine-0.jsonl").open()]
    body = next(e["body"] for e in events if e["type"] == "engine-listening")
    assert body["engine"]["architecture"] == "Olmo3MoeForCausalLM"
    assert "never hit" in body["prefix_cache"]


def test_verify_passes_on_the_checkpoint(run):
    done = miles("verify", run, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)["report"]
    assert report["engine"] == "vllm"
    assert report["measured"]["mean"] <= 1e-5
    assert report["measured"]["max"] <= 1e-4
    assert report["measured"]["coverage"] == 1.0
    assert report["measured"]["weight_differences"] == {}


def test_verify_fails_when_the_engine_computes_with_one_changed_expert(run):
    done = miles(
        *("verify", run, "--step", STEPS, "--json"), PYTHONPATH=str(ROOT / "tests" / "tampering")
    )
    assert done.returncode == 7, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["error"]["code"] == "E370"
    failures = " ".join(result["report"]["failures"])
    assert "max |difference|" in failures
    assert "different tensors, first model.layers.1.mlp.experts.3.down_proj.weight" in failures


def test_an_engine_core_that_answers_nothing_is_noticed_and_replaced(tmp_path):
    """vLLM's HTTP server itself goes on answering."""
    changes = ["train.steps=6", "engines.request_seconds=20", "engines.health_seconds=1"]
    command = ["launch", MANIFEST, "--runs", tmp_path, "--name", "stopped"]
    child = subprocess.Popen(
        [sys.executable, "-m", "miles_olmo", *map(str, command)]
        + [part for change in changes for part in ("--set", change)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        run = RunDirectory(tmp_path / "stopped")
        deadline = time.monotonic() + 240
        while read_status(run.root).step < 2:
            assert child.poll() is None and time.monotonic() < deadline, child.communicate()[0]
            time.sleep(0.05)
        job = read_control(run)["jobs"]["engine-0"]["process"]["pid"]
        (core,) = [p.pid for p in descendants(job) if "EngineCore" in _command(p.pid)]
        os.kill(core, signal.SIGSTOP)
        output, _ = child.communicate(timeout=240)
    finally:
        child.send_signal(signal.SIGINT)
    assert child.returncode == 0, output
    events = [json.loads(line) for line in run.receipt_log("launcher").open()]
    assert [e["type"] for e in events if e["type"].startswith("engine-")] == [
        *("engine-ready", "engine-hung", "engine-restarted", "engine-ready")
    ]
    rows = read_metrics(run.metrics).of("train")
    assert [row.step for row in rows] == list(range(1, 7))
    assert rows[-1].values["rollout/engine/engines_returned"] == 1


def _command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()
