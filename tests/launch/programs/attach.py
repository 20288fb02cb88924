"""`miles launch` without the command line: the backend itself, its result as JSON on stdout.

attach.py PLAN|- RUNS [--name N] [--resume RUN] [--accept-changes] [--detach]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from miles_olmo.base.errors import MilesError
from miles_olmo.launch.backend import LaunchRequest
from miles_olmo.launch.local import LocalBackend
from miles_olmo.plan.model import RunPlan

parser = argparse.ArgumentParser()
parser.add_argument("plan")
parser.add_argument("runs", type=Path)
parser.add_argument("--name")
parser.add_argument("--resume")
parser.add_argument("--accept-changes", action="store_true")
parser.add_argument("--detach", action="store_true")
arguments = vars(parser.parse_args())
path = arguments.pop("plan")
plan = None if path == "-" else RunPlan.model_validate_json(Path(path).read_bytes())
try:
    result = LocalBackend().submit(LaunchRequest(plan=plan, **arguments))
except MilesError as error:
    print(json.dumps(error.as_json()))
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps(result.as_json()))
sys.exit(result.exit_code)
