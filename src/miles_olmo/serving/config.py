"""The configuration of `model_type = "olmo3moe"` for engines without OLMo-core.

Same names and defaults as `olmo_core.nn.moe.v2.hf.configuration_olmo3moe`. Keys that OLMo-core adds later
are kept as they are; what the engine cannot compute is refused by `olmo3moe`.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "attention_hidden_size": 4096,
    "head_dim": None,
    "dense_mlp_intermediate_size": 11008,
    "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 2048,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "original_num_experts_per_tok": None,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "gating_function": "softmax",
    "normalize_expert_weights": 1.0,
    "restore_weight_scale": True,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "use_head_qk_norm": False,
    "qk_norm_per_head_gains": False,
    "scalable_softmax": False,
    "use_rope": True,
    "attention_gate_type": None,
    "attention_gate_full_precision": True,
    "latent_moe_dim": None,
    "latent_moe_bias": False,
    "latent_moe_up_proj_input_norm": False,
    "emo_eval_document_expert_pool": None,
    "layer_types": None,
    "dense_layers_indices": None,
    "embed_scale": 1.0,
    "embed_norm": False,
    "use_peri_ln": False,
}
"""Keys of the file with the value that a missing one has."""


class Olmo3MoeConfig(PretrainedConfig):
    """Every key of config.json as an attribute."""

    model_type = "olmo3moe"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, **keys: Any) -> None:
        own = {name: keys.pop(name, default) for name, default in DEFAULTS.items()}
        if own["attention_hidden_size"] is None:
            own["attention_hidden_size"] = own["hidden_size"]
        if own["head_dim"] is None:
            own["head_dim"] = own["attention_hidden_size"] // own["num_attention_heads"]
        if own["num_key_value_heads"] is None:
            own["num_key_value_heads"] = own["num_attention_heads"]
        if own["dense_layers_indices"] is None:
            own["dense_layers_indices"] = [0]
        if own["layer_types"] is None:
            kinds = ("sliding_attention", "full_attention")
            own["layer_types"] = [kinds[i % 2] for i in range(own["num_hidden_layers"])]
        theta = keys.pop("rope_theta", 10_000.0)
        rope = keys.pop("rope_parameters", None) or keys.pop("rope_scaling", None)
        keys.pop("rope_scaling", None)
        rope = rope or {"rope_type": "default"}
        if not set(rope) <= set(own["layer_types"]):  # one for all layers, not one per layer type
            rope = {"rope_theta": theta, **rope}
        for name, value in own.items():
            setattr(self, name, value)
        self.rope_parameters = rope
        special = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279}
        super().__init__(**{**special, "tie_word_embeddings": False, **keys})
