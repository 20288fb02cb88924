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
    Code(
        code="E610",
        title="an optional package is missing",
        cause="The command draws with packages that only one of miles-olmo's extras installs.",
        example="miles report latest                   # without matplotlib",
        fix="Run the pip line of the message; 'miles doctor' lists all extras.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E611",
        title="a secret is not in the environment",
        cause="The manifest asks for a service that needs a secret. Secrets are named, never written "
        "down: they come from the environment of 'miles launch'.",
        example='[logging.wandb]\nenabled = true\nmode = "online"     # without WANDB_API_KEY',
        fix="Set the variable, or switch the service off.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E612",
        title="options contradict each other",
        cause="Two options, or one option given twice, ask for different things; one of them would be "
        "ignored.",
        example="miles plan run.toml --set train.steps=20 --set train.steps=30",
        fix="Leave one of them out.",
        exit_code=EXIT_USAGE,
    ),
)
