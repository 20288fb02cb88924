"""What is installed on this machine, and what of it works.

Heavy packages are imported in processes of their own, with a time limit: a broken build or driver
is reported and cannot take this process with it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from miles_olmo.launch.environment import (
    EXTRAS,
    available_cpus,
    cpu_model,
    import_name,
    installed_version,
    is_supported_vllm,
    machine_facts,
    missing_distributions,
    pip_line,
    plugin_is_visible,
    requirements,
)

DOCTOR_SCHEMA = "miles-olmo/doctor/v1"
PROBE_SECONDS = 120.0

_PROBES = {
    "torch": """
import json, torch
product = float((torch.ones(2, 2) @ torch.ones(2, 2)).sum())
devices = ["cpu"] if product == 8.0 else []
failed = {}
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    try:
        ones = torch.ones(2, 2, device=f"cuda:{index}")
        assert float((ones @ ones).sum()) == 8.0, "wrong product"
        devices.append(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"devices": devices, "failed": failed}))
""",
    "olmo_core": "import json, olmo_core.nn.transformer; print(json.dumps({}))",
    "vllm": "import json, vllm; print(json.dumps({}))",
}
"""Import name -> program that imports it and tries it; its last line is a JSON object."""


@dataclass(frozen=True, slots=True)
class PackageReport:
    """One distribution of an extra."""

    name: str
    version: str | None
    """None when it is not installed."""
    requirement: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What happened when a package was imported and tried."""

    module: str
    state: Literal["works", "missing", "broken"]
    detail: str
    """The last line of the error of a broken one."""
    facts: dict[str, Any]
    """torch: the devices that computed rightly, and those that failed."""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What `miles doctor` shows."""

    machine: dict[str, Any]
    """python, executable, platform, cpu, cpu_count, disk_free_bytes."""
    extras: dict[str, tuple[PackageReport, ...]]
    """Packages per extra; "base" is what the front end needs."""
    probes: tuple[ProbeReport, ...]
    engines: dict[str, str]
    """Engine kind -> "works", or why it does not."""
    fixes: dict[str, str]
    """Extra that is incomplete -> the pip line that completes it."""

    def as_json(self) -> dict[str, Any]:
        return {"schema": DOCTOR_SCHEMA, **asdict(self)}

    @property
    def is_broken(self) -> bool:
        """Whether something that is installed does not work."""
        return any(probe.state == "broken" for probe in self.probes)


def examine_machine(
    directory: Path = Path(), *, probe_seconds: float = PROBE_SECONDS
) -> MachineReport:
    """Look at this machine and its Python; takes as long as importing the packages takes.

    Args:
        directory: Where runs would be written; its disk is measured.
        probe_seconds: Time limit of all imports together.

    Raises:
        LaunchError: E503, miles-olmo itself is not installed.
    """
    extras = {"base": _packages(None), **{extra: _packages(extra) for extra in EXTRAS}}
    probes = _probe_all(probe_seconds)
    incomplete = [extra for extra in EXTRAS if missing_distributions(extra)]
    facts = machine_facts()
    machine = {
        "python": facts["python"],
        "executable": sys.executable,
        "platform": facts["platform"],
        "cpu": cpu_model(),
        "cpu_count": available_cpus(),
        "disk_free_bytes": shutil.disk_usage(directory).free,
    }
    engines = {kind: _engine(kind, probes, incomplete) for kind in ("core", "vllm")}
    fixes = {extra: _fix(extra, probes) for extra in incomplete}
    return MachineReport(machine, extras, probes, engines, fixes)


def _fix(extra: str, probes: tuple[ProbeReport, ...]) -> str:
    torch = next((probe for probe in probes if probe.module == "torch"), None)
    devices = torch.facts.get("devices", []) if torch else []
    if extra == "serve" and not any(device.startswith("cuda") for device in devices):
        return "needs a CUDA device; on a CPU, vLLM takes two steps: docs/install.md"
    return pip_line(extra)


def _packages(extra: str | None) -> tuple[PackageReport, ...]:
    return tuple(
        PackageReport(name, installed_version(name), requirement)
        for name, requirement in sorted(requirements(extra).items())
    )


def _probe_all(seconds: float) -> tuple[ProbeReport, ...]:
    """All probes at once: each waits mostly for the disk."""
    installed = {import_name(p.name) for x in EXTRAS for p in _packages(x) if p.version}
    started = {
        module: subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for module, program in _PROBES.items()
        if module in installed
    }
    try:
        return tuple(
            _finish(module, started[module], seconds)
            if module in started
            else ProbeReport(module, "missing", "not installed", {})
            for module in _PROBES
        )
    finally:
        for child in started.values():
            if child.poll() is None:
                child.kill()
                child.communicate()


def _finish(module: str, child: subprocess.Popen[str], seconds: float) -> ProbeReport:
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return ProbeReport(module, "broken", f"did not answer within {seconds:g} s", {})
    try:
        if child.returncode == 0:
            return ProbeReport(module, "works", "", json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError):
        pass
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return ProbeReport(module, "broken", last or f"exit code {child.returncode}", {})


def _engine(kind: str, probes: tuple[ProbeReport, ...], incomplete: list[str]) -> str:
    """ "works", or the first reason why not."""
    needs = {"core": ("torch", "olmo_core"), "vllm": ("vllm",)}[kind]
    for probe in probes:
        if probe.module in needs and probe.state != "works":
            return f"{probe.module} is {probe.state}"
    version = installed_version("vllm") or ""
    if kind == "vllm" and not is_supported_vllm(version):
        return f"vllm {version} is not supported, 0.26 to 0.30 are"
    if kind == "vllm" and not plugin_is_visible():
        return "vllm would not find the plug-in: install miles-olmo with pip"
    extra = {"core": "train", "vllm": "serve"}[kind]
    return f"packages of [{extra}] are missing" if extra in incomplete else "works"
