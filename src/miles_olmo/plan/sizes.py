"""Exact parameter counts of a model shape, without building it.

Legend: V vocabulary, d hidden_size, L layers, R of them routed, H query heads, J key-value heads, h
head_dim, E experts, k experts per token, f expert_hidden_size, s shared_expert_hidden_size, g
dense_hidden_size.

    embedding, output head   V d each (not tied)
    norms                    d after the last layer, d after the embedding with embed_norm; per layer
                             2 d around attention and MLP (4 d with peri-LN), and for queries and keys
                             h each head-wise, else H h and J h
    attention, per layer     d (H h) + 2 d (J h) + (H h) d
    attention gate           d H head-wise, d (H h) elementwise, per layer
    experts, per routed one  E d (router) + E 3 d f (gate, up, down) + 3 d s (shared expert)
    MLP, per dense layer     3 d g
"""

from __future__ import annotations

from miles_olmo.manifest.models import Model, ModelShape

_BYTES = {"float32": 4, "bfloat16": 2}


def num_parameters(shape: ModelShape) -> int:
    """Parameters of a policy, all trained."""
    return _outside_experts(shape) + _routed(shape) * shape.num_experts * _expert(shape)


def num_active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes: of the routed experts only the chosen k per layer."""
    return _outside_experts(shape) + _routed(shape) * shape.num_experts_per_token * _expert(shape)


def checkpoint_bytes(model: Model) -> int:
    """Weights in their dtype, and AdamW's two moments in float32."""
    return num_parameters(model.shape) * (_BYTES[model.dtype] + 2 * 4)


def _routed(shape: ModelShape) -> int:
    return shape.num_layers - len(set(shape.dense_layers_indices))


def _expert(shape: ModelShape) -> int:
    return 3 * shape.hidden_size * shape.expert_hidden_size


def _attention(shape: ModelShape) -> int:
    """One layer's attention with its norms, without those around it."""
    width = shape.hidden_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    qk_norm = 2 * shape.head_dim if shape.use_head_qk_norm else queries + keys
    gates = {None: 0, "headwise": shape.num_attention_heads, "elementwise": queries}
    gate = width * gates[shape.attention_gate_type]
    return 2 * width * queries + 2 * width * keys + qk_norm + gate


def _outside_experts(shape: ModelShape) -> int:
    width = shape.hidden_size
    layer = _attention(shape) + (4 if shape.use_peri_ln else 2) * width
    routed = width * shape.num_experts + 3 * width * shape.shared_expert_hidden_size
    num_dense = shape.num_layers - _routed(shape)
    return (
        2 * shape.vocab_size * width
        + (2 if shape.embed_norm else 1) * width
        + shape.num_layers * layer
        + _routed(shape) * routed
        + num_dense * 3 * width * shape.dense_hidden_size
    )
