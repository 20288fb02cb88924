"""`miles doctor`: what is installed, what works, what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import click

from miles_olmo.base.codes.entry import EXIT_OK, EXIT_USAGE
from miles_olmo.cli.options import json_option
from miles_olmo.cli.terminal import columns, size
from miles_olmo.launch.doctor import MachineReport, PackageReport, examine_machine


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> int:
    """Say what is installed, which engines and devices work, and what is missing.

    Ends with code 2 when something that is installed does not work.
    """
    report = examine_machine(Path())
    print(json.dumps(report.as_json()) if as_json else "\n".join(_page(report)))
    return EXIT_USAGE if report.is_broken else EXIT_OK


def _page(report: MachineReport) -> list[str]:
    machine = report.machine
    rows = [
        ("python", f"{machine['python']}  {machine['executable']}"),
        ("platform", machine["platform"]),
        ("cpu", f"{machine['cpu']}, {machine['cpu_count']} threads usable"),
        ("disk", f"{size(machine['disk_free_bytes'])} free here"),
    ]
    lines = ["machine", *columns(rows), "packages"]
    lines += columns([(extra, _packages(packages)) for extra, packages in report.extras.items()])
    lines.append("tried")
    lines += columns([(p.module, p.state, p.detail) for p in report.probes])
    torch = next(probe for probe in report.probes if probe.module == "torch")
    devices = [(name, "works") for name in torch.facts.get("devices", [])]
    devices += [(name, why) for name, why in torch.facts.get("failed", {}).items()]
    if devices:
        lines += ["devices", *columns(devices)]
    lines += ["engines", *columns(list(report.engines.items()))]
    if report.fixes:
        lines += ["missing", *columns(list(report.fixes.items()))]
    return lines


def _packages(packages: tuple[PackageReport, ...]) -> str:
    return ", ".join(f"{p.name} {p.version or '(missing)'}" for p in packages)
