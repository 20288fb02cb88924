"""A prepare job that makes one file."""

from __future__ import annotations

import sys

from job_support import begin

arguments = begin()
if arguments.behave.get("prepare") == "fail":
    print("cannot prepare")
    sys.exit(3)
(arguments.run.root / "data").mkdir(exist_ok=True)
(arguments.run.root / "data" / "train.jsonl").write_text("{}\n")
