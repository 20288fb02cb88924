"""The GPU quickstart on one GPU that trainer and engine share, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_olmo.records.metrics import read_metrics

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "manifests" / "tiny-h200.toml"


@pytest.mark.timeout(900)
def test_a_run_on_one_gpu_learns_the_task(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "miles_olmo", "launch", MANIFEST),
            *("--set", 'engines.colocate="resident"', "--runs", tmp_path, "--name", "one-gpu"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row.values for row in read_metrics(tmp_path / "one-gpu" / "metrics.jsonl").rows]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert accuracies[-1] >= 0.8, accuracies
    trained = [row for row in rows if "train/loss" in row]
    assert all(row["router/replay_coverage"] == 1.0 for row in trained)
    events = (tmp_path / "one-gpu" / "receipts" / "trainer.jsonl").read_text().splitlines()
    built = next(json.loads(line) for line in events if json.loads(line)["type"] == "policy-built")
    assert built["body"]["attention"] == "varlen"
