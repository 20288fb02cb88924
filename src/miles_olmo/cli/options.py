"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

manifest_argument = click.argument("manifest", type=click.Path(path_type=Path))

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output."
)

overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a key of the manifest, e.g. --set train.steps=20. Values are TOML.",
)
