"""Everything that the command line does, from Python.

    from pathlib import Path
    from miles_olmo import api

    plan = api.make_plan(Path("manifests/quickstart.toml"))
    result = api.submit(plan, detach=True)
    print(api.read_status(result.run_id).step)

Names are imported when they are used, so that reading a status does not load what planning needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_olmo.api.converting import convert_checkpoint, export_run
    from miles_olmo.api.planning import (
        check_plan,
        load_manifest,
        make_plan,
        prepare,
        read_plan,
        validate,
        write_plan,
    )
    from miles_olmo.api.reporting import read_series, report
    from miles_olmo.api.running import (
        cancel,
        find_run,
        list_runs,
        load_plan,
        log_files,
        read_samples,
        read_status,
        submit,
    )
    from miles_olmo.api.verifying import verify

_MODULES = {
    "converting": ("convert_checkpoint", "export_run"),
    "planning": (
        "check_plan",
        "load_manifest",
        "make_plan",
        "prepare",
        "read_plan",
        "validate",
        "write_plan",
    ),
    "reporting": ("read_series", "report"),
    "running": (
        "cancel",
        "find_run",
        "list_runs",
        "load_plan",
        "log_files",
        "read_samples",
        "read_status",
        "submit",
    ),
    "verifying": ("verify",),
}
"""Module -> the names it offers."""

__all__ = [
    "cancel",
    "check_plan",
    "convert_checkpoint",
    "export_run",
    "find_run",
    "list_runs",
    "load_manifest",
    "load_plan",
    "log_files",
    "make_plan",
    "prepare",
    "read_plan",
    "read_samples",
    "read_series",
    "read_status",
    "report",
    "submit",
    "validate",
    "verify",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
