"""`miles plan` and `miles validate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from miles_olmo.api.planning import make_plan, validate, write_plan
from miles_olmo.cli.options import json_option, manifest_argument, overrides_option
from miles_olmo.cli.plan_summary import summarize
from miles_olmo.cli.terminal import wants_color


@click.command("plan")
@manifest_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Plan file to write; <name>.plan.json in the working directory by default.",
)
@overrides_option
@json_option
def plan_command(
    manifest: Path, out: Path | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Check MANIFEST and its inputs, show what the run will do, and write the run plan.

    Nothing is started, and no GPU is needed. Every problem comes in one report.
    """
    plan = make_plan(manifest, overrides=overrides)
    path = out or Path(f"{plan.manifest.name}.plan.json")
    write_plan(plan, path)
    if as_json:
        document = {
            "schema": "miles-olmo/plan-result/v1",
            "path": str(path),
            "digest": plan.digest,
            "plan": plan.model_dump(mode="json"),
        }
        print(json.dumps(document))
    else:
        print(summarize(plan, path, color=wants_color(sys.stdout)))


@click.command("validate")
@manifest_argument
@overrides_option
@json_option
def validate_command(manifest: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check MANIFEST and its inputs; write nothing."""
    checked = validate(manifest, overrides=overrides)
    if as_json:
        document = {
            "schema": "miles-olmo/validation/v1",
            "manifest": str(manifest),
            "name": checked.name,
            "valid": True,
        }
        print(json.dumps(document))
    else:
        print(f"{manifest}: valid")
