"""`miles verify`: does the engine sample from the policy that is trained?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import click

from miles_olmo.api.running import run_reference
from miles_olmo.api.verifying import VerificationResult, verify
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import runs_option


@click.command("verify")
@click.argument("target", metavar="RUN|CHECKPOINT")
@click.option("--step", type=int, help="Checkpoint of this training step; the newest by default.")
@click.option(
    "--engine",
    type=click.Choice(["core", "vllm"]),
    help="Kind of engine to compare with; the run's own by default.",
)
@runs_option
@json_option
def verify_command(
    target: str, step: int | None, engine: Literal["core", "vllm"] | None, runs: Path, as_json: bool
) -> int:
    """Replay a sampled batch through trainer and engine and compare logprobs, routes and weights.

    Bounds are keys of [verify] in the manifest. Exit code 7: one of them is not met.
    """
    result = verify(target, step=step, engine=engine, runs=runs)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        print(_shown(result))
    return result.exit_code


def _shown(result: VerificationResult) -> str:
    lines = [f"{result.run_id} step {result.step}"]
    if result.report is None:
        error = result.error or {}
        lines.append(
            f"could not be verified: {error.get('code', '')} {error.get('what', '')}".rstrip()
        )
    else:
        lines += _figures(result.report)
        failures = result.report["failures"]
        lines += [f"not met: {failure}" for failure in failures] or ["every bound is met"]
    lines.append(f"  logs     miles logs {run_reference(result.directory)}")
    return "\n".join(lines)


def _figures(report: dict[str, Any]) -> list[str]:
    measured, bounds = report["measured"], report["bounds"]
    wrong = sum(
        len(names) for kinds in measured["weight_differences"].values() for names in kinds.values()
    )
    rows = [
        (
            "tokens compared",
            f"{measured['num_tokens']:,} of {measured['num_sequences']} answers",
            "",
        ),
        ("mean |difference|", f"{measured['mean']:.3g} nats", f"{bounds['mean']:g}"),
        ("p99 |difference|", f"{measured['p99']:.3g} nats", f"{bounds['p99']:g}"),
        ("max |difference|", f"{measured['max']:.3g} nats", f"{bounds['max']:g}"),
        ("KL (k3)", f"{measured['kl']:.3g} nats", f"{bounds['kl']:g}"),
        ("replay coverage", f"{measured['coverage']:.4f}", f"{bounds['min_coverage']:g}"),
        (
            "native mismatch",
            " ".join(f"{share:.4f}" for share in measured["native_mismatch_L"]),
            f"{bounds['native_mismatch']:g}",
        ),
        ("weights", f"{measured['num_tensors'] - wrong} of {measured['num_tensors']} equal", "all"),
    ]
    return [
        f"  {name:<18} {value:<28} {'bound ' + b if b else ''}".rstrip() for name, value, b in rows
    ]
