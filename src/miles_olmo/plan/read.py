"""Plan files: write one, read one, and make sure that nothing changed since it was made."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from miles_olmo.base.canonical import digest
from miles_olmo.base.errors import PlanError, UsageError
from miles_olmo.base.files import write_json
from miles_olmo.plan.hashing import code_version, hash_input
from miles_olmo.plan.model import RunPlan

_AGAIN = "make the plan again with 'miles plan'"


def write_plan(plan: RunPlan, path: Path) -> None:
    """Write a plan file, atomically.

    Raises:
        UsageError: E604, the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, plan.model_dump(mode="json"))
    except OSError as error:
        raise UsageError(
            "E604",
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix="choose another place with --out",
        ) from error


def read_plan(path: Path, expected_digest: str | None = None) -> RunPlan:
    """Read a plan file and recompute its digest.

    Args:
        path: A file written by `write_plan`.
        expected_digest: The digest that the caller was told to run, 64 hex digits.

    Raises:
        PlanError: E140 it is not a plan; E141 its digest is not the one it states or was expected.
    """
    try:
        content = path.read_bytes()
        plan = RunPlan.model_validate_json(content)
    except OSError as error:
        reason, fix = error.strerror or str(error), "name a plan file"
        raise PlanError("E140", f"cannot read the plan {path}", why=reason, fix=fix) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise PlanError(
            "E140",
            f"{path} is not a plan of this version",
            why=f"{place}: {first['msg']}",
            fix=_AGAIN,
        ) from error
    # Of the file's own content: a plan of an older version lacks keys that were added since.
    actual = digest(json.loads(content)["content"])
    if actual != plan.digest:
        raise PlanError(
            "E141",
            f"{path} states digest {plan.digest[:12]}, its content has {actual[:12]}",
            why="the content was changed after the plan was made",
            fix=_AGAIN,
            stated=plan.digest,
            actual=actual,
        )
    if expected_digest is not None and actual != expected_digest:
        raise PlanError(
            "E141",
            f"{path} has digest {actual[:12]}, expected {expected_digest[:12]}",
            why="it is another plan than the one that was to be run",
            fix="name the plan that was made for this run",
            expected=expected_digest,
            actual=actual,
        )
    return plan


def check_plan(plan: RunPlan) -> None:
    """Hash the local inputs and the code again, right before a launch.

    Raises:
        PlanError: E142 an input is gone or changed; E143 other code made the plan. The message names
            each; nothing has been started.
    """
    changed = _changed_inputs(plan)
    if changed:
        raise PlanError(
            "E142",
            "changed since the plan was made: " + ", ".join(changed),
            why="the plan's digest covers the bytes that were checked",
            fix=f"restore the files or {_AGAIN}",
            inputs=changed,
        )
    check_code(plan)


def check_code(plan: RunPlan) -> None:
    """Whether the running code is the code that made the plan.

    Raises:
        PlanError: E143.
    """
    made, running = plan.content.code, code_version()
    if made != running:
        raise PlanError(
            "E143",
            f"the plan was made by miles-olmo {made.version} ({made.source_sha256[:12]}), "
            f"this is {running.version} ({running.source_sha256[:12]})",
            why="other code may run it differently",
            fix=_AGAIN,
            made=made.model_dump(),
            running=running.model_dump(),
        )


def _changed_inputs(plan: RunPlan) -> list[str]:
    base = Path(plan.local.base_directory)
    changed: list[str] = []
    for entry in plan.content.inputs:
        if entry.kind != "local":
            continue
        try:
            sha256, _ = hash_input(base / entry.path)
        except OSError:
            changed.append(f"{entry.key} = '{entry.path}' (cannot be read)")
            continue
        if sha256 != entry.sha256:
            changed.append(f"{entry.key} = '{entry.path}'")
    return changed
