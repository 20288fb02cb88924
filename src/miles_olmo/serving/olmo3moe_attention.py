"""Attention and norms of vLLM's `olmo3moe` class; see `miles_olmo.serving.olmo3moe`.

Suffixes: T tokens of the batch, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index

try:
    from vllm.model_executor.layers.attention import Attention
except ImportError:  # vLLM 0.26
    from vllm.attention.layer import Attention


class Norm(nn.Module):
    """RMSNorm in float32 with one rounding, gains included; the gains may have several dimensions."""

    def __init__(self, shape: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal attention over all positions or a sliding window."""

    def __init__(self, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        kind = config.layer_types[extract_layer_index(prefix)]
        hidden, bias = config.hidden_size, config.attention_bias
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden,
            self.head_dim,
            self.num_heads,
            self.num_kv_heads,
            bias=bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(self.q_size, hidden, bias=bias, prefix=f"{prefix}.o_proj")
        self.gate_type = config.attention_gate_type
        self.gate_in_float32 = config.attention_gate_full_precision
        self.g_proj = None
        if self.gate_type is not None:
            width = self.q_size if self.gate_type == "elementwise" else self.num_heads
            self.g_proj = ColumnParallelLinear(hidden, width, bias=bias, prefix=f"{prefix}.g_proj")
        self.norm_per_head = config.use_head_qk_norm
        self.q_norm = self._norm(config, self.num_heads)
        self.k_norm = self._norm(config, self.num_kv_heads)
        self.ssmax_scale = (
            nn.Parameter(torch.ones(self.num_heads)) if config.scalable_softmax else None
        )
        self.rotary_emb = _rotary(config, kind) if config.use_rope else None
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=None,
            prefix=f"{prefix}.attn",
            per_layer_sliding_window=config.sliding_window if kind == "sliding_attention" else None,
        )

    def _norm(self, config: Any, heads: int) -> Norm:
        if not config.use_head_qk_norm:
            return Norm(heads * self.head_dim, config.rms_norm_eps)
        shape = (heads, self.head_dim) if config.qk_norm_per_head_gains else self.head_dim
        return Norm(shape, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)[0].split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self._normalized(self.q_norm, q), self._normalized(self.k_norm, k)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        if self.ssmax_scale is not None:
            scale_TH = (positions + 1).log().to(q.dtype).unsqueeze(-1) * self.ssmax_scale.to(
                q.dtype
            )
            q = (q.view(-1, self.num_heads, self.head_dim) * scale_TH.unsqueeze(-1)).view(q.shape)
        out = self.attn(q, k, v)
        if self.g_proj is not None:
            out = self._gated(out, self.g_proj(x)[0])
        return self.o_proj(out)[0]

    def _normalized(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        if not self.norm_per_head:
            return norm(x)
        return norm(x.reshape(x.shape[0], -1, self.head_dim)).reshape(x.shape)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(gate.float() if self.gate_in_float32 else gate).to(out.dtype)
        if self.gate_type == "elementwise":
            return out * gate
        per_head = out.view(-1, self.num_heads, self.head_dim) * gate.unsqueeze(-1)
        return per_head.reshape(out.shape)


def _rotary(config: Any, layer_type: str) -> nn.Module:
    parameters = config.rope_parameters
    return get_rope(
        config.head_dim,
        max_position=config.max_position_embeddings,
        rope_parameters=parameters.get(layer_type, parameters),
        is_neox_style=True,
    )
