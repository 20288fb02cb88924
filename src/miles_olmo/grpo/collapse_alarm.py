"""The collapse alarm: experts that get hardly any token, step after step.

An expert's load is its share of the uniform load, `load_e * E / (T * k)`, over all tokens whose
routes one training step replayed (or took, without replay), per layer. An expert below
`train.collapse_alarm.share` for `steps` trained steps in a row has collapsed: it no longer learns, and
the router has no reason to come back to it. Skipped steps measure nothing and change nothing.

The state is a value that checkpoints hold, so a resumed run raises the same alarms at the same steps.
Each alarm is raised once; it is raised anew if the expert recovers and collapses again. With
`action = "stop"` an alarm ends the run after its checkpoint; resuming it accepts that alarm, and only
another one stops the run again.

Dimension legend: L routed layers, E experts per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import CollapseAlarm

Expert = tuple[int, int]
"""(layer, expert), from 0."""


@dataclass(frozen=True)
class AlarmState:
    """What the alarm remembers between steps."""

    low_steps_LE: tuple[tuple[int, ...], ...] = ()
    """Trained steps in a row that each expert has been below its share; empty before the first."""
    raised: tuple[Expert, ...] = ()
    """Experts whose alarm stands, in order."""

    def as_json(self) -> dict[str, Any]:
        return {
            "low_steps_LE": [list(layer) for layer in self.low_steps_LE],
            "raised": [list(expert) for expert in self.raised],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AlarmState:
        """Inverse of `as_json`; an empty mapping is the state before the first step."""
        return cls(
            tuple(tuple(layer) for layer in value.get("low_steps_LE", ())),
            tuple((layer, expert) for layer, expert in value.get("raised", ())),
        )


@dataclass(frozen=True)
class ExpertReport:
    """The experts in one trained step."""

    load_LE: list[list[float]]
    """In units of the uniform share."""
    state: AlarmState
    """After the step."""
    newly_raised: tuple[Expert, ...]
    """Experts whose alarm this step raised."""
    is_on: bool
    """Whether the alarm is on."""

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {
            "router/min_load_share": min(load for layer in self.load_LE for load in layer)
        }
        if self.is_on:
            values["router/collapsed_experts"] = len(self.state.raised)
        return values

    def warning(self, settings: CollapseAlarm) -> dict[str, Any]:
        """Body of the `experts-collapsed` receipt."""
        return {
            "share": settings.share,
            "steps": settings.steps,
            "action": settings.action,
            "layers": {str(layer): experts for layer, experts in self._by_layer().items()},
        }

    def stop_error(self, settings: CollapseAlarm, step: int) -> TrainingError:
        """The error that ends a run with `action = "stop"`."""
        where = "; ".join(
            f"layer {layer}: {', '.join(map(str, experts))}"
            for layer, experts in self._by_layer().items()
        )
        return TrainingError(
            "E318",
            f"experts collapsed at step {step}: {where} (below {settings.share:g} of their uniform "
            f"share for {settings.steps} steps)",
            why="an expert without tokens no longer learns, and train.collapse_alarm.action is 'stop'",
            fix="set train.load_balancing_loss and resume with --accept-changes; resuming goes on "
            "from the checkpoint of this step, and only other experts stop the run again",
            step=step,
            layers={str(layer): experts for layer, experts in self._by_layer().items()},
        )

    def _by_layer(self) -> dict[int, list[int]]:
        layers: dict[int, list[int]] = {}
        for layer, expert in self.newly_raised:
            layers.setdefault(layer, []).append(expert)
        return layers


def relative_load(counts_LE: torch.Tensor) -> torch.Tensor:
    """Load of each expert in units of its uniform share, float32 [L, E].

    Args:
        counts_LE: Times each expert was used; no layer without any use.
    """
    return counts_LE * counts_LE.shape[1] / counts_LE.sum(1, keepdim=True)


def watch_experts(
    state: AlarmState, counts_LE: torch.Tensor | None, settings: CollapseAlarm
) -> ExpertReport | None:
    """What the experts did in one step, and which alarms that raises.

    Args:
        counts_LE: Times each expert was used in the step [L, E]; None when nothing was trained.

    Returns:
        None when nothing was measured: the step was skipped, or no route was counted.
    """
    if counts_LE is None or not bool((counts_LE.sum(1) > 0).all()):
        return None
    load_LE = relative_load(counts_LE).tolist()
    after = AlarmState() if settings.action == "off" else _advance(state, load_LE, settings)
    newly = tuple(expert for expert in after.raised if expert not in state.raised)
    return ExpertReport(load_LE, after, newly, settings.action != "off")


def _advance(state: AlarmState, load_LE: list[list[float]], settings: CollapseAlarm) -> AlarmState:
    before_LE = state.low_steps_LE or tuple((0,) * len(layer) for layer in load_LE)
    low_steps_LE = tuple(
        tuple(
            steps + 1 if load < settings.share else 0
            for steps, load in zip(steps_E, load_E, strict=True)
        )
        for steps_E, load_E in zip(before_LE, load_LE, strict=True)
    )
    raised = tuple(
        (layer, expert)
        for layer, steps_E in enumerate(low_steps_LE)
        for expert, steps in enumerate(steps_E)
        if steps >= settings.steps
    )
    return AlarmState(low_steps_LE, raised)
