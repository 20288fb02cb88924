"""What must hold on this machine before the first process starts, checked in one pass."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from miles_olmo.base.errors import LaunchError, UsageError
from miles_olmo.launch.commands import engine_port
from miles_olmo.launch.environment import (
    installed_version,
    is_supported_vllm,
    missing_distributions,
    pip_line,
    plugin_is_visible,
)
from miles_olmo.launch.gpus import check_gpus
from miles_olmo.plan.model import RunPlan
from miles_olmo.records.tracking import TENSORBOARD, WANDB

_BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}
WANDB_SECRET = "WANDB_API_KEY"
"""Variable that holds the key of Weights & Biases; jobs inherit it, nothing writes it down."""
_RECORDS_BYTES = 64 * 2**20
"""Room for logs, metrics, samples and receipts."""


def check_machine(plan: RunPlan, runs: Path) -> None:
    """Refuse a launch that cannot work here, before anything is written.

    Raises:
        LaunchError: E503 a package is missing; E502 a port is taken; E518, E520 GPUs are missing or
            in use; E504 the disk is too small.
        UsageError: E611 a secret is not in the environment.
    """
    _check_extras(plan)
    _check_secrets(plan)
    _check_ports(plan)
    gpus = [gpu for job in plan.content.jobs for gpu in job.gpus]
    if gpus:
        check_gpus(gpus)
    _check_disk(plan, runs)


def required_disk_bytes(plan: RunPlan) -> int:
    """Most bytes a run holds at one time: one more checkpoint and publication than it keeps."""
    manifest, resolved = plan.manifest, plan.content.resolved
    weights = resolved.num_parameters * _BYTES_PER_VALUE[manifest.model.dtype]
    checkpoints = (manifest.checkpoint.keep + 1) * resolved.checkpoint_bytes
    publications = (manifest.publish.keep + 1) * weights
    export = weights if manifest.checkpoint.export else 0
    return checkpoints + publications + export + _RECORDS_BYTES


def _check_extras(plan: RunPlan) -> None:
    ours = [job for job in plan.content.jobs if job.module.startswith("miles_olmo.")]
    roles = {job.role for job in ours}
    extras = ["train"] if roles & {"trainer", "engine"} else []
    if "trainer" in roles:
        extras += [TENSORBOARD] if plan.manifest.logging.tensorboard else []
        extras += [WANDB] if plan.manifest.logging.wandb.enabled else []
    for extra in extras:
        missing = missing_distributions(extra)
        if missing:
            raise LaunchError(
                "E503",
                f"packages are missing: {', '.join(missing)}",
                why=f"the jobs of this plan need miles-olmo's extra {extra!r}",
                fix=f"run: {pip_line(extra)}",
                extra=extra,
                missing=missing,
            )
    if "engine" in roles and plan.manifest.engines.kind == "vllm":
        _check_vllm()


def _check_vllm() -> None:
    """vLLM is there, in a version that was tested, and will find this project's plug-in."""
    version = installed_version("vllm")
    if version is None:
        found = "vLLM is not installed"
    elif not is_supported_vllm(version):
        found = f"vLLM {version} is installed"
    elif not plugin_is_visible():
        found = (
            "vLLM would not find miles-olmo's plug-in: miles-olmo is not installed, only importable"
        )
    else:
        return
    raise LaunchError(
        "E503",
        found,
        why='engines.kind = "vllm" needs vLLM 0.26 to 0.30 beside an installed miles-olmo',
        fix=f"with a GPU run: {pip_line('serve')}; on a CPU follow the two steps of docs/install.md",
        extra="serve",
        missing=["vllm"],
    )


def _check_secrets(plan: RunPlan) -> None:
    wandb = plan.manifest.logging.wandb
    if wandb.enabled and wandb.mode == "online" and not os.environ.get(WANDB_SECRET):
        raise UsageError(
            "E611",
            f"{WANDB_SECRET} is not set",
            why="[logging.wandb] has mode = 'online', and the service asks for this key",
            fix=f"set {WANDB_SECRET} in the environment, or logging.wandb.mode = 'offline'",
            variable=WANDB_SECRET,
        )


def _check_ports(plan: RunPlan) -> None:
    engines = [job for job in plan.content.jobs if job.role == "engine"]
    host = plan.manifest.launch.host
    for index in range(len(engines)):
        port = engine_port(plan, index)
        if port and not _is_free(host, port):
            raise LaunchError(
                "E502",
                f"port {port} on {host} is taken",
                why=f"engine {index} has to listen there (engines.base_port + {index})",
                fix="end the process that uses it, or set engines.base_port to 0 or another port",
                host=host,
                port=port,
            )


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _check_disk(plan: RunPlan, runs: Path) -> None:
    existing = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    needed, free = required_disk_bytes(plan), shutil.disk_usage(existing).free
    if free < needed:
        raise LaunchError(
            "E504",
            f"the disk of {runs} has {free / 1e9:.1f} GB free and this run needs {needed / 1e9:.1f}",
            why="checkpoints, publications and the export would fill it in mid-run",
            fix="free space, lower checkpoint.keep, or set --runs to another disk",
            free_bytes=free,
            needed_bytes=needed,
        )
