"""What a figure was measured on; printed with every benchmark."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path


def describe_machine() -> dict[str, str | int]:
    """CPU, cores, Python and torch versions, and the commit of the code."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "olmo_core": _version("ai2-olmo-core"),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    facts = dict(line.split("\t:", 1) if "\t:" in line else ("", "") for line in lines)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    return ", ".join(f"{key} {facts[key]}" for key in wanted if key in facts)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"
