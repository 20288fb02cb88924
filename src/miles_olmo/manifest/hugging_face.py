"""What a Hugging Face `config.json` says, in the words of `[model]`, and the way back.

One table per family pairs each key of `[model.shape]` with the key of the configuration class. Reading
and writing both use it, so that a shape survives the way out and back. Keys that a `config.json` leaves
out have the value that the class gives them.

Sources: `Olmo3MoeConfig` (ai2-olmo-core 3.0, `olmo_core.nn.moe.v2.hf`), `OlmoeConfig` (transformers).
Nothing here imports either: a plan is made without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from miles_olmo.manifest.models import Model, ModelShape

CONFIG = "config.json"
DTYPES = ("float32", "bfloat16")

_SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts_per_token": "num_experts_per_tok",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "initializer_std": "initializer_range",
}
_SHARED_DEFAULTS = {
    "num_key_value_heads": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class HuggingFaceFamily:
    """How one family's configuration class is read and written."""

    family: str
    """As in `model.family`; also the class's `model_type`."""
    architecture: str
    """Class name in `architectures`."""
    keys: Mapping[str, str]
    """Key of the configuration, by key of `[model.shape]`."""
    defaults: Mapping[str, Any]
    """What the class assumes for keys that are left out, where that matters here."""
    fixed: Mapping[str, Any]
    """Keys of `[model.shape]` that the family decides; they have no key in the configuration."""


OLMO3MOE = HuggingFaceFamily(
    family="olmo3moe",
    architecture="Olmo3MoeForCausalLM",
    keys=MappingProxyType(
        {
            **_SHARED_KEYS,
            "num_experts": "n_routed_experts",
            "expert_hidden_size": "moe_intermediate_size",
            "shared_expert_hidden_size": "shared_expert_intermediate_size",
            "router": "gating_function",
            "normalize_expert_weights": "normalize_expert_weights",
            "expert_weights_norm": "normalize_expert_weights",
            "restore_weight_scale": "restore_weight_scale",
            "original_num_experts_per_token": "original_num_experts_per_tok",
            "dense_layers_indices": "dense_layers_indices",
            "dense_hidden_size": "dense_mlp_intermediate_size",
            "layer_types": "layer_types",
            "sliding_window": "sliding_window",
            "attention_gate_type": "attention_gate_type",
            "attention_gate_full_precision": "attention_gate_full_precision",
            "use_head_qk_norm": "use_head_qk_norm",
            "use_rope": "use_rope",
            "use_peri_ln": "use_peri_ln",
            "embed_norm": "embed_norm",
            "embed_scale": "embed_scale",
        }
    ),
    defaults=MappingProxyType(
        {
            **_SHARED_DEFAULTS,
            "vocab_size": 50304,
            "hidden_size": 4096,
            "attention_hidden_size": 4096,
            "head_dim": None,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "moe_intermediate_size": 2048,
            "shared_expert_intermediate_size": 2048,
            "gating_function": "softmax",
            "normalize_expert_weights": 1.0,
            "restore_weight_scale": True,
            "original_num_experts_per_tok": None,
            "dense_layers_indices": None,
            "dense_mlp_intermediate_size": 11008,
            "layer_types": None,
            "sliding_window": 4096,
            "attention_gate_type": None,
            "attention_gate_full_precision": True,
            "use_head_qk_norm": False,
            "qk_norm_per_head_gains": False,
            "scalable_softmax": False,
            "use_rope": True,
            "use_peri_ln": False,
            "embed_norm": False,
            "embed_scale": 1.0,
            "latent_moe_dim": None,
            "emo_eval_document_expert_pool": None,
        }
    ),
    fixed=MappingProxyType({}),
)

OLMOE = HuggingFaceFamily(
    family="olmoe",
    architecture="OlmoeForCausalLM",
    keys=MappingProxyType(
        {
            **_SHARED_KEYS,
            "num_experts": "num_experts",
            "expert_hidden_size": "intermediate_size",
            "normalize_expert_weights": "norm_topk_prob",
        }
    ),
    defaults=MappingProxyType(
        {
            **_SHARED_DEFAULTS,
            "vocab_size": 50304,
            "hidden_size": 2048,
            "head_dim": None,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "intermediate_size": 2048,
            "norm_topk_prob": False,
            "clip_qkv": None,
        }
    ),
    fixed=MappingProxyType({"router": "softmax", "use_head_qk_norm": False}),
)

FAMILIES: Mapping[str, HuggingFaceFamily] = MappingProxyType(
    {family.family: family for family in (OLMO3MOE, OLMOE)}
)


@dataclass(frozen=True)
class ImportedModel:
    """A configuration in the words of `[model]`."""

    family: HuggingFaceFamily
    dtype: str | None
    """Of the weights, as transformers names it; None when the file does not say."""
    shape: Mapping[str, Any]
    """Values of `[model.shape]`; keys at their default that the family does not have are absent."""
    config: Mapping[str, Any]
    """The configuration with its defaults."""
    unsupported: tuple[str, ...] = field(default=())
    """What the policy cannot compute, each as `key = value: what it is`."""


def read_hugging_face(config: Mapping[str, Any]) -> ImportedModel | None:
    """Translate a parsed `config.json`; None for a `model_type` that is no family here.

    Raises:
        TypeError, ValueError, KeyError: a value has a type that the class would not accept.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    full = {**family.defaults, **config}
    if family is OLMOE and "num_experts" not in config:
        full["num_experts"] = config.get("num_local_experts", full["num_experts"])
    full["rope_theta"] = _rope_theta(full)
    shape = {**family.fixed, **dict(_shape_values(family, full))}
    dtype = config.get("dtype", config.get("torch_dtype"))
    unsupported = tuple(_unsupported(family, full))
    return ImportedModel(
        family, None if dtype is None else str(dtype), shape, MappingProxyType(full), unsupported
    )


def _shape_values(family: HuggingFaceFamily, full: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    special: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "num_key_value_heads": lambda c: c["num_key_value_heads"] or c["num_attention_heads"],
        "head_dim": _head_dim,
        "shared_expert_hidden_size": lambda c: c["shared_expert_intermediate_size"] or 0,
        "normalize_expert_weights": lambda c: bool(c[family.keys["normalize_expert_weights"]]),
        "expert_weights_norm": lambda c: float(c["normalize_expert_weights"] or 1.0),
        "original_num_experts_per_token": lambda c: c["original_num_experts_per_tok"],
        "dense_layers_indices": _dense_layers,
        "dense_hidden_size": lambda c: c["dense_mlp_intermediate_size"] if _dense_layers(c) else 0,
        "layer_types": _layer_types,
        "sliding_window": lambda c: c["sliding_window"] if _layer_types(c) else None,
        "embed_scale": lambda c: float(c["embed_scale"]),
        "rope_theta": lambda c: float(c["rope_theta"]),
        "rms_norm_eps": lambda c: float(c["rms_norm_eps"]),
        "initializer_std": lambda c: float(c["initializer_range"]),
    }
    for key, hf_key in family.keys.items():
        yield key, special[key](full) if key in special else full[hf_key]


def _head_dim(full: Mapping[str, Any]) -> int:
    width = full.get("attention_hidden_size") or full["hidden_size"]
    return full["head_dim"] or width // full["num_attention_heads"]


def _dense_layers(full: Mapping[str, Any]) -> list[int]:
    written = full["dense_layers_indices"]
    return [0] if written is None else sorted(written)


def _layer_types(full: Mapping[str, Any]) -> list[str]:
    """Empty when every layer sees everything."""
    written = full["layer_types"]
    if written is None:
        kinds = ("sliding_attention", "full_attention")
        written = [kinds[layer % 2] for layer in range(full["num_hidden_layers"])]
    return list(written) if set(written) != {"full_attention"} else []


def _rope_parameters(full: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every set of RoPE settings in the file: one, or one per kind of layer; none when absent."""
    written = full.get("rope_parameters") or full.get("rope_scaling")
    if not written:
        return []
    nested = all(isinstance(value, Mapping) for value in written.values())
    return list(written.values()) if nested else [written]


def _rope_theta(full: Mapping[str, Any]) -> float:
    thetas = [entry["rope_theta"] for entry in _rope_parameters(full) if "rope_theta" in entry]
    return thetas[0] if thetas else full["rope_theta"]


def _unsupported(family: HuggingFaceFamily, full: Mapping[str, Any]) -> Iterator[str]:
    """What this project's block does not compute."""
    for entry in _rope_parameters(full):
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind != "default" or entry.get("rope_theta", full["rope_theta"]) != full["rope_theta"]:
            yield f"rope_parameters = {dict(entry)}: RoPE scaling, or a base per kind of layer"
        if entry.get("partial_rotary_factor", 1) != 1:
            yield f"rope_parameters = {dict(entry)}: RoPE on a part of each head"
    off: dict[str, tuple[tuple[Any, ...], str]] = {
        "hidden_act": (("silu",), "another activation than SwiGLU"),
        "tie_word_embeddings": ((False,), "an output head tied to the embedding"),
        "attention_bias": ((False,), "biases in attention"),
        "attention_dropout": ((0, None), "dropout"),
        "partial_rotary_factor": ((1, None), "RoPE on a part of each head"),
        "quantization_config": ((None,), "quantised weights"),
        "latent_moe_dim": ((None,), "latent experts"),
        "qk_norm_per_head_gains": ((False, None), "QK norms with gains per head"),
        "scalable_softmax": ((False, None), "scalable softmax"),
        "emo_min_document_expert_pool": ((None,), "expert pools per document (EMo)"),
        "emo_eval_document_expert_pool": ((None,), "expert pools per document (EMo)"),
        "clip_qkv": ((None,), "clipped queries, keys and values"),
    }
    for key, (values, what) in off.items():
        if full.get(key, values[0]) not in values:
            yield f"{key} = {full[key]!r}: {what}"
    if "linear_attention" in (full.get("layer_types") or ()):
        yield "layer_types has 'linear_attention': KDA, gated delta nets and other linear attention"
    if family is OLMOE:
        if _head_dim(full) * full["num_attention_heads"] != full["hidden_size"]:
            yield f"head_dim = {full['head_dim']!r}: another width of all heads than hidden_size"
        if full.get("sliding_window") is not None:
            yield f"sliding_window = {full['sliding_window']!r}: a window that its class ignores"


def write_hugging_face(model: Model) -> dict[str, Any]:
    """Arguments of the family's configuration class; without token ids, dtype and architecture."""
    family, shape = FAMILIES[model.family], model.shape
    config = {hf_key: getattr(shape, key) for key, hf_key in family.keys.items()}
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    config |= {"rope_parameters": rope, "hidden_act": "silu", "tie_word_embeddings": False}
    if family is OLMOE:
        del config["head_dim"], config["rope_theta"]
        return config
    config |= {
        "attention_hidden_size": shape.num_attention_heads * shape.head_dim,
        "shared_expert_intermediate_size": shape.shared_expert_hidden_size or None,
        "normalize_expert_weights": shape.expert_weights_norm
        if shape.normalize_expert_weights
        else None,
        "dense_layers_indices": list(shape.dense_layers_indices),
        "dense_mlp_intermediate_size": shape.dense_hidden_size or None,
        "layer_types": layer_types(shape),
    }
    return config


def layer_types(shape: ModelShape) -> list[str]:
    """The kind of attention of every layer."""
    return ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
