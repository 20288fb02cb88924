"""The plan's parameter counts are those of the OLMo-core model itself."""

import pytest

from miles_olmo.manifest.models import Model, ModelShape
from miles_olmo.plan.sizes import checkpoint_bytes, num_active_parameters, num_parameters
from tests.model_zoo import MORE, ZOO

SHAPES = [
    {"num_layers": 2},
    {"num_layers": 3, "num_key_value_heads": 2, "shared_expert_hidden_size": 0},
    {"num_layers": 1, "hidden_size": 64, "head_dim": 16, "num_experts_per_token": 1},
    {"num_layers": 2, "head_dim": 16, "expert_hidden_size": 48, "shared_expert_hidden_size": 24},
]


def make_shape(**changes) -> ModelShape:
    shape = {
        "vocab_size": 48,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "expert_hidden_size": 128,
        "shared_expert_hidden_size": 128,
    }
    return ModelShape(**{**shape, **changes})


def core_config(shape: ModelShape):
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionBackendName, AttentionConfig, AttentionType
    from olmo_core.nn.ddp.block import OLMoDDPTransformerBlockConfig
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
    from olmo_core.nn.lm_head import LMHeadConfig, LMHeadType
    from olmo_core.nn.moe.v2.routed_experts import RoutedExpertsConfig
    from olmo_core.nn.moe.v2.router import MoERouterConfigV2
    from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig
    from olmo_core.nn.rope import RoPEConfig
    from olmo_core.nn.transformer.config import (
        OLMoDDPModelConfig,
        TransformerBlockType,
        TransformerType,
    )

    width, dtype = shape.hidden_size, DType.float32
    norm = LayerNormConfig(name=LayerNormType.rms, eps=shape.rms_norm_eps, bias=False, dtype=dtype)
    shared = None
    if shape.shared_expert_hidden_size:
        shared = SharedExpertsConfig(
            d_model=width,
            hidden_size=shape.shared_expert_hidden_size,
            num_experts=1,
            bias=False,
            dtype=dtype,
        )
    block = OLMoDDPTransformerBlockConfig(
        name=TransformerBlockType.moe_fused_v2,
        sequence_mixer=AttentionConfig(
            name=AttentionType.default,
            n_heads=shape.num_attention_heads,
            n_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            bias=False,
            rope=RoPEConfig(theta=500_000),
            qk_norm=norm,
            use_head_qk_norm=True,
            backend=AttentionBackendName.torch,
            dtype=dtype,
        ),
        layer_norm=norm,
        routed_experts=RoutedExpertsConfig(
            d_model=width,
            hidden_size=shape.expert_hidden_size,
            num_experts=shape.num_experts,
            bias=False,
            dtype=dtype,
        ),
        routed_experts_router=MoERouterConfigV2(
            d_model=width,
            num_experts=shape.num_experts,
            top_k=shape.num_experts_per_token,
            dtype=dtype,
        ),
        shared_experts=shared,
    )
    return OLMoDDPModelConfig(
        name=TransformerType.moe_fused_v2,
        d_model=width,
        vocab_size=shape.vocab_size,
        n_layers=shape.num_layers,
        block=block,
        lm_head=LMHeadConfig(name=LMHeadType.default, layer_norm=norm, bias=False, dtype=dtype),
        dtype=dtype,
    )


@pytest.mark.parametrize("changes", SHAPES)
def test_counts_equal_those_of_the_model(changes):
    pytest.importorskip("olmo_core", reason="the train extra is not installed")
    shape = make_shape(**changes)
    config = core_config(shape)
    module = config.build(init_device="meta")
    assert num_parameters(shape) == config.num_params
    assert num_parameters(shape) == sum(p.numel() for p in module.parameters())
    assert num_active_parameters(shape) == config.num_active_params


@pytest.mark.parametrize("name", {**ZOO, **MORE})
def test_counts_of_every_kind_of_model_are_those_of_the_policy(name):
    pytest.importorskip("olmo_core", reason="the train extra is not installed")
    import torch

    from miles_olmo.policy.adapter import adapter_for

    model = {**ZOO, **MORE}[name]
    module = adapter_for(model.family).build(model, None, device=torch.device("cpu"), seed=0)
    experts = sum(p.numel() for n, p in module.named_parameters() if ".routed_experts." in n)
    total = sum(p.numel() for p in module.parameters())
    assert num_parameters(model.shape) == total
    used = model.shape.num_experts_per_token / model.shape.num_experts
    assert num_active_parameters(model.shape) == total - experts + experts * used


def test_a_checkpoint_holds_weights_and_two_moments_in_float32():
    shape = make_shape(num_layers=2)
    for dtype, each in (("float32", 12), ("bfloat16", 10)):
        assert checkpoint_bytes(Model(dtype=dtype, shape=shape)) == each * num_parameters(shape)
