"""The command group. Subcommands are imported when they are used, so that each starts fast."""

from __future__ import annotations

import importlib
import json
import os
import sys

import click

import miles_olmo
from miles_olmo.base.codes.entry import EXIT_BUG, EXIT_INTERRUPTED
from miles_olmo.base.errors import MilesError

# command name -> (module under miles_olmo.cli, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan", "Check a manifest and write the run plan."),
    "validate": ("plan", "Check a manifest, write nothing."),
    "explain": ("explain", "Explain an error code."),
    "prepare": ("prepare", "Make the data that a manifest asks for."),
    "launch": ("launch", "Start a run and follow it."),
    "status": ("status", "Show runs from their receipts and metrics."),
    "samples": ("samples", "Show prompts, completions and rewards of a run."),
    "logs": ("logs", "Show the logs of a run's processes."),
    "cancel": ("cancel", "Stop a run."),
    "doctor": ("doctor", "Say what is installed and what works here."),
}


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own, each exporting `<name>_command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"miles_olmo.cli.{COMMANDS[cmd_name][0]}")
        return getattr(module, f"{cmd_name.replace('-', '_')}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(miles_olmo.__version__, prog_name="miles")
def cli() -> None:
    """Reinforcement learning for Olmo mixture-of-experts models."""


def main() -> None:
    """Entry point: run the command, turn our errors into messages and exit codes."""
    wants_json = "--json" in sys.argv[1:]
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except MilesError as error:
        if wants_json:
            print(json.dumps({"schema": "miles-olmo/error/v1", "errors": [error.as_json()]}))
        else:
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except SystemExit:
        raise
    except Exception:
        import traceback

        traceback.print_exc()
        print("this is a bug in miles-olmo; please report it with the lines above", file=sys.stderr)
        sys.exit(EXIT_BUG)
