"""Which plots a report has, in reading order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_olmo.records.metrics import Phase
from miles_olmo.records.series import Curve, RunSeries

STEP = "training step"


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a plot."""

    label: str
    metric: str
    phase: Phase = "train"


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Metrics over steps."""

    name: str
    """Of the PNG file and the page's anchor."""
    section: str
    title: str
    y_label: str
    """What is measured, with its unit."""
    lines: tuple[Line, ...]
    caption: str
    """One sentence: what to look for."""
    x_label: str = STEP
    smooth: int = 0
    """Steps of a running mean, drawn over the faint raw line; 0 for none."""
    scale: Literal["linear", "magnitude"] = "linear"
    """magnitude: logarithmic, with 0 in its place."""
    is_share: bool = False
    """The axis reaches from 0 to 1."""
    is_count: bool = False
    """The axis has whole numbers from 0."""
    markers: bool = False
    """Few points, each of which was measured by itself."""
    reference: float | None = None
    """A value worth a dotted line."""

    def curves(self, series: RunSeries) -> list[tuple[Line, Curve]]:
        """The lines that this run has data for."""
        pairs = ((line, series.curve(line.phase, line.metric)) for line in self.lines)
        return [(line, curve) for line, curve in pairs if curve]


@dataclass(frozen=True, slots=True)
class StackPlot:
    """Metrics that add up, over steps; one panel per run."""

    name: str
    section: str
    title: str
    y_label: str
    lines: tuple[Line, ...]
    caption: str
    x_label: str = STEP

    def curves(self, series: RunSeries) -> list[tuple[Line, Curve]]:
        """All lines over the steps that have every one of them; none without such a step."""
        rows = [
            row
            for row in series.metrics.of("train")
            if all(line.metric in row.values for line in self.lines)
        ]
        steps = tuple(row.step for row in rows)
        return [
            (line, Curve(steps, tuple(row.values[line.metric] for row in rows)))
            for line in self.lines
            if rows
        ]


@dataclass(frozen=True, slots=True)
class LoadPlot:
    """Load of every expert over steps: a heat map per layer and run."""

    name: str
    section: str
    title: str
    caption: str
    x_label: str = STEP


Plot = LinePlot | StackPlot | LoadPlot

_DIFFERENCE = "train/train_rollout_logprob_abs_diff"

PLOTS: tuple[Plot, ...] = (
    LinePlot(
        "reward",
        "Learning",
        "Reward",
        "mean reward",
        (Line("reward", "rollout/reward"),),
        "Mean over all answers sampled for a step; the strong line is a running mean of 10 steps.",
        smooth=10,
    ),
    LinePlot(
        "accuracy",
        "Learning",
        "Evaluation accuracy",
        "share of held-out prompts",
        (Line("accuracy", "eval/accuracy", "evaluation"),),
        "Greedy answers to prompts that are never trained on.",
        is_share=True,
        markers=True,
    ),
    LinePlot(
        "response-length",
        "Learning",
        "Response length",
        "tokens",
        (Line("mean", "rollout/response_len"), Line("longest", "rollout/response_len_max")),
        "A growing mean without a growing reward is worth a look at the samples.",
    ),
    LinePlot(
        "truncated",
        "Learning",
        "Truncated answers",
        "share of answers",
        (Line("truncated", "rollout/truncated_ratio"),),
        "Answers that used up max_response_tokens.",
        smooth=10,
        is_share=True,
    ),
    LinePlot(
        "no-signal",
        "Learning",
        "Groups without signal",
        "share of groups",
        (Line("all rewards equal", "rollout/zero_std"),),
        "All answers of such a group got the same reward: it teaches nothing.",
        smooth=10,
        is_share=True,
    ),
    LinePlot(
        "refills",
        "Learning",
        "Refilled and skipped steps",
        "count per step",
        (Line("refills", "rollout/refills"), Line("skipped", "rollout/skipped_step")),
        "A step without any group that carries signal samples anew; after max_refills it is skipped.",
        is_count=True,
    ),
    LinePlot(
        "warmup-accuracy",
        "Warm-up",
        "Warm-up accuracy",
        "share of held-out prompts",
        (Line("accuracy", "eval/accuracy", "warmup"),),
        "The supervised warm-up ends in its accuracy band.",
        x_label="warm-up step",
        is_share=True,
        markers=True,
    ),
    LinePlot(
        "warmup-loss",
        "Warm-up",
        "Warm-up loss",
        "nats per token",
        (Line("cross entropy", "train/loss", "warmup"),),
        "Cross entropy on the ground truths.",
        x_label="warm-up step",
    ),
    LinePlot(
        "mismatch",
        "Trainer and engine",
        "Logprob mismatch",
        "nats",
        (
            Line("mean |difference|", _DIFFERENCE),
            Line("max |difference|", f"{_DIFFERENCE}_max"),
            Line("KL (k3)", "train/train_rollout_kl"),
        ),
        "Between the logprobs of trainer and engine on the same tokens; 0 is bit-identical.",
        scale="magnitude",
    ),
    LinePlot(
        "staleness",
        "Trainer and engine",
        "Staleness",
        "policy versions",
        (Line("mean", "train/staleness"), Line("oldest token", "train/staleness_max")),
        "Versions between sampling and training of the trained tokens.",
    ),
    LoadPlot(
        "expert-load",
        "Router",
        "Expert load",
        "Tokens that each expert got, in units of its uniform share: dark orange is starved, dark "
        "blue overloaded.",
    ),
    LinePlot(
        "load-extremes",
        "Router",
        "Least and most used expert",
        "uniform shares",
        (
            Line("most used", "router/load_imbalance"),
            Line("least used", "router/min_load_share"),
        ),
        "The most used one is a mean over layers, the least used one that of any layer; both are 1 in balance.",
        reference=1.0,
    ),
    LinePlot(
        "collapsed",
        "Router",
        "Collapsed experts",
        "experts",
        (Line("alarm stands", "router/collapsed_experts"),),
        "Experts below train.collapse_alarm.share for as many steps as it says.",
        is_count=True,
    ),
    LinePlot(
        "replay",
        "Router",
        "Router replay",
        "share of required routes",
        (
            Line("recorded", "router/replay_coverage"),
            Line("replayed", "router/replay_applied"),
        ),
        "Routes that engines recorded, and that the trainer went through.",
        is_share=True,
    ),
    LinePlot(
        "native-mismatch",
        "Router",
        "Router mismatch",
        "share of positions and layers",
        (Line("other experts", "router/native_mismatch"),),
        "Where the trainer's own router would have chosen other experts than the engine's.",
        scale="magnitude",
    ),
    LinePlot(
        "entropy",
        "Optimization",
        "Entropy",
        "nats per token",
        (Line("entropy", "train/entropy"),),
        "A fast fall to 0 means that exploration has ended.",
        smooth=10,
    ),
    LinePlot(
        "kl",
        "Optimization",
        "KL divergence",
        "nats per token",
        (Line("old policy (k1)", "train/ppo_kl"), Line("reference", "train/kl_loss")),
        "How far the policy has moved within a step, and from the reference.",
    ),
    LinePlot(
        "clipped",
        "Optimization",
        "Clipped tokens",
        "share of tokens",
        (
            Line("lower clip", "train/pg_clipfrac_low"),
            Line("upper clip", "train/pg_clipfrac_high"),
        ),
        "Tokens without gradient because their ratio left its bounds.",
    ),
    LinePlot(
        "gradient-norm",
        "Optimization",
        "Gradient norm",
        "L2 norm",
        (Line("before clipping", "train/grad_norm"),),
        "Global norm before it is clipped to max_grad_norm.",
        smooth=10,
    ),
    LinePlot(
        "learning-rate",
        "Optimization",
        "Learning rate",
        "AdamW learning rate",
        (Line("learning rate", "train/learning_rate"),),
        "Of the last update of a step.",
    ),
    LinePlot(
        "loss",
        "Optimization",
        "Loss",
        "loss",
        (Line("loss", "train/loss"),),
        "In GRPO it hovers around 0; watch the reward instead.",
        smooth=10,
    ),
    LinePlot(
        "throughput",
        "Performance",
        "Throughput",
        "response tokens per second",
        (
            Line("whole step", "perf/tokens_per_sec"),
            Line("sampling alone", "perf/rollout_tokens_per_sec"),
        ),
        "The gap between the two is what training and publishing cost.",
    ),
    StackPlot(
        "seconds",
        "Performance",
        "Where the time of a step goes",
        "seconds",
        (
            Line("rollout", "perf/rollout_time"),
            Line("train", "perf/train_time"),
            Line("publish", "perf/publish_time"),
        ),
        "Evaluations and checkpoints are not part of it.",
    ),
)
