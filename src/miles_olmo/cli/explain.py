"""`miles explain`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from miles_olmo.base.codes import CODES, Code
from miles_olmo.base.errors import UsageError
from miles_olmo.base.suggest import closest
from miles_olmo.cli.options import json_option
from miles_olmo.cli.terminal import columns


@click.command("explain")
@click.argument("code", required=False)
@json_option
def explain_command(code: str | None, as_json: bool) -> None:
    """Explain an error CODE: cause, example and fix. Without one, list all codes."""
    entries = list(CODES.values()) if code is None else [_find(code)]
    if as_json:
        document = {"schema": "miles-olmo/codes/v1", "codes": [asdict(entry) for entry in entries]}
        print(json.dumps(document))
    elif code is None:
        print("\n".join(columns([(entry.code, entry.title) for entry in entries], indent=0)))
    else:
        print(_page(entries[0]))


def _find(code: str) -> Code:
    entry = CODES.get(code.upper())
    if entry is None:
        near = closest(code.upper(), CODES)
        raise UsageError(
            "E601",
            f"unknown error code '{code}'",
            why="no error has it",
            fix=f"did you mean '{near}'?" if near else "'miles explain' lists all codes",
        )
    return entry


def _page(entry: Code) -> str:
    example = "\n".join(f"    {line}" for line in entry.example.splitlines())
    return "\n".join(
        [
            f"{entry.code}: {entry.title}",
            "",
            entry.cause,
            "",
            "Example:",
            "",
            example,
            "",
            f"Fix: {entry.fix}",
            "",
            f"The command ends with exit code {entry.exit_code}.",
        ]
    )
