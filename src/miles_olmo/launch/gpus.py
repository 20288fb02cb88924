"""The GPUs of this machine, asked of `nvidia-smi`: the launcher loads no CUDA library itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from miles_olmo.base.errors import LaunchError

VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Set by the user: the GPUs that a launch may use. Set for a job: its one GPU."""

BUSY_MIB = 2048
"""Memory in use from which a GPU counts as somebody else's; drivers and displays take less."""

_QUERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi sees it."""

    index: str
    uuid: str
    name: str
    total_mib: int
    used_mib: int


def usable_gpus() -> list[str] | None:
    """Indices or UUIDs that the user allows, in order; None for all of the machine's."""
    text = os.environ.get(VISIBLE_GPUS_VARIABLE)
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def query_gpus() -> list[Gpu]:
    """All GPUs of the machine.

    Raises:
        LaunchError: E518, nvidia-smi is missing or fails.
    """
    fields = "index,uuid,name,memory.total,memory.used"
    argv = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        )
        rows = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
        return [Gpu(row[0], row[1], row[2], int(row[3]), int(row[4])) for row in rows]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise LaunchError(
            "E518",
            f"the GPUs of this machine cannot be listed ({type(error).__name__}: {error})",
            why="the plan has launch.device = 'cuda', and nvidia-smi lists no GPU",
            fix="run it on a machine with NVIDIA GPUs and their driver, or set device = 'cpu'",
        ) from error


def check_gpus(numbers: Sequence[int]) -> None:
    """Refuse a launch on GPUs that are not there or that somebody else uses.

    Args:
        numbers: Planned GPUs, counted among those that the launch may use.

    Raises:
        LaunchError: E518, there are too few; E520, one of them is in use.
    """
    gpus = query_gpus()
    usable = usable_gpus()
    names = [gpu.index for gpu in gpus] if usable is None else usable
    known = {gpu.index: gpu for gpu in gpus} | {gpu.uuid: gpu for gpu in gpus}
    needed = max(numbers) + 1
    unknown = [name for name in names[:needed] if name not in known]
    if len(names) < needed or unknown:
        found = f"{len(names)} of them usable" + (f", {', '.join(unknown)} unknown" * bool(unknown))
        raise LaunchError(
            "E518",
            f"this plan needs {needed} GPUs and the machine has {len(gpus)}, {found}",
            why=f"each trainer process and each engine has one ({VISIBLE_GPUS_VARIABLE} limits "
            "which may be used)",
            fix="lower engines.count or train.parallel, share them with engines.colocate = "
            "'resident', or launch on a larger machine",
            needed=needed,
            found=len(names),
        )
    for number in sorted(set(numbers)):
        gpu = known[names[number]]
        if gpu.used_mib > BUSY_MIB:
            raise LaunchError(
                "E520",
                f"GPU {gpu.index} ({gpu.name}) has {gpu.used_mib:,} of {gpu.total_mib:,} MiB in use",
                why="another program computes on it; the run would share its memory and its time",
                fix=f"end that program, or choose other GPUs with {VISIBLE_GPUS_VARIABLE}",
                gpu=gpu.index,
                used_mib=gpu.used_mib,
            )
