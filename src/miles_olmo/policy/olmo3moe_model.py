"""OLMo-core's `OLMoDDPModel` with blocks that run on CPU and CUDA alike.

The stock block needs TransformerEngine, CUDA streams and its own attention kernels. Ours keeps every
parameter and submodule of it and replaces the forward pass: attention inside documents (or against
a cache), experts as in `experts`, routes as an input. `ForwardPass` carries what a pass needs
besides the tokens; it is an argument of every block, so a recomputed block sees the same one.

Both families run on this block, which OLMo-core configures: norms after attention and MLP
(olmo3moe), before and after (peri-LN) or before (olmoe), a dense layer as a block that has nothing
but a shared expert. Left out: scaled RoPE, several or gated shared experts, biases, score biases,
linear attention, latent experts, scalable softmax, QK norms with gains per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from olmo_core.nn.ddp.block import OLMoDDPTransformerBlock, OLMoDDPTransformerBlockConfig
from olmo_core.nn.ddp.model import OLMoDDPModel
from olmo_core.nn.rope import RotaryEmbedding
from olmo_core.nn.transformer.config import (
    OLMoDDPModelConfig,
)

from miles_olmo.policy.expert_dispatch import dispatched_experts_forward
from miles_olmo.policy.expert_shards import ExpertShards
from miles_olmo.policy.experts import routed_experts_forward
from miles_olmo.policy.numerics import NumericRules
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.policy.routing import ReplayRouter, RoutingObserver


class AttentionView(Protocol):
    """What the queries of a pass may look at: their documents, or a cache."""

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Attended values `[T, H * D]`; a query sees its newest `window` positions, or all."""
        ...


@dataclass(frozen=True)
class ForwardPass:
    """Everything a pass needs besides its T tokens."""

    sin_TD: torch.Tensor
    """RoPE sines at each token's position in its document [T, head_dim]."""
    cos_TD: torch.Tensor
    """RoPE cosines [T, head_dim]."""
    view: AttentionView
    forced_LTK: torch.Tensor | None
    """Experts to use, int64 [L, T, K] over ALL layers, -1 = route natively, dense layers' rows are
    not read; None without replay."""
    observer: RoutingObserver
    head_rows_M: torch.Tensor
    """Rows that reach the output head, int64 [M]."""


class PortableBlock(OLMoDDPTransformerBlock):
    """The fused MoE block with a forward pass in plain torch."""

    rules: NumericRules
    ranks: Ranks = ALONE
    """Processes that share the routed experts."""

    def combined_forward_no_ep(
        self,
        x: torch.Tensor,
        *,
        forward_pass: ForwardPass,
        loss_div_factor: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """One block over `[1, T, D]`."""
        attended = self._residual_attention(x, forward_pass)
        mlp_input = self._prepare_moe_input(attended)
        routed = self._route(mlp_input[0], forward_pass)[None]
        shared = None if self.shared_experts is None else self.shared_experts(mlp_input)[0]
        return self._res_norm_mlp(attended, self._merge_routed_and_shared(routed, shared))

    def combined_forward_shared_only(
        self,
        x: torch.Tensor,
        *,
        forward_pass: ForwardPass,
        loss_div_factor: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """One dense block over `[1, T, D]`."""
        attended = self._residual_attention(x, forward_pass)
        assert self.shared_experts is not None
        dense = self.shared_experts(self._prepare_moe_input(attended))[0]
        return self._res_norm_mlp(attended, dense)

    def _residual_attention(self, x: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        if self.use_pre_norm:
            return x + self._attend(self.attention_norm(x), forward_pass)
        norm = self.attention_input_norm
        return x + self.attention_norm(self._attend(x if norm is None else norm(x), forward_pass))

    def _attend(self, x: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        attention: Any = self.attention
        q, k, v = attention._prepare_qkv(
            x, pos_sin=forward_pass.sin_TD, pos_cos=forward_pass.cos_TD
        )
        values_TD = forward_pass.view.attend(
            self.block_idx, q[0], k[0], v[0], attention.window_size
        )
        return attention.w_out(self._gated(values_TD, x[0]))[None]

    def _gated(self, values_TD: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """Attended values times their gate, rounded as `Attention.forward` rounds it."""
        attention: Any = self.attention
        if attention.gate is None:
            return values_TD
        gate = attention.w_g(x_TD)
        if attention.gate.full_precision:
            gate = gate.float()
        gate = torch.sigmoid(gate).to(values_TD.dtype)
        # Head-wise there is one gate for each run of head_dim values.
        return (values_TD.view(*gate.shape, -1) * gate.unsqueeze(-1)).view_as(values_TD)

    def _route(self, x_TD: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        router, experts = self.routed_experts_router, self.routed_experts
        assert isinstance(router, ReplayRouter) and experts is not None
        forced_LTK = forward_pass.forced_LTK
        forced_TK = None if forced_LTK is None else forced_LTK[self.block_idx]
        weights_TK, indices_TK, counts_E, decision = router.route(x_TD, forced_TK)
        forward_pass.observer.observe(self.block_idx, decision)
        if self.ranks.expert > 1:
            return dispatched_experts_forward(
                experts,
                x_TD,
                weights_TK,
                indices_TK,
                counts_E,
                min_rows=self.rules.min_rows,
                ranks=self.ranks,
            )
        return routed_experts_forward(
            experts, x_TD, weights_TK, indices_TK, counts_E, min_rows=self.rules.min_rows
        )


@dataclass
class PortableBlockConfig(OLMoDDPTransformerBlockConfig):
    """Builds a `PortableBlock`."""

    def build(self, **context: Any) -> PortableBlock:
        fields = self.as_dict(exclude_none=False, recurse=False)
        for name in ("name", "feed_forward", "feed_forward_moe"):  # of the parent configuration
            fields.pop(name)
        norm = fields.pop("layer_norm")
        return PortableBlock(**fields, **context, attention_norm=norm, feed_forward_norm=norm)


class PortableModel(OLMoDDPModel):
    """`OLMoDDPModel` in the dtype of its parameters, whose forward takes a `ForwardPass`."""

    expert_shards: ExpertShards | None = None
    """How routed experts are spread over processes; None when this one has them all."""
    _training_dtype: torch.dtype  # type: ignore[misc]  # bfloat16 for the stock class, ours per model

    def __init__(self, *, max_positions: int, **fields: Any) -> None:
        super().__init__(**fields)
        self._training_dtype = self.dtype
        self.max_positions = max_positions

    def _prepare_inputs(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        forward_pass = kwargs.pop("forward_pass")
        prepared = super()._prepare_inputs(input_ids, *args, **kwargs)
        prepared[2]["forward_pass"] = forward_pass
        return prepared

    def _forward_blocks(
        self, h: torch.Tensor, all_block_kwargs: dict[str, Any], per_block_kwargs: dict[int, Any]
    ) -> torch.Tensor:
        # Select before the final norm and the head: rows that no loss needs are never computed.
        hidden = super()._forward_blocks(h, all_block_kwargs, per_block_kwargs)
        return hidden[0].index_select(0, all_block_kwargs["forward_pass"].head_rows_M)[None]

    def hidden_rows(self, ids_T: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        """What the output head gets: `[M, D]`, the last block's outputs at `head_rows_M`."""
        ids, _, shared, per_block, _ = self._prepare_inputs(ids_T[None], forward_pass=forward_pass)
        return self._forward_blocks(self.forward_embed(ids), shared, per_block)[0]

    def head(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Logits `[M, V]` of hidden rows, in the model's dtype."""
        assert self.lm_head is not None, "every family has its head on this process"
        return self.lm_head(hidden_MD[None])[0]

    @property
    def rules(self) -> NumericRules:
        """The numeric rules of the device that the model lives on."""
        return next(iter(self.portable_blocks())).rules

    @property
    def router(self) -> ReplayRouter:
        """The first routed layer's router; all are configured alike."""
        router = self.portable_blocks()[self.routed_layers[0]].routed_experts_router
        assert isinstance(router, ReplayRouter)
        return router

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with a router, ascending; the others are dense."""
        blocks = enumerate(self.portable_blocks())
        return tuple(index for index, block in blocks if block.has_routed_experts)

    def portable_blocks(self) -> list[PortableBlock]:
        """The blocks, first to last."""
        return [block for block in self.blocks.values() if isinstance(block, PortableBlock)]

    def rotary_at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE sines and cosines at the positions, both float32 `[T, head_dim]`.

        Without RoPE they are empty, `[T, 0]`, and not read.
        """
        rope = self.portable_blocks()[0].attention.rope
        if rope is None:
            empty = torch.zeros(len(positions_T), 0, device=positions_T.device)
            return empty, empty
        assert isinstance(rope, RotaryEmbedding)
        buffers = rope.get_buffers(self.max_positions, positions_T.device)
        assert buffers.pos_sin is not None and buffers.pos_cos is not None
        return (
            buffers.pos_sin.index_select(0, positions_T),
            buffers.pos_cos.index_select(0, positions_T),
        )


@dataclass
class PortableModelConfig(OLMoDDPModelConfig):
    """Builds a `PortableModel`."""

    max_positions: int = 0
    """Longest sequence in tokens."""

    def build(self, *, init_device: str = "cpu") -> PortableModel:
        fields = self.as_dict(exclude_none=False, recurse=False)
        for name in ("name", "freeze_params"):
            fields.pop(name)
        fields["dtype"] = self.dtype.as_pt()
        return PortableModel(**fields, init_device=init_device)
