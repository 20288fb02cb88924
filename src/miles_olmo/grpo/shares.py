"""One optimizer update, cut into what each trainer process does of it.

Packs are dealt out in order of size, largest first, so that the packs that run side by side have
similar lengths. All processes run the same number of passes, because each pass of a policy whose
experts are spread needs all of its processes: one that has no pack left runs `EMPTY`, one token
without a loss, whose gradient is zero and which no metric counts.

Dimension legend: T tokens, L routed layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from typing import Any

import torch

from miles_olmo.algo.normaliser import LossNormaliser
from miles_olmo.algo.pack import Pack
from miles_olmo.algo.router_losses import RouterCounts, counts_of_routes
from miles_olmo.grpo.batch import UpdateBatch
from miles_olmo.manifest.models import ModelShape
from miles_olmo.policy.rank_messages import Message

EMPTY = Pack(
    ids_T=torch.zeros(1, dtype=torch.int64),
    document_lengths=(1,),
    sequence_indices=(0,),
    mask_T=torch.zeros(1, dtype=torch.bool),
    advantages_T=torch.zeros(1),
    behaviour_logprobs_T=torch.zeros(1),
    routes_TLK=None,
)
"""The pack of a pass that nothing is learned from."""

_TENSORS = tuple(f.name for f in fields(Pack) if f.name.rpartition("_")[2] in ("T", "TLK", "R"))


@dataclass(frozen=True)
class BatchShare:
    """What one process needs for one optimizer update."""

    packs: tuple[Pack, ...]
    """Its own packs."""
    num_passes: int
    """Forward and backward passes of every process; at least as many as packs."""
    normaliser: LossNormaliser
    """Denominators of the GLOBAL batch."""
    sample_ids: tuple[str, ...]
    """Sample of each sequence of the global batch, for errors."""
    route_counts: RouterCounts | None
    """Of the global batch, where every pack has recorded routes and a loss needs them."""
    num_packs: int
    """Packs of the global batch."""
    num_tokens: int
    """Tokens of the global batch."""
    num_rows: int
    """Of these, the ones that are computed."""
    coverage: float
    """Share of required routes that were recorded, in the global batch."""

    def to(self, device: torch.device) -> BatchShare:
        """The same share with its tensors on a device."""
        counts = self.route_counts
        if counts is not None:
            counts = RouterCounts(counts.counts_LE.to(device), counts.num_positions)
        packs = tuple(pack.to(device) for pack in self.packs)
        return replace(self, packs=packs, route_counts=counts)

    def passes(self) -> Iterator[Pack | None]:
        """Own packs, then None for every pass without one."""
        yield from self.packs
        yield from [None] * (self.num_passes - len(self.packs))


def share_out(
    batch: UpdateBatch, num_processes: int, *, shape: ModelShape, count_routes: bool
) -> list[BatchShare]:
    """The share of each process.

    Args:
        shape: Of the policy; its routed layers are counted.
        count_routes: Whether an auxiliary loss needs the batch's expert counts.
    """
    counts = None
    routes = [pack.routes_TLK for pack in batch.packs if pack.routes_TLK is not None]
    if count_routes and len(routes) == len(batch.packs):
        layers, num_experts = list(shape.routed_layers), shape.num_experts
        counts = reduce(add, (counts_of_routes(r[:, layers], num_experts) for r in routes))
    return [
        BatchShare(
            packs=packs,
            num_passes=-(-len(batch.packs) // num_processes),
            normaliser=batch.normaliser,
            sample_ids=tuple(sequence.sample_id for sequence in batch.sequences),
            route_counts=counts,
            num_packs=len(batch.packs),
            num_tokens=sum(pack.num_tokens for pack in batch.packs),
            num_rows=sum(pack.num_rows for pack in batch.packs),
            coverage=batch.coverage.share,
        )
        for packs in deal(batch.packs, num_processes)
    ]


def deal(packs: Sequence[Pack], num_processes: int) -> list[tuple[Pack, ...]]:
    """Packs of each process; of one process, in their own order."""
    if num_processes == 1:
        return [tuple(packs)]
    by_size = sorted(packs, key=lambda pack: -pack.num_rows)
    return [tuple(by_size[rank::num_processes]) for rank in range(num_processes)]


# On the way to another process.


def shares_message(shares: Sequence[BatchShare]) -> Message:
    """The shares of one process, one for each update of a step."""
    values, tensors = [], {}
    for number, share in enumerate(shares):
        counts = share.route_counts
        packs, pack_tensors = packs_parts(share.packs, f"{number}.")
        tensors |= pack_tensors
        if counts is not None:
            tensors[f"{number}.counts_LE"] = counts.counts_LE
        values.append(
            {
                "packs": packs,
                "num_passes": share.num_passes,
                "tokens_S": share.normaliser.tokens_S,
                "constant_length": share.normaliser.constant_length,
                "sample_ids": share.sample_ids,
                "num_positions": None if counts is None else counts.num_positions,
                "num_packs": share.num_packs,
                "num_tokens": share.num_tokens,
                "num_rows": share.num_rows,
                "coverage": share.coverage,
            }
        )
    return Message({"shares": values}, tensors)


def shares_of_message(message: Message) -> list[BatchShare]:
    """Inverse of `shares_message`."""
    shares = []
    for number, value in enumerate(message.values["shares"]):
        counts = None
        if value["num_positions"] is not None:
            counts = RouterCounts(message.tensors[f"{number}.counts_LE"], value["num_positions"])
        shares.append(
            BatchShare(
                packs=packs_of_parts(value["packs"], message, f"{number}."),
                num_passes=value["num_passes"],
                normaliser=LossNormaliser(tuple(value["tokens_S"]), value["constant_length"]),
                sample_ids=tuple(value["sample_ids"]),
                route_counts=counts,
                num_packs=value["num_packs"],
                num_tokens=value["num_tokens"],
                num_rows=value["num_rows"],
                coverage=value["coverage"],
            )
        )
    return shares


def packs_parts(
    packs: Sequence[Pack], prefix: str = ""
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """JSON values and tensors of packs."""
    values = [
        {"document_lengths": p.document_lengths, "sequence_indices": p.sequence_indices}
        for p in packs
    ]
    tensors = {
        f"{prefix}{number}.{name}": tensor
        for number, pack in enumerate(packs)
        for name in _TENSORS
        if (tensor := getattr(pack, name)) is not None
    }
    return values, tensors


def packs_of_parts(
    values: Sequence[dict[str, Any]], message: Message, prefix: str = ""
) -> tuple[Pack, ...]:
    """Inverse of `packs_parts`."""

    def tensors_of(number: int) -> dict[str, Any]:
        return {name: message.tensors.get(f"{prefix}{number}.{name}") for name in _TENSORS}

    return tuple(
        Pack(
            document_lengths=tuple(value["document_lengths"]),
            sequence_indices=tuple(value["sequence_indices"]),
            **tensors_of(number),
        )
        for number, value in enumerate(values)
    )
