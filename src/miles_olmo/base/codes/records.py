"""Codes of records and reports (E36x)."""

from miles_olmo.base.codes.entry import EXIT_USAGE, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E360",
        title="a run is compared with itself",
        cause="--compare names the run that the report is about.",
        example="miles report latest --compare latest",
        fix="Name another run; 'miles status' lists them.",
        exit_code=EXIT_USAGE,
    ),
)
