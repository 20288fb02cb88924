"""From a manifest's model to OLMo-core's configuration, and to a policy with random weights."""

from __future__ import annotations

from dataclasses import replace

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
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig, LMHeadType
from olmo_core.nn.moe.router import MoERouterGatingFunction
from olmo_core.nn.moe.v2.routed_experts import RoutedExperts, RoutedExpertsConfig
from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig
from olmo_core.nn.rope import RoPEConfig
from olmo_core.nn.transformer.config import (
    TransformerBlockType,
    TransformerType,
)
from olmo_core.nn.transformer.init import InitMethod

from miles_olmo.manifest.models import Model, ModelShape
from miles_olmo.policy.expert_shards import ExpertShards
from miles_olmo.policy.numerics import rules_for
from miles_olmo.policy.olmo3moe_model import (
    PortableBlockConfig,
    PortableModel,
    PortableModelConfig,
)
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.policy.routing import ReplayRouterConfig


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
    rules = rules_for(device, model.dtype)
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
