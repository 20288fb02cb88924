"""`[model]` and `[model.shape]`: which policy is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from miles_olmo.manifest.base import Section
from miles_olmo.manifest.numbers import (
    NaturalInt,
    PositiveFloat,
    PositiveInt,
)

AttentionKind = Literal["full_attention", "sliding_attention"]


class ModelShape(Section):
    """The architecture, in Hugging Face terms. All of it may be left out where `model.checkpoint` says it."""

    vocab_size: PositiveInt
    """Rows of the embedding and of the output head; at least the tokenizer's size."""
    hidden_size: PositiveInt
    """Width of the residual stream; a multiple of 8."""
    num_layers: PositiveInt
    """Transformer blocks."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_key_value_heads: PositiveInt
    """Key and value heads; divides num_attention_heads."""
    head_dim: PositiveInt
    """Width of one head; a multiple of 8."""
    num_experts: PositiveInt
    """Routed experts per layer."""
    num_experts_per_token: PositiveInt
    """Experts each token is sent to (top-k)."""
    expert_hidden_size: PositiveInt
    """Inner width of one routed expert; a multiple of 8."""
    shared_expert_hidden_size: NaturalInt = 0
    """Inner width of the shared expert; 0 for none."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Gating function over the router's logits."""
    normalize_expert_weights: bool = False
    """Divide the chosen experts' weights by their sum."""
    expert_weights_norm: PositiveFloat = 1.0
    """Order of the norm that normalize_expert_weights divides by; 1 is the sum."""
    restore_weight_scale: bool = False
    """Multiply the chosen experts' weights by num_experts_per_token."""
    original_num_experts_per_token: PositiveInt | None = None
    """Top-k of pre-training: weights are scaled by the square root of its ratio to the present one."""
    dense_layers_indices: Annotated[tuple[NaturalInt, ...], Field(strict=False)] = ()
    """Layers with one dense MLP instead of experts, counted from 0, ascending."""
    dense_hidden_size: NaturalInt = 0
    """Inner width of the dense layers' MLP; a multiple of 8."""
    layer_types: Annotated[tuple[AttentionKind, ...], Field(strict=False)] = ()
    """Attention of each layer, repeated to cover all layers; full everywhere when absent."""
    sliding_window: PositiveInt | None = None
    """Tokens that a sliding_attention layer sees, the token itself included."""
    attention_gate_type: Literal["headwise", "elementwise"] | None = None
    """Multiply attended values by a sigmoid gate, one per head or one per element; none when absent."""
    attention_gate_full_precision: bool = True
    """Take the gate's sigmoid in float32, whatever the dtype."""
    use_head_qk_norm: bool = True
    """Normalise queries and keys head by head; false: over all heads together."""
    use_rope: bool = True
    """Rotary position embedding; false: no positions at all."""
    use_peri_ln: bool = False
    """A norm before attention and MLP too, beside the one after (olmo3moe)."""
    embed_norm: bool = False
    """Normalise the embeddings."""
    embed_scale: PositiveFloat = 1.0
    """Factor of the embeddings, before embed_norm."""
    max_position_embeddings: PositiveInt = 4096
    """Longest sequence in tokens."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    initializer_std: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with a router, ascending; the others are dense."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers_indices)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer's attention sees, the token itself included; None for all."""
        kinds = self.layer_types or ("full_attention",)
        repeated = (kinds[i % len(kinds)] for i in range(self.num_layers))
        return tuple(self.sliding_window if k == "sliding_attention" else None for k in repeated)


class Model(Section):
    """Which policy is trained."""

    family: Literal["olmo3moe", "olmoe"] = "olmo3moe"
    """Model family; selects the adapter. olmoe: pre-norm blocks, as in OLMoE-1B-7B."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations."""
    checkpoint: str | None = None
    """Where to start from: a Hugging Face directory, a converted checkpoint, or a checkpoint of a run;
    random initial weights when absent. Each fills in the rest of [model]."""
    shape: ModelShape
