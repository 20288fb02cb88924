"""Codes of the command line and the environment (E6xx)."""

from miles_olmo.base.codes.entry import EXIT_USAGE, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E600",
        title="wrong command line",
        cause="A command, option or argument is unknown or missing.",
        example="miles plan --ouput plan.json",
        fix="'miles COMMAND --help' shows what it takes.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E601",
        title="unknown error code",
        cause="'miles explain' was asked for a code that does not exist.",
        example="miles explain E999",
        fix="'miles explain' without a code lists them all.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E602",
        title="override is not an assignment",
        cause="An override must be KEY=VALUE with a value in TOML syntax, so strings need quotes.",
        example="miles plan run.toml --set name=other",
        fix="miles plan run.toml --set 'name=\"other\"'",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E603",
        title="nothing to prepare",
        cause="The manifest has no [data.prepare]: its data files already exist.",
        example="miles prepare run.toml                # [data] names files of your own",
        fix="Add [data.prepare], or go on with 'miles plan'.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E604",
        title="output cannot be written",
        cause="The file or directory that a command should write is not writable.",
        example="miles plan run.toml --out /proc/plan.json",
        fix="Choose another place with --out.",
        exit_code=EXIT_USAGE,
    ),
)
