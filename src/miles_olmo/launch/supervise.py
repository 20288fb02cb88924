"""The supervisor of a detached run: `python -m miles_olmo.launch.supervise --run DIR ...`.

`miles launch --detach` starts it with the run's lock already taken and the plan in place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from miles_olmo.base.errors import MilesError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.supervisor import Supervisor
from miles_olmo.plan.model import RunPlan


def main() -> int:
    parser = argparse.ArgumentParser(prog="miles_olmo.launch.supervise")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--lock", type=int, required=True)
    arguments = parser.parse_args()
    run = RunDirectory(arguments.run)
    plan = RunPlan.model_validate_json(run.plan.read_bytes())
    try:
        return Supervisor(plan, run, arguments.attempt, arguments.lock).supervise()
    except MilesError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
