"""Write docs/reference from the code: manifest keys, error codes, commands, metrics.

    python docs/generate_reference.py            write the pages
    python docs/generate_reference.py --check    exit 1 if a page is not what the code says

Pages hold nothing of the machine they were made on.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from miles_olmo.base.codes import CODES
from miles_olmo.base.codes import __doc__ as codes_text
from miles_olmo.cli.main import COMMANDS, cli
from miles_olmo.manifest.describe import SectionDoc, describe_manifest
from miles_olmo.records.catalogue import GROUPS
from miles_olmo.tasks import rows
from miles_olmo.tasks.verifiers import VERIFIERS

DIRECTORY = Path(__file__).parent / "reference"
_NOTE = "<!-- Written by docs/generate_reference.py; edit the code instead. -->"
_WIDTH = 96


def manifest_page() -> str:
    """Every key of the manifest."""
    parts = [
        "# Manifest",
        _NOTE,
        "A manifest is a TOML file that describes one run. Unknown keys are errors. Paths are relative "
        'to the manifest. Sections and keys without "required" may be left out.',
    ]
    for section in describe_manifest():
        parts += _section(section)
    parts += ["## Data files", inspect.cleandoc(rows.__doc__ or "")]
    verifiers = [f"- `{name}`: {inspect.getdoc(verify)}" for name, verify in VERIFIERS.items()]
    parts += ["## Verifiers", "\n".join(verifiers)]
    return "\n\n".join(parts) + "\n"


def _section(section: SectionDoc) -> Iterable[str]:
    yield f"## [{section.table}]" if section.table else "## Top level"
    yield section.text + (" Optional." if section.is_optional else "")
    if section.fields:
        lines = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
        for field in section.fields:
            cells = (f"`{field.name}`", field.type, field.default, field.text)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        yield "\n".join(lines)


def errors_page() -> str:
    """Every error code; the same text as `miles explain`."""
    parts = ["# Error codes", _NOTE, inspect.cleandoc(codes_text or "")]
    for entry in CODES.values():
        parts += [
            f"## {entry.code}: {entry.title}",
            entry.cause,
            f"```\n{entry.example}\n```",
            f"{entry.fix} Exit code {entry.exit_code}.",
        ]
    return "\n\n".join(parts) + "\n"


def cli_page(names: Iterable[str] = tuple(COMMANDS)) -> str:
    """The help of every command."""
    parts = ["# Command line", _NOTE]
    root = click.Context(cli, info_name="miles", terminal_width=_WIDTH, **cli.context_settings)
    for name in names:
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, terminal_width=_WIDTH)
        parts += [f"## miles {name}", f"```\n{command.get_help(context)}\n```"]
        for inner, subcommand in getattr(command, "commands", {}).items():
            nested = click.Context(
                subcommand, info_name=inner, parent=context, terminal_width=_WIDTH
            )
            parts += [f"### miles {name} {inner}", f"```\n{subcommand.get_help(nested)}\n```"]
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Every metric that a run records."""
    parts = [
        "# Metrics",
        _NOTE,
        "A run writes one line per step into `metrics.jsonl` and, per trained step, the load of every "
        "expert into `expert_load.jsonl`. A metric is in every row of its phases unless a condition is "
        'named. "Since the start" counts from the start of the run, and a resume goes on from the counts of '
        'its checkpoint; "in this attempt" counts from the start of the trainer\'s process. `miles report` '
        "adds up what happened in all attempts, also in steps that were walked again.",
    ]
    for title, metrics in GROUPS.items():
        lines = ["| Metric | Unit | Meaning | In rows of | When |", "|---|---|---|---|---|"]
        for metric in metrics:
            since = {"run": " Since the start.", "process": " In this attempt."}.get(
                metric.counts, ""
            )
            cells = (
                f"`{metric.name}`",
                metric.unit,
                metric.meaning + since,
                ", ".join(metric.phases),
                metric.when,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "manifest.md": manifest_page,
    "errors.md": errors_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, render in PAGES.items():
        path, text = DIRECTORY / name, render()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            DIRECTORY.mkdir(exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"docs/reference/{name} is stale: run docs/generate_reference.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
