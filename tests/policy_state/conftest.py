"""A small olmo3moe policy, built by OLMo-core itself."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def build_module(
    *,
    num_layers: int = 2,
    width: int = 32,
    shared: bool = True,
    gating: str = "softmax",
    dtype: str = "float32",
    router_options: dict | None = None,
    seed: int = 0,
):
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionBackendName, AttentionConfig, AttentionType
    from olmo_core.nn.ddp.block import OLMoDDPTransformerBlockConfig
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
    from olmo_core.nn.lm_head import LMHeadConfig, LMHeadType
    from olmo_core.nn.moe.router import MoERouterGatingFunction
    from olmo_core.nn.moe.v2.routed_experts import RoutedExpertsConfig
    from olmo_core.nn.moe.v2.router import MoERouterConfigV2
    from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig
    from olmo_core.nn.rope import RoPEConfig
    from olmo_core.nn.transformer.config import (
        OLMoDDPModelConfig,
        TransformerBlockType,
        TransformerType,
    )
    from olmo_core.nn.transformer.init import InitMethod

    core_dtype = DType(dtype)
    norm = LayerNormConfig(name=LayerNormType.rms, eps=1e-6, bias=False, dtype=core_dtype)
    attention = AttentionConfig(
        name=AttentionType.default,
        n_heads=2,
        n_kv_heads=1,
        bias=False,
        rope=RoPEConfig(theta=500_000),
        qk_norm=norm,
        use_head_qk_norm=True,
        backend=AttentionBackendName.torch,
        dtype=core_dtype,
    )
    block = OLMoDDPTransformerBlockConfig(
        name=TransformerBlockType.moe_fused_v2,
        sequence_mixer=attention,
        layer_norm=norm,
        routed_experts=RoutedExpertsConfig(
            d_model=width, hidden_size=24, num_experts=4, bias=False, dtype=core_dtype
        ),
        routed_experts_router=MoERouterConfigV2(
            d_model=width,
            num_experts=4,
            top_k=2,
            gating_function=MoERouterGatingFunction(gating),
            dtype=DType.float32,
            lb_loss_weight=None,
            z_loss_weight=None,
            **(router_options or {}),
        ),
        shared_experts=SharedExpertsConfig(
            d_model=width, hidden_size=16, num_experts=1, bias=False, dtype=core_dtype
        )
        if shared
        else None,
    )
    config = OLMoDDPModelConfig(
        name=TransformerType.moe_fused_v2,
        d_model=width,
        vocab_size=40,
        n_layers=num_layers,
        block=block,
        lm_head=LMHeadConfig(
            name=LMHeadType.default, layer_norm=norm, bias=False, dtype=core_dtype
        ),
        dtype=core_dtype,
        init_method=InitMethod.normal,
    )
    module = config.build(init_device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # every tensor different, norms and buffers included
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return module


@pytest.fixture(params=["shared", "no_shared", "score_bias", "bfloat16"])
def module(request):
    options = {
        "shared": {},
        "no_shared": {"shared": False, "num_layers": 1},
        "score_bias": {"router_options": {"score_correction_bias": True}},
        "bfloat16": {"dtype": "bfloat16", "num_layers": 1},
    }
    return build_module(**options[request.param])


class Tensors:
    """The part of the family adapter that saving and publishing use."""

    def publication_tensors(self, module):
        from miles_olmo.policy.olmo3moe_tensors import publication_tensors

        return publication_tensors(module)

    def load_tensors(self, module, tensors):
        from miles_olmo.policy.olmo3moe_tensors import load_tensors

        load_tensors(module, tensors)


@pytest.fixture
def adapter():
    return Tensors()
