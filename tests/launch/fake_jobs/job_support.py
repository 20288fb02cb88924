"""What the small real jobs of these tests share: arguments, lifeline, records."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

from miles_olmo.base.lifeline import hold_lifeline
from miles_olmo.base.rundir import RunDirectory


def begin():
    """Hold the lifeline and parse what every job is given; `behave` comes from the environment."""
    hold_lifeline(grace_seconds=1.0)
    parser = argparse.ArgumentParser()
    for name in ("--plan", "--digest", "--run", "--host"):
        parser.add_argument(name)
    for name in ("--attempt", "--index", "--port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    plan = json.loads(Path(arguments.plan).read_text())
    assert plan["digest"] == arguments.digest
    arguments.run = RunDirectory(Path(arguments.run))
    arguments.behave = json.loads(os.environ.get("FAKE_JOBS", "{}"))
    return arguments


def token_digest() -> str:
    """sha256 of the run's token: shows that it was handed over without showing it."""
    path = Path(os.environ["MILES_RUN_TOKEN_FILE"])
    assert path.stat().st_mode & 0o777 == 0o600
    return hashlib.sha256(path.read_bytes()).hexdigest()
