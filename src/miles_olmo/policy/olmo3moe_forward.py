"""Logprobs of a pack under a policy on the portable block.

Routes cover ALL layers; those of a dense layer mean nothing, are 0 where an engine made them, and are
not read. Dimension legend: T tokens of the pack, R rows that are computed of it (`algo.pack_rows`),
L layers, K experts per token, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.router_losses import RouterCounts
from miles_olmo.base.errors import TrainingError
from miles_olmo.policy.attention import DocumentLayout, attend_documents, lay_out
from miles_olmo.policy.family import PackOutput, RouterStatistics
from miles_olmo.policy.numerics import NumericRules
from miles_olmo.policy.olmo3moe_model import ForwardPass, PortableModel
from miles_olmo.policy.routing import StatisticsRecorder

HEAD_VALUES = 64 * 1024 * 1024
"""Logits that exist at one time, and in float32: 256 MiB. Fewer parts would not be faster."""


@dataclass(frozen=True)
class PackedView:
    """Every token sees the earlier tokens of its own document, up to the layer's window."""

    layout: DocumentLayout
    rules: NumericRules

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        return attend_documents(q_THD, k_TGD, v_TGD, self.layout, self.rules, window)


def tempered_logprobs(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """log softmax(logits / temperature) in float32, one temperature per row.

    Engine and trainer both call this, with the same shapes of a row, so that the bits agree. A
    temperature of 0 means greedy sampling, whose logprobs are those of the untempered distribution.

    Args:
        logits: `[M, V]`.
        temperatures: float32 `[M]`.
    """
    divisors = torch.where(temperatures > 0, temperatures, 1.0)
    return torch.log_softmax(logits.float() / divisors[:, None], dim=-1)


def forward_pack(module: PortableModel, pack: Pack, *, temperature: float) -> PackOutput:
    """Logprobs and entropies of the masked tokens of a pack, and what its routers did.

    Only the rows that predict masked tokens reach the output head. Routes are forced for rows that
    are recorded in every layer; the other rows are routed natively.

    Raises:
        TrainingError: E330, a recorded route does not fit the policy.
    """
    targets_M = pack.mask_T.nonzero()[:, 0]
    rows_M = targets_M - 1 if pack.row_T is None else pack.row_T[targets_M - 1]
    hidden, router = _run(module, pack, rows_M)
    picked_M, entropy_M = _score(module, hidden, pack.ids_T[targets_M], temperature)
    zeros_T = torch.zeros(pack.num_tokens, device=pack.ids_T.device)
    return PackOutput(
        logprobs_T=zeros_T.index_copy(0, targets_M, picked_M),
        entropy_T=zeros_T.index_copy(0, targets_M, entropy_M),
        router=router,
    )


def _score(
    module: PortableModel, hidden: torch.Tensor, targets_M: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each target and entropy of its distribution, float32 [M] each.

    Rows go through the head in parts of at most `HEAD_VALUES` logits. With several parts each is
    computed again in the backward pass, so that logits exist for one part at a time.

    Args:
        hidden: Rows of the last block, at least M; those after the targets' are padding.
    """
    num_rows, vocabulary = len(hidden), module.vocab_size
    ids = torch.cat([targets_M, targets_M.new_zeros(num_rows - len(targets_M))])

    def score(rows: torch.Tensor, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        temperatures = torch.full((len(rows),), temperature, device=rows.device)
        logprobs = tempered_logprobs(module.head(rows), temperatures)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, row_ids[:, None])[:, 0], entropy

    num_parts = max(1, min(-(-num_rows * vocabulary // HEAD_VALUES), num_rows))
    num_parts = min(num_parts, max(1, num_rows // module.rules.min_rows))
    parts = zip(hidden.tensor_split(num_parts), ids.tensor_split(num_parts), strict=True)
    if num_parts > 1:
        scored = [
            checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    else:
        scored = [score(*part) for part in parts]
    picked, entropy = (torch.cat(values) for values in zip(*scored, strict=True))
    return picked[: len(targets_M)], entropy[: len(targets_M)]


@torch.no_grad()
def count_experts(module: PortableModel, packs: Iterable[Pack]) -> RouterCounts:
    """Expert counts over packs without gradient, for global auxiliary losses without replay.

    With replay the counts follow from the routes alone: `router_losses.counts_of_routes`.
    """
    total: RouterCounts | None = None
    for pack in packs:
        nothing = torch.zeros(0, dtype=torch.int64, device=pack.ids_T.device)
        _, router = _run(module, pack, nothing)
        counts = RouterCounts(router.counts_LE, router.num_positions)
        total = counts if total is None else total + counts
    assert total is not None, "a global batch has at least one pack"
    return total


@torch.no_grad()
def reference_logits(module: PortableModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits of every position of B sequences of T tokens, `[B, T, V]`, natively routed."""
    num, length = ids_BT.shape
    shape, flat = (num * length,), ids_BT.reshape(-1)
    pack = Pack(
        ids_T=flat,
        document_lengths=(length,) * num,
        sequence_indices=tuple(range(num)),
        mask_T=flat.new_zeros(shape, dtype=torch.bool),
        advantages_T=flat.new_zeros(shape, dtype=torch.float32),
        behaviour_logprobs_T=flat.new_zeros(shape, dtype=torch.float32),
        routes_TLK=None,
    )
    hidden, _ = _run(module, pack, torch.arange(num * length, device=flat.device))
    return module.head(hidden)[: num * length].view(num, length, -1)


def _run(
    module: PortableModel, pack: Pack, rows_M: torch.Tensor
) -> tuple[torch.Tensor, RouterStatistics]:
    """Hidden rows `[M, D]` for the head, padded to `min_rows`, and the router statistics."""
    ids, layout = _padded_rows(pack, module.rules)
    sin_TD, cos_TD = module.rotary_at(layout.positions_T)
    replayed, forced_LRK = _forced_routes(module, pack, len(ids))
    tokens_per_row = _tokens_per_row(pack, len(ids))
    counted = tokens_per_row if replayed is None else tokens_per_row * replayed
    recorder = StatisticsRecorder(module.n_layers, module.router.gating_function, counted, replayed)
    rows = torch.cat([rows_M, rows_M.new_zeros(max(0, module.rules.min_rows - len(rows_M)))])
    view = PackedView(layout, module.rules)
    forward_pass = ForwardPass(sin_TD, cos_TD, view, forced_LRK, recorder, rows)
    hidden = module.hidden_rows(ids, forward_pass)
    num_required = pack.num_tokens - len(pack.document_lengths)
    num_replayed = 0 if replayed is None else int(counted.sum())
    statistics = recorder.statistics(
        num_positions=num_required if replayed is None else num_replayed,
        num_required=num_required,
        num_replayed=num_replayed,
    )
    return hidden, statistics


def _padded_rows(pack: Pack, rules: NumericRules) -> tuple[torch.Tensor, DocumentLayout]:
    """Ids of the rows and their layout, with one more document where the pass needs more rows."""
    device, lengths, rows = pack.ids_T.device, pack.document_lengths, None
    missing = rules.missing_rows(pack.num_rows)
    ids = pack.ids_T
    if pack.row_T is not None and pack.token_R is not None:
        ids = ids[pack.token_R]
        rows = (pack.row_T, pack.token_R)
        if missing:  # a document has one token more than rows
            own = torch.arange(missing, device=device)
            row_T = torch.cat([pack.row_T, own + pack.num_rows, own.new_zeros(1)])
            rows = (row_T, torch.cat([pack.token_R, own + pack.num_tokens]))
            lengths = (*lengths, missing + 1)
    elif missing:
        lengths = (*lengths, missing)
    if missing:
        ids = torch.cat([ids, ids.new_zeros(missing)])
    return ids, lay_out(lengths, rules, device, rows)


def _tokens_per_row(pack: Pack, num_rows: int) -> torch.Tensor:
    """Tokens of the pack that each row stands for, float32 [R]; a document's last is not counted."""
    counts = torch.zeros(num_rows, device=pack.ids_T.device)
    ends = torch.tensor(pack.document_lengths).cumsum(0).to(pack.ids_T.device) - 1
    rows_T = torch.arange(pack.num_tokens, device=ends.device) if pack.row_T is None else pack.row_T
    ones_T = torch.ones(pack.num_tokens, device=ends.device)
    ones_T[ends] = 0.0
    return counts.index_add_(0, rows_T.clamp(min=0), ones_T)


def _forced_routes(
    module: PortableModel, pack: Pack, num_rows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows to replay, bool [R], and experts to force, int64 [L, R, K]; both None without replay."""
    if pack.routes_TLK is None:
        return None, None
    router = module.router
    expected = (pack.num_tokens, module.n_layers, router.top_k)
    if tuple(pack.routes_TLK.shape) != expected:
        raise TrainingError(
            "E330",
            f"recorded routes have shape {tuple(pack.routes_TLK.shape)}, not {expected}",
            why="each token needs one expert per layer and choice",
            fix="serve and train the same model.shape",
        )
    if int(pack.routes_TLK.max()) >= router.num_experts or int(pack.routes_TLK.min()) < -1:
        raise TrainingError(
            "E330",
            f"recorded routes name expert {int(pack.routes_TLK.max())}",
            why=f"the policy has experts 0 to {router.num_experts - 1}, and -1 marks no route",
            fix="serve and train the same model.shape",
        )
    routes_RLK = pack.routes_TLK if pack.token_R is None else pack.routes_TLK[pack.token_R]
    replayed = (routes_RLK >= 0).all(dim=-1).all(dim=-1)
    forced_RLK = torch.where(replayed[:, None, None], routes_RLK, -1)
    missing = num_rows - len(routes_RLK)
    if missing > 0:
        forced_RLK = torch.cat([forced_RLK, forced_RLK.new_full((missing, *expected[1:]), -1)])
        replayed = torch.cat([replayed, replayed.new_zeros(missing)])
    return replayed, forced_RLK.transpose(0, 1)
