"""`miles prepare`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from miles_olmo.api.planning import load_manifest, prepare
from miles_olmo.cli.options import json_option, manifest_argument, overrides_option
from miles_olmo.cli.terminal import columns
from miles_olmo.tasks.prepare import prepared_files


@click.command("prepare")
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
def prepare_command(manifest: Path, out: Path, overrides: tuple[str, ...], as_json: bool) -> None:
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
