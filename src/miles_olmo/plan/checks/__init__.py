"""Whether a manifest's values go together, and whether its files are what it says.

Each check is a function of the manifest alone that yields findings. A finding names every key that it depends
on, so that checks also run on a manifest with mistakes elsewhere: all problems come in one report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_olmo.base.problems import Problem
from miles_olmo.manifest.models import Manifest
from miles_olmo.manifest.positions import KeyPath, Positions
from miles_olmo.plan.checks.checkpoint import checkpoint_input
from miles_olmo.plan.checks.finding import Finding, is_involved, locate
from miles_olmo.plan.checks.inputs import Inspection, inspect_local
from miles_olmo.plan.checks.layout import LAYOUT_CHECKS
from miles_olmo.plan.checks.model import MODEL_CHECKS
from miles_olmo.plan.checks.objective import OBJECTIVE_CHECKS
from miles_olmo.plan.checks.prepared import inspect_prepared
from miles_olmo.plan.model import PlanInput


def check_manifest(
    manifest: Manifest,
    positions: Positions,
    base: Path,
    *,
    shown_base: str = "",
    wrong: Sequence[KeyPath] = (),
) -> tuple[tuple[PlanInput, ...], list[Problem]]:
    """Run every check.

    Args:
        manifest: What was read.
        positions: Where its keys stand.
        base: Directory that the manifest's paths are relative to.
        shown_base: The same, as the user wrote it.
        wrong: Keys that could not be read; findings that depend on them are left out.

    Returns:
        The inputs, hashed, and every problem.
    """
    findings: list[Finding] = []
    for model_check in MODEL_CHECKS:
        findings += model_check(manifest.model)
    for check in (*LAYOUT_CHECKS, *OBJECTIVE_CHECKS):
        findings += check(manifest)
    inspection = _inspect(manifest, base, shown_base, wrong)
    findings += inspection.findings
    located = [locate(f, positions) for f in findings if not is_involved(f, wrong)]
    return tuple(inspection.inputs), located + inspection.problems


def _inspect(
    manifest: Manifest, base: Path, shown_base: str, wrong: Sequence[KeyPath]
) -> Inspection:
    if any(path[:1] in (("data",), ("reward",)) for path in wrong):
        return Inspection()  # which files, and what they may hold, is not known
    if manifest.data.prepare is not None:
        inspection = inspect_prepared(manifest, manifest.data.prepare)
    else:
        inspection = inspect_local(manifest, base, shown_base)
    checkpoint_input(manifest, base, inspection)
    return inspection
