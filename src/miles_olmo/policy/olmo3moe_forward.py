"""Logprobs of a pack under a policy on the portable block.

Routes cover ALL layers; those of a dense layer mean nothing, are 0 where an engine made them, and are
not read. Dimension legend: T tokens of the pack, L layers, K experts per token, M masked tokens,
V vocabulary.
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
    hidden, router = _run(module, pack, targets_M - 1)
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
    ids_T, lengths = _padded_ids(pack, module.rules)
    layout = lay_out(lengths, module.rules, ids_T.device)
    sin_TD, cos_TD = module.rotary_at(layout.positions_T)
    replayed_T, forced_LTK = _forced_routes(module, pack, len(ids_T))
    in_pack_T = torch.arange(len(ids_T), device=ids_T.device) < pack.num_tokens
    recorder = StatisticsRecorder(
        module.n_layers,
        module.router.gating_function,
        in_pack_T if replayed_T is None else replayed_T,
        replayed_T,
    )
    rows = torch.cat([rows_M, rows_M.new_zeros(max(0, module.rules.min_rows - len(rows_M)))])
    view = PackedView(layout, module.rules)
    forward_pass = ForwardPass(sin_TD, cos_TD, view, forced_LTK, recorder, rows)
    hidden = module.hidden_rows(ids_T, forward_pass)
    ends = torch.tensor(pack.document_lengths).cumsum(0) - 1
    num_required = pack.num_tokens - len(pack.document_lengths)
    num_replayed = 0
    if replayed_T is not None:
        num_replayed = int(replayed_T.sum() - replayed_T[ends.to(ids_T.device)].sum())
    statistics = recorder.statistics(num_required=num_required, num_replayed=num_replayed)
    return hidden, statistics


def _padded_ids(pack: Pack, rules: NumericRules) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Ids and document lengths, with one more document where the pass needs more rows."""
    missing = rules.missing_rows(pack.num_tokens)
    if missing == 0:
        return pack.ids_T, pack.document_lengths
    padding = pack.ids_T.new_zeros(missing)
    return torch.cat([pack.ids_T, padding]), (*pack.document_lengths, missing)


def _forced_routes(
    module: PortableModel, pack: Pack, num_rows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows to replay, bool [T], and experts to force, int64 [L, T, K]; both None without replay."""
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
    replayed_T = (pack.routes_TLK >= 0).all(dim=-1).all(dim=-1)
    forced_TLK = torch.where(replayed_T[:, None, None], pack.routes_TLK, -1)
    missing = num_rows - pack.num_tokens
    if missing > 0:
        forced_TLK = torch.cat([forced_TLK, forced_TLK.new_full((missing, *expected[1:]), -1)])
        replayed_T = torch.cat([replayed_T, replayed_T.new_zeros(missing)])
    return replayed_T, forced_TLK.transpose(0, 1)
