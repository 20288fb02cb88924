"""The `core` engine's model: continuous batching over one policy, on CPU or one GPU.

Every step prefills what is new (once per distinct prefix), decodes all running sequences in one pass
and samples a token for each. On a CPU with one thread its logprobs equal those of
`FamilyAdapter.forward` on the finished sequences bit for bit, whatever was batched together (see
`numerics`). A sequence whose cache was dropped is prefilled again with all its tokens; its earlier
logprobs stay, its routes become those of the last time a position was computed.

Dimension legend: T rows of a pass, L routed layers, K experts per token, N sequences, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from miles_olmo.base.errors import EngineError
from miles_olmo.policy.attention import lay_out
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.kv_cache import DecodeView, KvCache, PrefillView
from miles_olmo.policy.olmo3moe_forward import PackedView, tempered_logprobs
from miles_olmo.policy.olmo3moe_model import AttentionView, ForwardPass, PortableModel
from miles_olmo.policy.routing import RouteRecorder
from miles_olmo.policy.sampling import draw_tokens, uniforms
from miles_olmo.policy.weight_files import read_checked, tensor_checksums
from miles_olmo.wire.generation import SampledSequence, SamplingRequest
from miles_olmo.wire.trajectory import FinishReason


@dataclass
class _Sequence:
    """One sequence on its way."""

    key: str
    request: SamplingRequest
    stop_ids: frozenset[int]
    uniforms: np.ndarray
    """One number per token of the budget."""
    tokens: list[int]
    """Prompt and response so far."""
    logprobs: list[float] = field(default_factory=list)
    slot: int | None = None
    cached: int = 0
    """Positions whose keys and values are in the slot."""
    prefix_routes: np.ndarray | None = None
    """Routes of the last prefill [prefix, L, K]."""
    later_routes: list[np.ndarray] = field(default_factory=list)
    """Routes of each position decoded since [L, K]."""

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)


class CoreEngineModel:
    """Implements `wire.generation.EngineModel`. Called from one thread only."""

    def __init__(self, module: nn.Module, adapter: FamilyAdapter, *, max_batch_size: int) -> None:
        """
        Args:
            module: The policy, a `PortableModel`, as `adapter.build(model, None, ...)` made it.
            adapter: Loads and names its tensors.
            max_batch_size: Sequences that run at the same time.
        """
        assert isinstance(module, PortableModel), f"not built by an adapter: {type(module)}"
        self._module = module.eval()
        self._adapter = adapter
        self._device = module.device
        self._max_batch_size = max_batch_size
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._cache = KvCache(module.n_layers, max_batch_size, module.rules)
        num_experts = module.router.num_experts
        self._route_dtype = np.uint8 if num_experts <= 256 else np.uint16

    @property
    def num_unfinished(self) -> int:
        """Sequences queued or running."""
        return len(self._waiting) + len(self._running)

    def add(self, key: str, request: SamplingRequest) -> None:
        """Queue a sequence under a key that is not in use.

        Raises:
            EngineError: E270, the request does not fit the model.
        """
        self._check(request)
        stop_ids = frozenset() if request.ignore_stop else frozenset(request.stop_token_ids)
        numbers = uniforms(request.seed, request.max_tokens)
        sequence = _Sequence(key, request, stop_ids, numbers, list(request.prompt_ids))
        self._waiting.append(sequence)

    @torch.no_grad()
    def step(self) -> Sequence[tuple[str, SampledSequence]]:
        """Advance up to `max_batch_size` sequences by one token; return those that finished."""
        self._admit()
        if not self._running:
            return []
        fresh = [sequence for sequence in self._running.values() if sequence.cached == 0]
        going = [sequence for sequence in self._running.values() if sequence.cached > 0]
        logits = []
        if going:
            logits.append(self._decode(going))
        if fresh:
            logits.append(self._prefill(fresh))
        self._sample(going + fresh, torch.cat(logits))
        return [
            (sequence.key, self._finish(sequence, reason))
            for sequence in going + fresh
            if (reason := _finish_reason(sequence)) is not None
        ]

    def abort(self, key: str) -> SampledSequence | None:
        """Drop a sequence; its tokens so far (finish_reason "abort"), or None if none were sampled."""
        sequence = self._running.get(key)
        if sequence is not None:
            finished = self._finish(sequence, "abort")
            return finished if finished.token_ids else None
        self._waiting = deque(waiting for waiting in self._waiting if waiting.key != key)
        return None

    def drop_cache(self) -> None:
        """Forget all keys and values; running sequences are computed anew on the next step."""
        self._cache.clear()
        for sequence in self._running.values():
            sequence.cached = 0

    def load_weights(self, paths: Sequence[str], checksums: Mapping[str, str]) -> None:
        """Replace every tensor of the policy from safetensors files; all or nothing.

        The cache still holds keys and values of the old weights: call `drop_cache` to refresh it.

        Raises:
            EngineError: E271 unreadable file, E272 bytes that do not match their checksum,
                E411 missing or extra tensors, E412 wrong shape or dtype, E413 NaN or infinity.
        """
        tensors = read_checked([Path(path) for path in paths], checksums)
        self._adapter.load_tensors(self._module, tensors)

    def checksums(self) -> dict[str, str]:
        """sha256 of every tensor of the policy, by Hugging Face name."""
        return tensor_checksums(self._adapter.publication_tensors(self._module))

    def _check(self, request: SamplingRequest) -> None:
        ids, vocab_size = request.prompt_ids, self._module.vocab_size
        longest = self._module.max_positions
        total = len(ids) + request.max_tokens
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            raise EngineError(
                "E270",
                f"a prompt of {len(ids)} tokens is empty or leaves the vocabulary",
                why=f"token ids are 0 to {vocab_size - 1}",
                fix="send ids of this model's tokenizer",
            )
        if request.max_tokens < 1 or total > longest:
            raise EngineError(
                "E270",
                f"prompt of {len(ids)} and max_tokens = {request.max_tokens}",
                why=f"at least one and in all at most {longest} tokens have a position",
                fix="shorten the prompt or the budget, or raise model.shape.max_position_embeddings",
            )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            sequence = self._waiting.popleft()
            sequence.slot = self._cache.take_slot()
            self._running[sequence.key] = sequence
            self._cache.reserve(len(sequence.tokens) + sequence.request.max_tokens)

    def _prefill(self, sequences: list[_Sequence]) -> torch.Tensor:
        """Compute whole prefixes, equal ones once; logits of each sequence's last token [N, V]."""
        sharing: dict[tuple[int, ...], list[_Sequence]] = {}
        for sequence in sequences:
            sharing.setdefault(tuple(sequence.tokens), []).append(sequence)
        ids = [token for prefix in sharing for token in prefix]
        lengths = [len(prefix) for prefix in sharing]
        starts = np.cumsum([0, *lengths])
        documents = [
            (int(start), length, [member.slot for member in members if member.slot is not None])
            for start, length, members in zip(starts, lengths, sharing.values(), strict=False)
        ]
        missing = self._module.rules.missing_rows(len(ids))
        if missing:
            ids, lengths = [*ids, *[0] * missing], [*lengths, missing]
        layout = lay_out(lengths, self._module.rules, self._device)
        packed = PackedView(layout, self._module.rules)
        ends = [start + length - 1 for start, length, _ in documents]
        logits, routes_TLK = self._forward(
            ids, layout.positions_T, PrefillView(packed, self._cache, documents), ends
        )
        document_of = {}
        for index, ((start, length, _), members) in enumerate(
            zip(documents, sharing.values(), strict=True)
        ):
            for member in members:
                document_of[member.key] = index
                member.cached = length
                member.prefix_routes = routes_TLK[start : start + length]
                member.later_routes = []
        return logits[[document_of[sequence.key] for sequence in sequences]]

    def _decode(self, sequences: list[_Sequence]) -> torch.Tensor:
        """Compute each sequence's newest token against its cache; logits [N, V]."""
        rules = self._module.rules
        positions = [sequence.cached for sequence in sequences]
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        missing = rules.missing_rows(len(sequences))
        ids = [sequence.tokens[-1] for sequence in sequences]
        view = DecodeView(self._cache, slots, positions, len(ids) + missing, rules)
        logits, routes_TLK = self._forward(
            [*ids, *ids[:1] * missing],
            torch.tensor([*positions, *positions[:1] * missing], device=self._device),
            view.to(self._device),
            range(len(sequences)),
        )
        for sequence, routes_LK in zip(sequences, routes_TLK, strict=False):
            sequence.cached += 1
            sequence.later_routes.append(routes_LK)
        return logits

    def _forward(
        self,
        ids: list[int],
        positions_T: torch.Tensor,
        view: AttentionView,
        rows: Sequence[int],
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Logits of the rows [N, V], and the experts of all rows [T, L, K]."""
        recorder = RouteRecorder(self._module.n_layers)
        sin_TD, cos_TD = self._module.rotary_at(positions_T)
        padded = [*rows, *[0] * max(0, self._module.rules.min_rows - len(rows))]
        head_rows = torch.tensor(padded, device=self._device)
        logits = self._module(
            torch.tensor([ids], device=self._device),
            forward_pass=ForwardPass(sin_TD, cos_TD, view, None, recorder, head_rows),
        )
        routes_TLK = recorder.routes_TLK().cpu().numpy().astype(self._route_dtype)
        return logits[0, : len(rows)], routes_TLK

    def _sample(self, sequences: list[_Sequence], logits_NV: torch.Tensor) -> None:
        temperatures = [sequence.request.temperature for sequence in sequences]
        temperatures_N = torch.tensor(temperatures, dtype=torch.float32, device=self._device)
        numbers = [sequence.uniforms[sequence.num_sampled] for sequence in sequences]
        uniforms_N = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        logprobs_NV = tempered_logprobs(logits_NV, temperatures_N)
        if not bool(torch.isfinite(logits_NV).all()):
            raise EngineError(
                "E273",
                "the policy's logits are NaN or infinite",
                why="the published weights have diverged; there is no distribution to sample from",
                fix="resume from the last good checkpoint with a lower "
                "train.optimizer.learning_rate",
            )
        tokens_N = draw_tokens(logprobs_NV, uniforms_N, temperatures_N == 0)
        picked_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        for sequence, token, logprob in zip(
            sequences, tokens_N.tolist(), picked_N.tolist(), strict=True
        ):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> SampledSequence:
        """Free the sequence's slot and return its response."""
        del self._running[sequence.key]
        assert sequence.slot is not None
        self._cache.release_slot(sequence.slot)
        routes = _routes(sequence, self._module, self._route_dtype)
        return SampledSequence(
            token_ids=tuple(sequence.tokens[len(sequence.request.prompt_ids) :]),
            logprobs=tuple(sequence.logprobs),
            routes=routes,
            finish_reason=reason,
        )


def _routes(sequence: _Sequence, module: PortableModel, dtype: type) -> np.ndarray:
    """Experts by input position, all but the last token's `[prompt + N - 1, L, K]`."""
    if sequence.prefix_routes is None:
        return np.zeros((0, module.n_layers, module.router.top_k), dtype)
    if not sequence.later_routes:
        return sequence.prefix_routes.copy()
    return np.concatenate([sequence.prefix_routes, *(row[None] for row in sequence.later_routes)])


def _finish_reason(sequence: _Sequence) -> FinishReason | None:
    if sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return "length" if sequence.num_sampled == sequence.request.max_tokens else None
