"""Codes of `miles verify` (E37x)."""

from miles_olmo.base.codes.entry import EXIT_USAGE, EXIT_VERIFY, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E370",
        title="verification threshold not met",
        cause="Trainer and engine compute different logprobs or routes for the same tokens, or the "
        "engine holds other weights than were published to it.",
        example="one expert's weights changed by 1e-3 in the engine",
        fix="Compare the versions and dtypes of trainer and engine. Bounds are keys of [verify].",
        exit_code=EXIT_VERIFY,
    ),
    Code(
        code="E371",
        title="nothing to verify",
        cause="The run, or the step that was named, has no complete checkpoint.",
        example="miles verify quickstart-1a2b3c4d-1 --step 50 with checkpoints of steps 100 and 200",
        fix="Name a step that has a checkpoint, or wait for the first one.",
        exit_code=EXIT_USAGE,
    ),
)
