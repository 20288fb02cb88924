"""What a rollout engine produced, token for token, on its way to the trainer.

Alignment, worked out for a prompt of 3 tokens and a response of 2 (T = 5):

    position t        0   1   2 | 3   4        ids[t]
    source            p   p   p | m   m        prompt segment, model segment
    logprobs          .   .   . | l3  l4       log p(ids[t] | ids[:t]) when it was sampled
    routes row        r0  r1  r2| r3  -1       experts that token t, as INPUT, was sent to

Row t of the routes belongs to input position t, so the engine records rows 0..T-2: the last sampled
token was never fed back. Its row, and every row that was not recorded, is -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

NO_ROUTE = -1
"""Fill value of a routes row that was not recorded."""

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens from one source; model tokens all come from one policy version."""

    ids: tuple[int, ...]
    """Token ids, exactly as sampled or sent."""
    source: Literal["prompt", "model", "tool"]
    """Who wrote them."""
    loss_mask: tuple[bool, ...]
    """True where the token is trained on; False for every prompt and tool token."""
    logprobs: tuple[float, ...] | None
    """Natural-log behaviour probabilities of the sampled distribution; None unless source is model."""
    version: int | None
    """Policy version that sampled the tokens; None unless source is model."""
    routes: np.ndarray | None
    """Experts per token, int16 `[len(ids), layers, top_k]`, -1 = not recorded; None without replay."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled answer to one prompt."""

    sample_id: str
    """`"<group id>.<index in group>"`, unique in a run."""
    segments: tuple[Segment, ...]
    """Prompt first."""
    finish_reason: FinishReason
    """stop (a stop token), length (budget used up) or abort."""
    text: str
    """Decoded response, for verifiers and for people."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.ids)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments if segment.source == "model")

    @property
    def oldest_version(self) -> int | None:
        return min((s.version for s in self.segments if s.version is not None), default=None)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """All answers to one prompt with their rewards; trained whole or not at all."""

    group_id: int
    """Position in the run's prompt order (the cursor counts these)."""
    prompt_id: str
    """Identifies the data row: `"<file stem>:<line number>"`."""
    trajectories: tuple[Trajectory, ...]
    """The group's samples, in index order `[G]`."""
    rewards: tuple[float, ...]
    """One finite reward per trajectory `[G]`."""
