"""Codes of launching and supervising a run, and of its records (E5xx)."""

from miles_olmo.base.codes.entry import EXIT_RUN, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        "E530",
        "a receipt chain is broken",
        "Receipt files are append-only and hash-chained; a line of this one was edited, dropped or moved.",
        "sed -i 's/failed/finished/' runs/quickstart-1a2b3c4d-1/receipts/launcher.jsonl",
        "Keep the file as evidence and continue under a new run id.",
        EXIT_RUN,
    ),
    Code(
        "E531",
        "a receipt cannot be written",
        "The disk refused the write (full, read-only, gone); what was written of the line is removed again.",
        "df -h runs/",
        "Free space on the disk of the runs directory, then resume the run.",
        EXIT_RUN,
    ),
    Code(
        "E532",
        "a metric is not a finite number",
        "A metrics row may hold finite numbers only; NaN in a curve hides the step that broke.",
        'metrics.append("train", 3, 1, {"train/loss": float("nan")})',
        "Leave the metric out of a step that has no value for it.",
        EXIT_RUN,
    ),
    Code(
        "E533",
        "a samples file cannot be read",
        "A line of the file is not what a run writes.",
        "miles samples quickstart-1a2b3c4d-1 --step 3",
        "Delete the file; samples are for reading and nothing depends on them.",
        EXIT_RUN,
    ),
)
