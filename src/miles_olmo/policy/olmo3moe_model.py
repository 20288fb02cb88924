"""OLMo-core's `OLMoDDPModel` from a manifest, with blocks that run on CPU and CUDA alike.

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

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from olmo_core.config import DType
from olmo_core.nn.attention import (
    AttentionBackendName,
    AttentionConfig,
    AttentionType,
    GateConfig,
    GateGranularity,
    SlidingWindowAttentionConfig,
)
from olmo_core.nn.ddp.block import OLMoDDPTransformerBlock, OLMoDDPTransformerBlockConfig
from olmo_core.nn.ddp.model import OLMoDDPModel
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig, LMHeadType
from olmo_core.nn.moe.router import MoERouterGatingFunction
from olmo_core.nn.moe.v2.routed_experts import RoutedExperts, RoutedExpertsConfig
from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig
from olmo_core.nn.rope import RoPEConfig, RotaryEmbedding
from olmo_core.nn.transformer.config import (
    OLMoDDPModelConfig,
    TransformerBlockType,
    TransformerType,
)
from olmo_core.nn.transformer.init import InitMethod

from miles_olmo.manifest.models import Model, ModelShape
from miles_olmo.policy.expert_dispatch import dispatched_experts_forward
from miles_olmo.policy.expert_shards import ExpertShards
from miles_olmo.policy.experts import routed_experts_forward
from miles_olmo.policy.numerics import NumericRules, rules_for
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.policy.routing import ReplayRouter, ReplayRouterConfig, RoutingObserver


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


def model_config(model: Model, *, recompute: bool) -> PortableModelConfig:
    """OLMo-core's configuration of a manifest's model."""
    shape, dtype = model.shape, DType(model.dtype)
    norm = LayerNormConfig(name=LayerNormType.rms, eps=shape.rms_norm_eps, bias=False, dtype=dtype)
    block = PortableBlockConfig(
        name=TransformerBlockType.moe_fused_v2,
        sequence_mixer=_attention_config(shape, norm, dtype),
        layer_norm=norm,
        use_peri_norm=shape.use_peri_ln,
        use_pre_norm=model.family == "olmoe",
        routed_experts=RoutedExpertsConfig(
            d_model=shape.hidden_size,
            hidden_size=shape.expert_hidden_size,
            num_experts=shape.num_experts,
            bias=False,
            dtype=dtype,
        ),
        routed_experts_router=_router_config(shape, dtype),
        shared_experts=_mlp_config(shape, shape.shared_expert_hidden_size, dtype),
    )
    dense = replace(
        block,
        routed_experts=None,
        routed_experts_router=None,
        shared_experts=_mlp_config(shape, shape.dense_hidden_size, dtype),
    )
    return PortableModelConfig(
        name=TransformerType.moe_fused_v2,
        d_model=shape.hidden_size,
        vocab_size=shape.vocab_size,
        n_layers=shape.num_layers,
        block=block,
        block_overrides=dict.fromkeys(shape.dense_layers_indices, dense) or None,
        embedding_norm=norm if shape.embed_norm else None,
        embed_scale=None if shape.embed_scale == 1.0 else shape.embed_scale,
        lm_head=LMHeadConfig(name=LMHeadType.default, layer_norm=norm, bias=False, dtype=dtype),
        dtype=dtype,
        init_method=InitMethod.normal,
        init_std=shape.initializer_std,
        recompute_each_block=recompute,
        max_positions=shape.max_position_embeddings,
    )


def _attention_config(shape: ModelShape, norm: LayerNormConfig, dtype: DType) -> AttentionConfig:
    gate = shape.attention_gate_type
    theta = shape.rope_theta
    windows = [-1 if window is None else window for window in shape.windows]
    return AttentionConfig(
        name=AttentionType.default,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        bias=False,
        # A whole number stays an integer: OLMo-core's type, and the same table as ever.
        rope=RoPEConfig(theta=int(theta) if theta.is_integer() else theta)  # pyright: ignore
        if shape.use_rope
        else None,
        qk_norm=norm,
        use_head_qk_norm=shape.use_head_qk_norm,
        gate=GateConfig(GateGranularity(gate), shape.attention_gate_full_precision)
        if gate
        else None,
        sliding_window=SlidingWindowAttentionConfig(
            pattern=windows,
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
        if any(shape.windows)
        else None,
        backend=AttentionBackendName.torch,
        dtype=dtype,
    )


def _router_config(shape: ModelShape, dtype: DType) -> ReplayRouterConfig:
    return ReplayRouterConfig(
        d_model=shape.hidden_size,
        num_experts=shape.num_experts,
        top_k=shape.num_experts_per_token,
        gating_function=MoERouterGatingFunction(shape.router),
        normalize_expert_weights=shape.expert_weights_norm
        if shape.normalize_expert_weights
        else None,
        restore_weight_scale=shape.restore_weight_scale,
        original_top_k=shape.original_num_experts_per_token,
        lb_loss_weight=None,
        z_loss_weight=None,
        dtype=dtype,
    )


def _mlp_config(shape: ModelShape, width: int, dtype: DType) -> SharedExpertsConfig | None:
    """A shared expert, or a dense layer's MLP, of this inner width; None without one."""
    if width == 0:
        return None
    return SharedExpertsConfig(
        d_model=shape.hidden_size,
        hidden_size=width,
        num_experts=1,
        bias=False,
        dtype=dtype,
    )


def build_model(
    model: Model,
    *,
    recompute: bool,
    device: torch.device,
    seed: int,
    ranks: Ranks = ALONE,
) -> PortableModel:
    """A policy with random weights that depend on shape and seed alone.

    Matrices (and the router's flat matrix) are normal with `shape.initializer_std`, drawn in
    float32 on the CPU from one generator in the order of `named_parameters`; norms are ones. With
    expert parallelism the routed experts are this rank's, with the weights that one process would
    draw for them.
    """
    built = model_config(model, recompute=recompute).build(init_device="cpu")
    if ranks.expert > 1:
        _keep_own_experts(built, ranks)
    _draw_weights(built, model.shape.initializer_std, seed)
    built.to(device)
    rules = rules_for(device)
    for block in built.portable_blocks():
        block.rules = rules
    return built


def _keep_own_experts(module: PortableModel, ranks: Ranks) -> None:
    """Cut the routed experts down to this rank's."""
    names = []
    for prefix, experts in module.named_modules():
        if isinstance(experts, RoutedExperts):
            for name, parameter in experts.named_parameters(recurse=False):
                own = parameter.detach().chunk(ranks.expert)[ranks.expert_index]
                parameter.data = own.clone()  # in place: other objects hold the parameter, too
                names.append(f"{prefix}.{name}")
            experts.num_local_experts = experts.num_experts // ranks.expert
    for block in module.portable_blocks():
        block.ranks = ranks
    module.expert_shards = ExpertShards(ranks, frozenset(names))


@torch.no_grad()
def _draw_weights(module: PortableModel, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = module.expert_shards
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        shape = parameter.shape if shards is None else shards.whole_layout(name, parameter).shape
        drawn = torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(drawn if shards is None else shards.own(name, drawn))
