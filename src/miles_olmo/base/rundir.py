"""Where everything of one run lies.

runs/<run id>/
  plan.json                      the plan this run executes
  token                          the run's bearer token (0600), removed when the run ends
  control.json                   this very directory, its supervisor and its jobs
  trainer.json                   where the trainer's processes meet, if there are several
  receipts/<writer>.jsonl        one hash chain per writer
  metrics.jsonl                  one line per step
  expert_load.jsonl              one line per trained step: load of every expert
  samples/step-000012.jsonl      what was sampled, with rewards
  publish/v000012/               a published policy version (newest few)
  checkpoints/step-000080/       visible only when complete
  export/                        final Hugging Face export
  logs/attempt-1/<job>.log       output of each process
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{6,})$")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; creates nothing by itself."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def control(self) -> Path:
        return self.root / "control.json"

    @property
    def engines(self) -> Path:
        return self.root / "engines"

    def served(self, index: int) -> Path:
        """What the vLLM engine `index` serves from."""
        return self.engines / f"engine-{index}.served"

    @property
    def receipts(self) -> Path:
        return self.root / "receipts"

    def receipt_log(self, writer: str) -> Path:
        return self.receipts / f"{writer}.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def expert_load(self) -> Path:
        return self.root / "expert_load.jsonl"

    def samples(self, step: int) -> Path:
        return self.root / "samples" / f"step-{step:06d}.jsonl"

    def publication(self, version: int) -> Path:
        return self.root / "publish" / f"v{version:06d}"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a visible checkpoint directory, ascending.

        Directories with other names for the same step, and files, are none: `checkpoint` would not
        find them.
        """
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        steps = sorted({int(match[1]) for match in matches if match})
        return [step for step in steps if self.checkpoint(step).is_dir()]

    @property
    def export(self) -> Path:
        return self.root / "export"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt}"


def run_of_checkpoint(path: Path) -> RunDirectory | None:
    """The run that a directory is a checkpoint of, by where it lies; None when it is of none."""
    try:
        path = path.resolve()
    except (OSError, ValueError, RuntimeError):  # no path that can exist, or links in a circle
        return None
    run = RunDirectory(path.parent.parent)
    return run if path.parent == run.checkpoints and path.is_dir() and run.plan.is_file() else None
