"""`miles prepare`: data from a manifest, or a checkpoint in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from miles_olmo.api.planning import load_manifest, prepare
from miles_olmo.cli.export import print_conversion
from miles_olmo.cli.options import json_option, manifest_argument, overrides_option
from miles_olmo.cli.terminal import columns
from miles_olmo.tasks.prepare import prepared_files


class PrepareGroup(click.Group):
    """Without the name of a subcommand, it is `data`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["data", *args]
        return super().parse_args(ctx, args)


@click.group("prepare", cls=PrepareGroup)
def prepare_command() -> None:
    """Make what a run starts from.

    `miles prepare MANIFEST` is short for `miles prepare data MANIFEST`.
    """


@prepare_command.command("data")
@manifest_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("data"),
    show_default=True,
    help="Directory to write to.",
)
@overrides_option
@json_option
def data_command(manifest: Path, out: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Make the data that MANIFEST's [data.prepare] asks for, to look at it.

    A run makes its own copy, with the same bytes.
    """
    hashes = prepare(manifest, out, overrides=overrides)
    names = prepared_files(load_manifest(manifest, overrides=overrides).data)
    files = [(key, str(out / names[key]), hashes[key]) for key in names]
    if as_json:
        document = {
            "schema": "miles-olmo/prepare-result/v1",
            "files": [{"key": k, "path": path, "sha256": sha256} for k, path, sha256 in files],
        }
        print(json.dumps(document))
    else:
        rows = [(key, path, f"sha256 {sha256}") for key, path, sha256 in files]
        print("\n".join(columns(rows, indent=0)))


@prepare_command.command("checkpoint")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the converted weights; that of the files by default. Only for a Hugging Face source.",
)
@json_option
def checkpoint_command(source: Path, destination: Path, dtype: Any, as_json: bool) -> None:
    """Convert the checkpoint SOURCE into DESTINATION, which must not exist.

    A Hugging Face directory becomes a checkpoint for model.checkpoint. A converted checkpoint, a run, or
    a checkpoint inside a run becomes a Hugging Face directory. Both sides' logits are compared; if
    they differ, nothing is left.
    """
    from miles_olmo.api.converting import convert_checkpoint

    print_conversion(convert_checkpoint(source, destination, dtype=dtype), as_json=as_json)
