"""The command group. Subcommands are imported when they are used, so that each starts fast."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import click

import miles_olmo
from miles_olmo.base.codes.entry import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK
from miles_olmo.base.errors import MilesError
from miles_olmo.base.suggest import closest
from miles_olmo.cli.terminal import wants_color

# command name -> (module under miles_olmo.cli, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan", "Check a manifest and write the run plan."),
    "validate": ("plan", "Check a manifest, write nothing."),
    "explain": ("explain", "Explain an error code."),
    "prepare": ("prepare", "Make the data that a manifest asks for, or convert a checkpoint."),
    "launch": ("launch", "Start a run and follow it."),
    "status": ("status", "Show runs from their receipts and metrics."),
    "report": ("report", "Write an HTML page about a run."),
    "samples": ("samples", "Show prompts, completions and rewards of a run."),
    "logs": ("logs", "Show the logs of a run's processes."),
    "cancel": ("cancel", "Stop a run."),
    "verify": ("verify", "Compare engine and trainer on a checkpoint."),
    "export": ("export", "Write a checkpoint of a run for Hugging Face."),
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            near = closest(args[0], COMMANDS)
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(miles_olmo.__version__, prog_name="miles")
def cli() -> None:
    """Reinforcement learning for Olmo mixture-of-experts models."""


def _print_errors(errors: list[dict[str, Any]]) -> None:
    print(json.dumps({"schema": "miles-olmo/error/v1", "errors": errors}))


def usage_fault(error: click.ClickException) -> dict[str, Any]:
    """What click found wrong with the command line, in the form of our own errors."""
    return MilesError("E600", error.format_message(), fix="see 'miles --help'").as_json()


def main() -> None:
    """Entry point: run the command, turn our errors into messages and exit codes."""
    try:
        code = _run(wants_json="--json" in sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_OK
    sys.exit(code)


def _run(*, wants_json: bool) -> int:
    try:
        result = cli.main(standalone_mode=False)
        return result if isinstance(result, int) else EXIT_OK
    except click.ClickException as error:
        if wants_json:
            _print_errors([usage_fault(error)])
        else:
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MilesError as error:
        if wants_json:
            _print_errors(error.as_json_list())
        else:
            print(error.report(color=wants_color(sys.stderr)), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except Exception:
        import traceback

        traceback.print_exc()
        print("this is a bug in miles-olmo; please report it with the lines above", file=sys.stderr)
        return EXIT_BUG
