"""`miles samples`: what the policy was asked, what it answered, what that was worth."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from miles_olmo.api.running import Sample, read_samples
from miles_olmo.base.errors import UsageError
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import run_argument, runs_option
from miles_olmo.records.samples import printable

SAMPLES_SCHEMA = "miles-olmo/samples/v1"


@click.command("samples")
@run_argument
@click.option("--step", type=int, help="Training step; the newest by default.")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--best", is_flag=True, help="Highest reward first.")
@click.option("--worst", is_flag=True, help="Lowest reward first.")
@runs_option
@json_option
def samples_command(
    run: str,
    step: int | None,
    limit: int,
    best: bool,
    worst: bool,
    runs: Path,
    as_json: bool,
) -> None:
    """Show prompts, completions and rewards of RUN."""
    if best and worst:
        raise UsageError(
            "E612",
            "--best and --worst exclude each other",
            why="samples are shown in one order",
            fix="leave one of them out",
        )
    samples = read_samples(run, step=step, runs=runs)
    total = len(samples)
    if best or worst:
        samples = sorted(samples, key=lambda sample: sample.reward, reverse=best)
    samples = samples[:limit]
    if as_json:
        rows = [asdict(sample) for sample in samples]
        print(json.dumps({"schema": SAMPLES_SCHEMA, "total": total, "samples": rows}))
        return
    for sample in samples:
        print(_shown(sample))
    print(
        f"{len(samples)} of {total} samples of step {samples[0].step}" if samples else "no samples"
    )


def _shown(sample: Sample) -> str:
    facts = f"reward {sample.reward:g}  {sample.finish_reason}  {sample.num_tokens} tokens"
    lines = [f"{sample.sample_id}  {facts}  version {sample.version}  {sample.prompt_id}"]
    for label, text in (("prompt", sample.prompt), ("answer", sample.completion)):
        first, *rest = printable(text).split("\n")
        lines.append(f"  {label}  {first}")
        lines += [f"          {line}" for line in rest]
    return "\n".join(lines) + "\n"
