"""Exact parameter counts of a model shape, without building it.

Legend: V vocabulary, d hidden_size, L layers, H query heads, J key-value heads, h head_dim, E experts,
k experts per token, f expert_hidden_size, s shared_expert_hidden_size.

    embedding, output head   V d each (not tied)
    norms                    d after the last layer; per layer 2 d around attention and experts,
                             and h each for queries and keys (head-wise QK norm)
    attention, per layer     d (H h) + 2 d (J h) + (H h) d
    experts, per layer       E d (router) + E 3 d f (gate, up, down) + 3 d s (shared expert)
"""

from __future__ import annotations

from miles_olmo.manifest.models import Model, ModelShape

_BYTES = {"float32": 4, "bfloat16": 2}


def num_parameters(shape: ModelShape) -> int:
    """Parameters of an olmo3moe policy, all trained."""
    return _outside_experts(shape) + shape.num_layers * shape.num_experts * _expert(shape)


def num_active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes: of the routed experts only the chosen k per layer."""
    return _outside_experts(shape) + shape.num_layers * shape.num_experts_per_token * _expert(shape)


def checkpoint_bytes(model: Model) -> int:
    """Weights in their dtype, and AdamW's two moments in float32."""
    return num_parameters(model.shape) * (_BYTES[model.dtype] + 2 * 4)


def _expert(shape: ModelShape) -> int:
    return 3 * shape.hidden_size * shape.expert_hidden_size


def _outside_experts(shape: ModelShape) -> int:
    width = shape.hidden_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layer = (
        2 * width * queries
        + 2 * width * keys
        + 2 * shape.head_dim
        + 2 * width
        + width * shape.num_experts
        + 3 * width * shape.shared_expert_hidden_size
    )
    return 2 * shape.vocab_size * width + width + shape.num_layers * layer
