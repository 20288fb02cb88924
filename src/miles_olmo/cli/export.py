"""`miles export`: a checkpoint of a run, in the layout of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import run_argument, runs_option

if TYPE_CHECKING:
    from miles_olmo.api.converting import Conversion


@click.command("export")
@run_argument
@click.option(
    "--step", type=int, help="Step of the checkpoint; the newest complete one by default."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory to write, which must not exist; RUN/exports/step-N by default.",
)
@runs_option
@json_option
def export_command(run: str, step: int | None, out: Path | None, runs: Path, as_json: bool) -> None:
    """Export a checkpoint of RUN to Hugging Face, its logits compared with the trainer's."""
    from miles_olmo.api.converting import export_run

    print_conversion(export_run(run, step=step, out=out, runs=runs), as_json=as_json)


def print_conversion(conversion: Conversion, *, as_json: bool) -> None:
    """What was written, and how far the two sides' logits are apart."""
    if as_json:
        print(json.dumps(conversion.as_json()))
        return
    kind = "for model.checkpoint" if conversion.direction == "to-core" else "for Hugging Face"
    print(f"{conversion.destination}  {conversion.family}, {conversion.dtype}, {kind}")
    print(
        f"logits compared over {conversion.num_tokens} random tokens: "
        f"max |difference| {conversion.max_abs_difference:.3g}, bound {conversion.bound:.3g}"
    )
