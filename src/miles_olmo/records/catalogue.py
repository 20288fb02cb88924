"""Every metric that a run records: its name, unit and meaning.

`docs/reference/metrics.md` is made from this, `miles report` takes its units and counters from it, and
a test compares it with what a run really writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_olmo.records.metrics import Phase

Counts = Literal["", "step", "run", "process"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry."""

    name: str
    unit: str
    """"" for a plain number."""
    meaning: str
    phases: tuple[Phase, ...] = ("train",)
    """Phases whose rows may have it."""
    when: str = ""
    """Condition under which a row has it; empty: every row of its phases."""
    counts: Counts = ""
    """step: how often something happened in the step; run: since the run's start, of the steps that count
    (a resume goes on from its checkpoint); process: since the trainer's process started."""
    is_trouble: bool = False
    """Counts something dropped, retried, refilled, skipped or failed."""


_TRAINED = "the step was not skipped"
_WARMUP_UPDATE: tuple[Phase, ...] = ("warmup", "train")

ROLLOUT = (
    Metric("rollout/reward", "reward", "Mean reward of all samples taken, without signal or not."),
    Metric("rollout/response_len", "tokens", "Mean length of the answers."),
    Metric("rollout/response_len_max", "tokens", "Length of the longest answer."),
    Metric("rollout/response_tokens", "tokens", "Tokens of all answers together."),
    Metric("rollout/truncated_ratio", "share", "Answers that used up max_response_tokens."),
    Metric("rollout/zero_std", "share", "Groups whose answers all have the same reward."),
    Metric("rollout/num_groups", "groups", "Groups sampled and scored, refills included."),
    Metric("rollout/weight_version", "version", "Policy version after the step."),
    Metric(
        "rollout/refills",
        "refills",
        "Times the step sampled anew because no group carried signal.",
        counts="step",
        is_trouble=True,
    ),
    Metric(
        "rollout/skipped_step",
        "steps",
        "Steps that trained nothing, because no group carried signal (0 or 1 in a row).",
        counts="step",
        is_trouble=True,
    ),
    Metric(
        "rollout/dynamic_filter/drop_verifier_failed",
        "groups",
        "Groups dropped because their verifier failed again and again.",
        counts="run",
        is_trouble=True,
    ),
    Metric(
        "rollout/ungradable",
        "answers",
        "Answers that their verifier could not grade; each got reward 0.",
        counts="run",
        is_trouble=True,
    ),
    Metric(
        "rollout/verifier_errors",
        "errors",
        "Failures of a verifier; each had its group sampled again or dropped.",
        counts="run",
        is_trouble=True,
    ),
)


def _engine(name: str, unit: str, meaning: str, *, is_trouble: bool = True) -> Metric:
    return Metric(f"rollout/engine/{name}", unit, meaning, counts="run", is_trouble=is_trouble)


ENGINES = (
    _engine("groups", "groups", "Groups answered.", is_trouble=False),
    _engine("requests", "requests", "Generation requests sent.", is_trouble=False),
    _engine("publications", "versions", "Versions that reached the engines.", is_trouble=False),
    _engine("retries", "requests", "Requests sent again after a fault."),
    _engine("group_failures", "groups", "Groups given up after all attempts."),
    _engine("answers_refused", "answers", "Answers that failed a check."),
    _engine("timeouts", "requests", "Requests that ran into engines.request_seconds."),
    _engine("connection_faults", "requests", "Requests refused or cut."),
    _engine("server_faults", "requests", "Requests answered with a server error."),
    _engine("aborted", "requests", "Requests whose samples the engine gave up."),
    _engine("engines_lost", "engines", "Times an engine was found down."),
    _engine("engines_excluded", "engines", "Engines left out of a publication because down."),
    _engine("engines_returned", "engines", "Engines brought back to the current version."),
    _engine("publication_failures", "versions", "Versions that did not reach the engines."),
)

LOSS = (
    Metric("train/loss", "", "Loss: policy gradient plus weighted KL penalty.", _WARMUP_UPDATE),
    Metric("train/pg_loss", "", "Policy-gradient term.", when=_TRAINED),
    Metric("train/kl_loss", "nats", "KL penalty before its coefficient.", when=_TRAINED),
    Metric(
        "train/pg_clipfrac", "share", "Tokens stopped by the lower or upper clip.", when=_TRAINED
    ),
    Metric("train/pg_clipfrac_low", "share", "Tokens stopped by the lower clip.", when=_TRAINED),
    Metric("train/pg_clipfrac_high", "share", "Tokens stopped by the upper clip.", when=_TRAINED),
    Metric("train/pg_clipfrac_dual", "share", "Tokens stopped by the dual clip.", when=_TRAINED),
    Metric("train/ratio", "", "Mean of current / old probability.", when=_TRAINED),
    Metric("train/ppo_kl", "nats", "Mean of log old - log current.", when=_TRAINED),
    Metric("train/entropy", "nats", "Mean entropy of the tempered distribution.", when=_TRAINED),
    Metric("train/tis", "", "Mean weight of truncated importance sampling.", when=_TRAINED),
    Metric("train/tis_clipfrac", "share", "Tokens whose weight was capped.", when=_TRAINED),
    Metric(
        "train/ess_ratio",
        "share",
        "Effective sample size of the weights current / behaviour (Kong 1992).",
        when=_TRAINED,
    ),
    Metric(
        "train/load_balancing_loss",
        "",
        "Load balancing loss before its coefficient.",
        when="train.load_balancing_loss is on, and " + _TRAINED,
    ),
    Metric(
        "train/z_loss",
        "",
        "Router z-loss before its coefficient.",
        when="train.z_loss is on, and " + _TRAINED,
    ),
)

AGREEMENT = (
    Metric(
        "train/train_rollout_kl",
        "nats",
        "KL(engine || trainer) on the trained tokens, k3 estimator.",
        when=_TRAINED,
    ),
    Metric(
        "train/train_rollout_logprob_abs_diff",
        "nats",
        "Mean of |logp trainer - logp engine| over the trained tokens.",
        when=_TRAINED,
    ),
    Metric(
        "train/train_rollout_logprob_abs_diff_max",
        "nats",
        "Largest |logp trainer - logp engine|.",
        when=_TRAINED,
    ),
    Metric(
        "train/staleness",
        "versions",
        "Policy versions between sampling and training, mean over the trained tokens.",
        when=_TRAINED,
    ),
    Metric("train/staleness_max", "versions", "The same, of the oldest token.", when=_TRAINED),
)

UPDATE = (
    Metric("train/grad_norm", "", "Gradient norm before clipping.", _WARMUP_UPDATE),
    Metric("train/learning_rate", "", "Learning rate of the last update.", _WARMUP_UPDATE),
    Metric("train/num_groups", "groups", "Groups with signal, which were trained.", when=_TRAINED),
    Metric("train/num_updates", "updates", "Optimizer updates since the start.", when=_TRAINED),
    Metric("train/num_packs", "packs", "Packs per update.", when=_TRAINED),
    Metric("train/num_tokens", "tokens", "Tokens per update, prompts included.", when=_TRAINED),
    Metric(
        "train/computed_ratio",
        "share",
        "Part of these tokens that is computed: shared prefixes are computed once.",
        when=_TRAINED,
    ),
    Metric("train/pack_fill", "share", "Part of the packs that is filled.", when=_TRAINED),
)

ROUTER = (
    Metric(
        "router/load_imbalance",
        "uniform shares",
        "Load of the most used expert, mean over layers.",
        when=_TRAINED,
    ),
    Metric(
        "router/min_load_share",
        "uniform shares",
        "Load of the least used expert of any layer, over the whole step.",
        when=_TRAINED,
    ),
    Metric(
        "router/collapsed_experts",
        "experts",
        "Experts whose collapse alarm stands.",
        when="train.collapse_alarm is on, and " + _TRAINED,
    ),
    Metric("router/replay_coverage", "share", "Required routes that were recorded.", when=_TRAINED),
    Metric("router/replay_applied", "share", "Required routes that were replayed.", when=_TRAINED),
    Metric(
        "router/native_mismatch",
        "share",
        "Replayed positions and layers where the trainer's router would have chosen other experts.",
        when=_TRAINED,
    ),
)

PERFORMANCE = (
    Metric("perf/step_time", "seconds", "The three times below together."),
    Metric("perf/rollout_time", "seconds", "Sampling and scoring."),
    Metric("perf/train_time", "seconds", "Forward, backward, update."),
    Metric("perf/publish_time", "seconds", "Bringing the new weights to the engines."),
    Metric("perf/tokens_per_sec", "tokens/s", "Response tokens per second of the step."),
    Metric("perf/rollout_tokens_per_sec", "tokens/s", "Response tokens per second of sampling."),
)

EVALUATION = (
    Metric(
        "eval/accuracy",
        "share",
        "Greedy answers with reward 1 or more, on held-out prompts.",
        ("evaluation", "warmup"),
        when="in the warm-up: every evaluate_every steps",
    ),
    Metric("eval/reward", "reward", "Mean reward.", ("evaluation",)),
    Metric("eval/response_len", "tokens", "Mean length of the answers.", ("evaluation",)),
    Metric("eval/truncated_ratio", "share", "Answers cut at their budget.", ("evaluation",)),
    Metric("eval/num_prompts", "prompts", "Prompts that could be scored.", ("evaluation",)),
    Metric(
        "eval/num_unscored",
        "prompts",
        "Prompts left out because their verifier failed.",
        ("evaluation",),
        counts="step",
        is_trouble=True,
    ),
)

LOGGING = tuple(
    Metric(
        f"logging/{key}_faults",
        "faults",
        f"Rows that did not reach {name}, and its other faults.",
        when=f"logging.{key} is on",
        counts="process",
        is_trouble=True,
    )
    for key, name in (("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases"))
)

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Rollout": ROLLOUT,
    "Engines": ENGINES,
    "Loss": LOSS,
    "Trainer and engine": AGREEMENT,
    "Update": UPDATE,
    "Router": ROUTER,
    "Performance": PERFORMANCE,
    "Evaluation": EVALUATION,
    "Logging": LOGGING,
}
"""All metrics, in reading order."""

CATALOGUE: dict[str, Metric] = {m.name: m for group in GROUPS.values() for m in group}
"""All metrics by name."""
