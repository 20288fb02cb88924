"""The prepare job: makes the inputs that the plan calls `produced`."""

from __future__ import annotations

from miles_olmo.jobs.entry import JobContext, run_job
from miles_olmo.jobs.inputs import PREPARED
from miles_olmo.tasks.prepare import prepare_data


def prepare(context: JobContext) -> None:
    """Write the data files into `<run>/data` and their hashes into a receipt."""
    settings = context.plan.manifest.data
    assert settings.prepare is not None, "a plan has this job only with [data.prepare]"
    hashes = prepare_data(settings, context.run.root / "data")
    context.receipts.append(PREPARED, {"attempt": context.attempt, "sha256": hashes})


if __name__ == "__main__":
    run_job("prepare", prepare)
