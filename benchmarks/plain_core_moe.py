"""A yardstick for the trainer's speed: OLMo-core's model with the plainest forward that runs.

The stock block needs TransformerEngine. Here its two calls are replaced by the obvious code: sort
tokens by expert, two grouped products, a weighted sum in float32, and attention of one document after
another. The logits of every position exist at once, in float32. Nothing of `miles_olmo` computes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from olmo_core.config import DType
from olmo_core.nn.attention import AttentionBackendName, AttentionConfig, AttentionType
from olmo_core.nn.attention.backend import TorchAttentionBackend
from olmo_core.nn.ddp.block import OLMoDDPTransformerBlock, OLMoDDPTransformerBlockConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig, LMHeadType
from olmo_core.nn.moe.router import MoERouterGatingFunction
from olmo_core.nn.moe.v2.routed_experts import RoutedExpertsConfig
from olmo_core.nn.moe.v2.router import MoERouterConfigV2, MoERouterV2
from olmo_core.nn.rope import RoPEConfig
from olmo_core.nn.transformer.config import (
    OLMoDDPModelConfig,
    TransformerBlockType,
    TransformerType,
)
from olmo_core.nn.transformer.init import InitMethod

from miles_olmo.manifest.models import ModelShape


class PlainBlock(OLMoDDPTransformerBlock):
    def combined_forward_no_ep(self, x, *, loss_div_factor=None, **kwargs):
        attended = self._res_norm_attn(x, **kwargs)
        moe_input = self._prepare_moe_input(attended)
        router, experts = self.routed_experts_router, self.routed_experts
        weights, indices, counts, _ = router(moe_input, False, loss_div_factor=loss_div_factor)
        rows, top_k = moe_input.reshape(-1, moe_input.shape[-1]), router.top_k
        order = torch.argsort(indices.reshape(-1), stable=True)
        offsets = counts.to(torch.int32).cumsum(0, dtype=torch.int32)
        up_gate = F.grouped_mm(
            rows[order // top_k], experts.w_up_gate.transpose(1, 2), offs=offsets
        )
        out = F.grouped_mm(experts.chunk_and_activate(up_gate), experts.w_down, offs=offsets)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        out = out[inverse].view(len(rows), top_k, -1)
        routed = (out.float() * weights.reshape(-1, top_k, 1).float()).sum(1).to(out.dtype)
        return self._res_norm_mlp(
            attended, self._merge_routed_and_shared(routed.view(x.shape), None)
        )


class PlainRouter(MoERouterV2):
    """The stock router, or recorded experts with weights from live scores."""

    routes = None

    def get_top_k(self, scores):
        weights, indices = super().get_top_k(scores)
        if self.routes is not None:
            indices = self.routes.view(indices.shape)
            weights = scores.gather(-1, indices)
        return weights, indices


class PlainAttention(TorchAttentionBackend):
    def forward(self, qkv, cu_doc_lens=None, **_):
        q, k, v = (x.transpose(1, 2) for x in qkv)
        bounds = cu_doc_lens.tolist()
        outputs = [
            F.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=self.scale
            )
            for a, b in pairwise(bounds)
        ]
        return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def build(shape: ModelShape, *, recompute: bool, device: str = "cuda") -> torch.nn.Module:
    """The model of a manifest's `[model.shape]` in bfloat16."""
    dtype = DType.bfloat16
    norm = LayerNormConfig(name=LayerNormType.rms, eps=1e-6, bias=False, dtype=dtype)
    attention = AttentionConfig(
        name=AttentionType.default,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        bias=False,
        rope=RoPEConfig(theta=500_000),
        qk_norm=norm,
        use_head_qk_norm=True,
        backend=AttentionBackendName.torch,
        dtype=dtype,
    )
    block = OLMoDDPTransformerBlockConfig(
        name=TransformerBlockType.moe_fused_v2,
        sequence_mixer=attention,
        layer_norm=norm,
        routed_experts=RoutedExpertsConfig(
            d_model=shape.hidden_size,
            hidden_size=shape.expert_hidden_size,
            num_experts=shape.num_experts,
            bias=False,
            dtype=dtype,
        ),
        routed_experts_router=MoERouterConfigV2(
            d_model=shape.hidden_size,
            num_experts=shape.num_experts,
            top_k=shape.num_experts_per_token,
            gating_function=MoERouterGatingFunction.softmax,
            dtype=DType.float32,
            lb_loss_weight=None,
            z_loss_weight=None,
        ),
        shared_experts=None,
    )
    model = OLMoDDPModelConfig(
        name=TransformerType.moe_fused_v2,
        d_model=shape.hidden_size,
        vocab_size=shape.vocab_size,
        n_layers=shape.num_layers,
        block=block,
        lm_head=LMHeadConfig(name=LMHeadType.default, layer_norm=norm, bias=False, dtype=dtype),
        dtype=dtype,
        init_method=InitMethod.normal,
        recompute_each_block=recompute,
    ).build(init_device=device)
    model = model.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, OLMoDDPTransformerBlock):
            module.__class__ = PlainBlock
        elif isinstance(module, MoERouterV2):
            module.__class__ = PlainRouter
        elif isinstance(module, TorchAttentionBackend):
            module.__class__ = PlainAttention
    return model.train()


def replay(model: torch.nn.Module, routes_TLK: torch.Tensor | None) -> None:
    """Force these experts in every layer from now on; None routes natively."""
    routers = [module for module in model.modules() if isinstance(module, PlainRouter)]
    for layer, router in enumerate(routers):
        router.routes = None if routes_TLK is None else routes_TLK[None, :, layer]


def loss(model, ids_T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Summed cross-entropy of the next tokens inside the documents."""
    logits = model(
        ids_T[None],
        doc_lens=torch.tensor([list(lengths)], device=ids_T.device),
        max_doc_lens=[max(lengths)],
    )[0]
    bounds = torch.tensor(lengths, device=ids_T.device).cumsum(0)
    predicts = torch.ones(len(ids_T), dtype=torch.bool, device=ids_T.device)
    predicts[bounds - 1] = False
    targets = ids_T.roll(-1)[predicts]
    return F.cross_entropy(logits[predicts].float(), targets, reduction="sum")
