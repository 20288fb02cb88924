"""`miles samples`: what the policy was asked, what it answered, what that was worth."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from miles_olmo.api.running import Sample, read_samples
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import run_argument, runs_option

SAMPLES_SCHEMA = "miles-olmo/samples/v1"


@click.command("samples")
@run_argument
@click.option("--step", type=int, help="Training step; the newest by default.")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--best", "order", flag_value="best", help="Highest reward first.")
@click.option("--worst", "order", flag_value="worst", help="Lowest reward first.")
@runs_option
@json_option
def samples_command(
    run: str, step: int | None, limit: int, order: str | None, runs: Path, as_json: bool
) -> None:
    """Show prompts, completions and rewards of RUN."""
    samples = read_samples(run, step=step, runs=runs)
    total = len(samples)
    if order:
        samples = sorted(samples, key=lambda sample: sample.reward, reverse=order == "best")
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
        first, *rest = _printable(text).split("\n")
        lines.append(f"  {label}  {first}")
        lines += [f"          {line}" for line in rest]
    return "\n".join(lines) + "\n"


def _printable(text: str) -> str:
    """Control characters as escapes: a model may write any, and a terminal would obey them."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
