"""How long `miles plan` takes as a whole process, Python's start included.

    python benchmarks/plan_time.py [--runs 10] [--json]

The bound is a median of 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine

MANIFEST = Path(__file__).parents[1] / "manifests" / "quickstart.toml"
BOUND_SECONDS = 0.5


def measure(runs: int) -> list[float]:
    """Wall seconds of each run; one more, unmeasured, comes first to fill the file cache."""
    command = [sys.executable, "-m", "miles_olmo", "plan", str(MANIFEST)]
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(runs + 1):
            start = time.perf_counter()
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    seconds = measure(options.runs)
    median = statistics.median(seconds)
    figures = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": describe_machine(),
        "runs": options.runs,
        "median_seconds": round(median, 3),
        "min_seconds": round(min(seconds), 3),
        "max_seconds": round(max(seconds), 3),
        "bound_seconds": BOUND_SECONDS,
        "ratio": round(median / BOUND_SECONDS, 3),
    }
    if options.as_json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    return 0 if median <= BOUND_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
