"""Whole runs with a real vLLM engine, started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_olmo.records.metrics import read_metrics

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
