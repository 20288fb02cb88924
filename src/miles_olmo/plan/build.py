"""From a manifest to a run plan: check everything, pin every input, derive what follows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from miles_olmo.manifest.kernels import attention_kernel
from miles_olmo.manifest.models import Manifest
from miles_olmo.manifest.reading import read_leniently
from miles_olmo.manifest.reports import ManifestErrors, sort_problems
from miles_olmo.plan.checks import check_manifest
from miles_olmo.plan.hashing import code_version, git_commit
from miles_olmo.plan.imported_model import fill_model
from miles_olmo.plan.model import (
    JobSpec,
    LocalFacts,
    PlanContent,
    PlanInput,
    Resolved,
    RunPlan,
    content_digest,
)
from miles_olmo.plan.sizes import checkpoint_bytes, num_active_parameters, num_parameters


def build_plan(manifest_path: Path, *, overrides: Sequence[str] = ()) -> RunPlan:
    """Plan a run; writes nothing.

    Args:
        manifest_path: The TOML file.
        overrides: Assignments that replace keys, e.g. `"train.steps=20"`; values are TOML.

    Raises:
        ManifestErrors: Everything that is wrong with the manifest and its inputs, in one report.
        UsageError: E602, an override is not an assignment.
    """
    manifest, inputs = checked_manifest(manifest_path, overrides=overrides)
    content = PlanContent(
        manifest=manifest,
        inputs=inputs,
        code=code_version(),
        jobs=plan_jobs(manifest),
        resolved=resolve(manifest),
    )
    local = LocalFacts(
        manifest_path=str(_base_directory(manifest_path) / manifest_path.name),
        base_directory=str(_base_directory(manifest_path)),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        git_commit=git_commit(),
    )
    return RunPlan(digest=content_digest(content), content=content, local=local)


def checked_manifest(
    manifest_path: Path, *, overrides: Sequence[str] = ()
) -> tuple[Manifest, tuple[PlanInput, ...]]:
    """Read and check a manifest and its inputs.

    Raises:
        ManifestErrors: Everything that is wrong, in one report.
        UsageError: E602, an override is not an assignment.
    """
    fill = partial(fill_model, base=_base_directory(manifest_path))
    reading = read_leniently(manifest_path, overrides=overrides, fill=fill)
    problems = list(reading.problems)
    inputs: tuple[PlanInput, ...] = ()
    if reading.manifest is not None:
        inputs, found = check_manifest(
            reading.manifest,
            reading.positions,
            _base_directory(manifest_path),
            shown_base=os.path.dirname(manifest_path),  # noqa: PTH120 - "" for a bare name
            wrong=reading.wrong,
        )
        problems += found
    if problems or reading.manifest is None:
        raise ManifestErrors(sort_problems(problems, str(manifest_path)))
    return reading.manifest, inputs


def _base_directory(manifest_path: Path) -> Path:
    """Where the manifest lies, as the user named it: a link to a manifest has its files beside it."""
    return manifest_path.parent.resolve()


def plan_jobs(m: Manifest) -> tuple[JobSpec, ...]:
    """The processes of a run: data preparation if the run makes its data, engines, trainer."""
    threads = m.launch.threads
    on_gpus = m.launch.device == "cuda"

    def job(
        name: str, role: str, gpus: Sequence[int], *, module: str = "", restartable: bool = False
    ) -> JobSpec:
        return JobSpec.model_validate(
            {
                "name": name,
                "role": role,
                "module": f"miles_olmo.jobs.{module or role}",
                "processes": max(1, len(gpus)),
                "device": "cuda" if on_gpus and gpus else "cpu",
                "gpus": tuple(gpus) if on_gpus else (),
                "threads": threads,
                "restartable": restartable,
            }
        )

    prepare = [job("prepare", "prepare", ())] if m.data.prepare is not None else []
    module = "vllm_engine" if m.engines.kind == "vllm" else "engine"
    engines = [
        job(f"engine-{i}", "engine", [gpu], module=module, restartable=True)
        for i, gpu in enumerate(engine_gpus(m))
    ]
    trainer = job("trainer", "trainer", range(num_trainer_processes(m)))
    return (*prepare, *engines, trainer)


def num_trainer_processes(m: Manifest) -> int:
    """One per GPU on GPUs."""
    return m.train.parallel.data * m.train.parallel.expert


def engine_gpus(m: Manifest) -> list[int]:
    """The GPU of each engine: after the trainer's, or the trainer's own in turn."""
    trainers = num_trainer_processes(m)
    if m.engines.colocate == "resident":
        return [i % trainers for i in range(m.engines.count)]
    return [trainers + i for i in range(m.engines.count)]


def resolve(m: Manifest) -> Resolved:
    """Values that follow from the manifest."""
    samples = m.rollout.prompts_per_step * m.rollout.samples_per_prompt
    longest = m.rollout.max_prompt_tokens + m.rollout.max_response_tokens
    return Resolved(
        samples_per_step=samples,
        samples_per_update=samples // m.train.updates_per_step,
        max_sequence_tokens=longest,
        max_tokens_per_step=samples * longest,
        num_parameters=num_parameters(m.model.shape),
        num_active_parameters=num_active_parameters(m.model.shape),
        checkpoint_bytes=checkpoint_bytes(m.model),
        constant_length=m.algorithm.constant_length or m.rollout.max_response_tokens,
        attention=attention_kernel(m.launch.device, m.model.dtype),
        bit_exact=(
            m.engines.kind == "core"
            and m.launch.device == "cpu"
            and m.launch.threads == 1
            and m.model.dtype == "float32"
        ),
    )
