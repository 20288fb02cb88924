"""How far an engine's logprobs are from the trainer's on the same tokens and the same weights.

A batch that the engine sampled is replayed by the trainer: forced through the recorded experts for
the logprobs, natively for the share of positions at which it would have chosen other experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from miles_olmo.algo.kl import kl_estimate
from miles_olmo.algo.pack import Pack
from miles_olmo.base.errors import VerificationError
from miles_olmo.manifest.models import Manifest, Verify
from miles_olmo.policy.family import FamilyAdapter

DEFAULT_BOUNDS = {
    "float32": {"mean": 1e-5, "p99": 1e-4, "max": 1e-4, "kl": 1e-8, "native_mismatch": 1e-3},
    "bfloat16": {"mean": 0.05, "p99": 0.5, "max": 5.0, "kl": 0.02, "native_mismatch": 0.25},
}
"""Bounds where [verify] names none. float32: sums in another order. bfloat16: a Hugging Face model
in bfloat16 differs this much from itself in float32 (mean 0.01 to 0.2 nats without replay)."""


@dataclass(frozen=True)
class Bounds:
    """Largest values that pass."""

    mean: float
    """Mean |difference| of a token's logprob, nats."""
    p99: float
    max: float
    kl: float
    """Mean k3 estimate of KL(engine || trainer), nats."""
    native_mismatch: float
    """Share of positions, in the worst layer, with another native expert set."""
    min_coverage: float
    """Least share of required route rows that were recorded."""

    @classmethod
    def of(cls, manifest: Manifest) -> Bounds:
        """[verify], filled up with the defaults of the policy's dtype."""
        chosen: Verify = manifest.verify
        defaults = DEFAULT_BOUNDS[manifest.model.dtype]
        named = {name: getattr(chosen, f"max_{key}") for name, key in _KEYS.items()}
        filled = {name: defaults[name] if v is None else v for name, v in named.items()}
        replay = manifest.train.replay
        return cls(**filled, min_coverage=replay.min_coverage if replay.enabled else 0.0)


_KEYS = {
    "mean": "mean_difference",
    "p99": "p99_difference",
    "max": "difference",
    "kl": "kl",
    "native_mismatch": "native_mismatch",
}
"""Figure -> key of [verify] without its `max_`."""


@dataclass(frozen=True)
class Verification:
    """What was measured."""

    num_sequences: int
    num_tokens: int
    """Sampled tokens that were compared."""
    mean: float
    p99: float
    max: float
    kl: float
    coverage: float
    native_mismatch_L: tuple[float, ...]
    """Per layer: share of replayed positions whose native experts differ; zero for dense layers."""
    weight_differences: Mapping[str, Mapping[str, Sequence[str]]]
    """Engine -> missing, extra or different -> tensor names."""
    num_tensors: int
    """Tensors whose checksums were compared."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def failures(self, bounds: Bounds) -> list[str]:
        """Each threshold that is not met, in words."""
        worst = max(self.native_mismatch_L, default=0.0)
        measured = {
            "mean": ("mean |difference|", self.mean, bounds.mean),
            "p99": ("p99 |difference|", self.p99, bounds.p99),
            "max": ("max |difference|", self.max, bounds.max),
            "kl": ("KL", self.kl, bounds.kl),
            "native_mismatch": ("native route mismatch", worst, bounds.native_mismatch),
        }
        found = [
            f"{name} {value:.3g} > {bound:.3g} (verify.max_{_KEYS[key]})"
            for key, (name, value, bound) in measured.items()
            if not value <= bound  # NaN fails
        ]
        if self.coverage < bounds.min_coverage:
            found.append(f"replay coverage {self.coverage:.4f} < {bounds.min_coverage}")
        for engine, kinds in self.weight_differences.items():
            found += [
                f"{engine} holds {len(names)} {kind} tensors, first {names[0]}"
                for kind, names in kinds.items()
            ]
        return found

    def require(self, bounds: Bounds) -> None:
        """Raises: VerificationError: E370, a threshold is not met."""
        failures = self.failures(bounds)
        if failures:
            raise VerificationError(
                "E370",
                "; ".join(failures),
                why="the engine does not sample from the policy that would be trained",
                fix="compare versions and dtypes of trainer and engine; raise a bound of [verify] "
                "only where its reason is known",
                figures=self.as_json(),
            )


@torch.no_grad()
def verify_packs(
    module: nn.Module,
    adapter: FamilyAdapter,
    packs: Sequence[Pack],
    *,
    temperature: float,
    coverage: float,
    weight_differences: Mapping[str, Mapping[str, Sequence[str]]],
    num_tensors: int,
) -> Verification:
    """Replay packs with the trainer's forward pass and compare every sampled token."""
    ours, theirs, mismatch_L, num_replayed = [], [], None, 0
    for pack in packs:
        output = adapter.forward(module, pack, temperature=temperature)
        ours.append(output.logprobs_T[pack.mask_T])
        theirs.append(pack.behaviour_logprobs_T[pack.mask_T])
        counts = output.router.native_mismatch_L
        mismatch_L = counts if mismatch_L is None else mismatch_L + counts
        if pack.routes_TLK is not None:
            num_replayed += int((pack.routes_TLK >= 0).all(-1).all(-1).sum())
    ours_N, theirs_N = torch.cat(ours), torch.cat(theirs)
    difference_N = (ours_N - theirs_N).abs()
    assert mismatch_L is not None
    return Verification(
        num_sequences=sum(len(pack.document_lengths) for pack in packs),
        num_tokens=len(difference_N),
        mean=difference_N.double().mean().item(),
        p99=torch.quantile(difference_N.double()[:16_000_000], 0.99).item(),
        max=difference_N.max().item(),
        kl=kl_estimate(theirs_N, ours_N, "k3").double().mean().item(),
        coverage=coverage,
        native_mismatch_L=tuple((mismatch_L.double() / max(1, num_replayed)).tolist()),
        weight_differences=weight_differences,
        num_tensors=num_tensors,
    )
