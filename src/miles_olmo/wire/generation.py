"""What the HTTP server of the `core` engine asks of the model behind it.

The model lives in `policy`, the server in `rollout`; a job joins them through this protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from miles_olmo.wire.trajectory import FinishReason

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One sequence to sample."""

    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, at least one."""
    max_tokens: int
    """Budget of response tokens, at least 1."""
    temperature: float
    """0 is greedy: logprobs are then those of the untempered distribution."""
    seed: int
    """The tokens depend on weights, prompt and seed alone, not on what is batched beside them."""
    stop_token_ids: tuple[int, ...]
    """Sampling ends after one of these; the stop token is part of the response."""
    ignore_stop: bool = False
    """Sample the whole budget."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """The response to one request."""

    token_ids: tuple[int, ...]
    """Response tokens `[N]`."""
    logprobs: tuple[float, ...]
    """Natural log of the probability each token was sampled with `[N]`."""
    routes: np.ndarray
    """Chosen experts by input position, `[prompt + N - 1, layers, top_k]`, uint8 or uint16."""
    finish_reason: FinishReason


class EngineModel(Protocol):
    """Continuous batching over one policy. Called from one thread only."""

    def add(self, key: str, request: SamplingRequest) -> None:
        """Queue a sequence under a key that is not in use."""
        ...

    def step(self) -> Sequence[tuple[str, SampledSequence]]:
        """Advance up to `max_batch_size` sequences by one token; return those that finished."""
        ...

    def abort(self, key: str) -> SampledSequence | None:
        """Drop a sequence; its tokens so far (finish_reason "abort"), or None if none were sampled."""
        ...

    def drop_cache(self) -> None:
        """Forget all keys and values; running sequences are computed anew on the next step."""
        ...

    def load_weights(self, paths: Sequence[str], checksums: Mapping[str, str]) -> None:
        """Replace every tensor of the policy from safetensors files.

        All or nothing: names, shapes, dtypes, finiteness and sha256 are checked before the first
        tensor is replaced.

        Raises:
            EngineError: a tensor is missing, extra, of another shape or dtype, NaN, or its bytes
                do not match the checksum. The old weights are still in place.
        """
        ...

    def checksums(self) -> dict[str, str]:
        """sha256 of every tensor of the policy, by Hugging Face name."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Sequences queued or running."""
        ...
