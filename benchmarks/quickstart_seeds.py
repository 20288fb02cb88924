"""Does the quickstart learn with every seed? Runs it once per seed and reads the receipts.

    python benchmarks/quickstart_seeds.py --seeds 0 1 2

Prints one JSON document: command, machine, and per seed the greedy accuracy at the start and the
end of RL, the largest |logp trainer - logp engine| over all steps, and the wall time. Exits with 1
if a seed ends below 0.8 or starts outside 0.25-0.40.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine

from miles_olmo.records.metrics import read_metrics

QUICKSTART = Path(__file__).parents[1] / "manifests" / "quickstart.toml"
GOAL = 0.8
BAND = (0.25, 0.40)


def run_seed(seed: int, directory: Path) -> dict[str, float]:
    """Launch the quickstart with another seed; what its records say."""
    manifest = directory / f"seed-{seed}.toml"
    manifest.write_text(QUICKSTART.read_text().replace("\nseed = 0\n", f"\nseed = {seed}\n", 1))
    runs = directory / "runs"
    name = f"seed-{seed}"
    started = time.perf_counter()
    command = [sys.executable, "-m", "miles_olmo", "launch", str(manifest)]
    subprocess.run([*command, "--name", name, "--runs", str(runs)], check=True, stdout=sys.stderr)
    metrics = read_metrics(runs / name / "metrics.jsonl")
    evaluation = [row.values["eval/accuracy"] for row in metrics.of("evaluation")]
    largest = "train/train_rollout_logprob_abs_diff_max"
    return {
        "seed": seed,
        "accuracy_start": evaluation[0],
        "accuracy_end": evaluation[-1],
        "warmup_steps": metrics.of("warmup")[-1].step,
        "logprob_difference_max": max(
            row.values[largest] for row in metrics.of("train") if largest in row.values
        ),
        "skipped_steps": sum(row.values["rollout/skipped_step"] for row in metrics.of("train")),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = [run_seed(seed, Path(directory)) for seed in arguments.seeds]
    passed = all(
        BAND[0] <= result["accuracy_start"] <= BAND[1] and result["accuracy_end"] >= GOAL
        for result in results
    )
    report = {
        "benchmark": "quickstart_seeds",
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "passed": passed,
        "results": results,
    }
    print(json.dumps(report, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
