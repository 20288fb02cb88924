"""Plan a run from Python: what `miles plan`, `validate` and `prepare` do, typed.

Example:
    from pathlib import Path
    from miles_olmo.api.planning import make_plan, write_plan

    plan = make_plan(Path("manifests/quickstart.toml"), overrides=["train.steps=20"])
    print(plan.digest, plan.content.resolved.num_parameters)
    write_plan(plan, Path("quickstart.plan.json"))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from miles_olmo.base.errors import UsageError
from miles_olmo.manifest.models import Manifest
from miles_olmo.manifest.reading import read_manifest
from miles_olmo.plan.build import build_plan, checked_manifest
from miles_olmo.plan.compare import Difference, check_resume, state_differences
from miles_olmo.plan.imported_model import fill_model
from miles_olmo.plan.model import RunPlan
from miles_olmo.plan.read import check_plan, read_plan, write_plan
from miles_olmo.tasks.prepare import prepare_data

__all__ = [
    "Difference",
    "Manifest",
    "RunPlan",
    "check_plan",
    "check_resume",
    "load_manifest",
    "make_plan",
    "prepare",
    "read_plan",
    "state_differences",
    "validate",
    "write_plan",
]


def load_manifest(path: Path, *, overrides: Sequence[str] = ()) -> Manifest:
    """Read a manifest; keys, types and ranges are checked. Of its input files only the description of
    the model in `model.checkpoint` is read, which completes [model].

    Args:
        path: The TOML file.
        overrides: Assignments that replace keys, e.g. `"train.steps=20"`; values are TOML.

    Raises:
        ManifestErrors: Every unknown, missing or wrong key, with file, line and column.
        UsageError: E602, an override is not an assignment.
    """
    fill = partial(fill_model, base=path.parent)
    manifest, _ = read_manifest(path, overrides=overrides, fill=fill)
    return manifest


def validate(path: Path, *, overrides: Sequence[str] = ()) -> Manifest:
    """Read a manifest and run every check of a plan, its input files included; writes nothing.

    Raises:
        ManifestErrors: Everything that is wrong, in one report.
        UsageError: E602, an override is not an assignment.
    """
    manifest, _ = checked_manifest(path, overrides=overrides)
    return manifest


def make_plan(path: Path, *, overrides: Sequence[str] = ()) -> RunPlan:
    """Check a manifest and its inputs and return the immutable run plan; writes nothing.

    Equal manifests over equal input bytes and code give equal digests on every machine.

    Raises:
        ManifestErrors: Everything that is wrong, in one report.
        UsageError: E602, an override is not an assignment.
    """
    return build_plan(path, overrides=overrides)


def prepare(path: Path, directory: Path, *, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Make the data that a manifest's [data.prepare] asks for.

    Returns:
        sha256 by manifest key, e.g. `{"data.train": "9f..."}`.

    Raises:
        ManifestErrors: Everything that is wrong with the manifest.
        UsageError: E602, an override is not an assignment; E603, there is no [data.prepare]; E604,
            the directory cannot be written.
        InputError: E137, a file that was not made by this would be overwritten.
    """
    manifest, _ = checked_manifest(path, overrides=overrides)
    if manifest.data.prepare is None:
        raise UsageError(
            "E603",
            f"{path} has no [data.prepare]",
            why="its data files already exist",
            fix="add [data.prepare], or go on with 'miles plan'",
        )
    try:
        return prepare_data(manifest.data, directory)
    except OSError as error:
        raise UsageError(
            "E604",
            f"cannot write to {directory}",
            why=error.strerror or str(error),
            fix="choose another directory with --out",
        ) from error
