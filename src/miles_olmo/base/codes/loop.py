"""Codes of the training loop and its jobs (E35x)."""

from miles_olmo.base.codes.entry import EXIT_RUN, EXIT_STALE, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E350",
        title="the warm-up did not reach its band",
        cause="Greedy accuracy was still outside [min_accuracy, max_accuracy] after max_steps, or every "
        "attempt stepped over the band.",
        example="[warmup]\nmax_steps = 5",
        fix="Raise warmup.max_steps, change warmup.learning_rate, or widen the band.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E351",
        title="samples are older than synchronous training allows",
        cause="An engine sampled with weights other than the version that was published last.",
        example="an engine that was restarted with old weights",
        fix="Look at the engine's log; launch the run again with --resume.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E352",
        title="an input is not what was hashed",
        cause="A file that the plan or the prepare job hashed is gone or has other bytes now.",
        example="data/train.jsonl edited after `miles plan`",
        fix="Restore the file, or plan again and start a new run.",
        exit_code=EXIT_STALE,
    ),
    Code(
        code="E353",
        title="a produced input has no receipt",
        cause="The trainer or an engine was started before the prepare job of its plan.",
        example="python -m miles_olmo.jobs.trainer ... in an empty run directory",
        fix="Start the run with `miles launch`, which runs the prepare job first.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E354",
        title="the run's token cannot be read",
        cause="Jobs read it from the file that MILES_RUN_TOKEN_FILE names; the launcher sets both.",
        example="python -m miles_olmo.jobs.engine ... without the variable",
        fix="Start jobs with `miles launch`.",
        exit_code=EXIT_RUN,
    ),
)
