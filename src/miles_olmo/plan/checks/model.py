"""Checks of [model] alone: whether its shape can be built, and whether its family can hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from miles_olmo.manifest.models import Model
from miles_olmo.plan.checks.finding import Finding

ModelCheck = Callable[[Model], Iterable[Finding]]

_WIDTHS = (
    "hidden_size",
    "head_dim",
    "expert_hidden_size",
    "shared_expert_hidden_size",
    "dense_hidden_size",
)


def widths(model: Model) -> Iterator[Finding]:
    for name in _WIDTHS:
        width = getattr(model.shape, name)
        if width % 8:
            up = -(-width // 8) * 8
            yield Finding(
                "E101",
                (f"model.shape.{name}",),
                f"{name} = {width} is not a multiple of 8",
                "grouped matrix products need rows of whole 16-byte words",
                f"set {name} = {up}",
            )


def heads(model: Model) -> Iterator[Finding]:
    shape = model.shape
    if shape.num_attention_heads % shape.num_key_value_heads:
        yield Finding(
            "E102",
            ("model.shape.num_key_value_heads", "model.shape.num_attention_heads"),
            f"num_key_value_heads = {shape.num_key_value_heads} does not divide "
            f"num_attention_heads = {shape.num_attention_heads}",
            "every key-value head serves the same number of query heads",
            f"set num_key_value_heads to a divisor of {shape.num_attention_heads}",
        )


def experts(model: Model) -> Iterator[Finding]:
    shape = model.shape
    if shape.num_experts_per_token > shape.num_experts:
        yield Finding(
            "E103",
            ("model.shape.num_experts_per_token", "model.shape.num_experts"),
            f"num_experts_per_token = {shape.num_experts_per_token} with "
            f"num_experts = {shape.num_experts}",
            "a token is sent to an expert at most once",
            f"set num_experts_per_token to at most {shape.num_experts}",
        )


def dense_layers(model: Model) -> Iterator[Finding]:
    shape = model.shape
    layers = shape.dense_layers_indices
    keys = ("model.shape.dense_layers_indices", "model.shape.dense_hidden_size")
    shown = f"dense_layers_indices = {list(layers)}"
    fix = f"name some of the layers 0 to {shape.num_layers - 1}, each once, ascending"
    if list(layers) != sorted(set(layers)) or (layers and layers[-1] >= shape.num_layers):
        why = f"num_layers = {shape.num_layers}, counted from 0"
        yield Finding("E175", (*keys, "model.shape.num_layers"), shown, why, fix)
    elif len(layers) >= shape.num_layers:
        yield Finding("E175", keys, shown, "no layer would have experts to train", fix)
    if bool(layers) != (shape.dense_hidden_size > 0):
        yield Finding(
            "E175",
            keys,
            f"{shown} with dense_hidden_size = {shape.dense_hidden_size}",
            "a dense layer has an inner width, and only dense layers have that one",
            "set both or neither",
        )


def windows(model: Model) -> Iterator[Finding]:
    shape = model.shape
    keys = ("model.shape.sliding_window", "model.shape.layer_types")
    slides = "sliding_attention" in shape.layer_types
    if slides != (shape.sliding_window is not None):
        yield Finding(
            "E176",
            keys,
            f"sliding_window = {shape.sliding_window or 'absent'} with "
            f"layer_types = {list(shape.layer_types)}",
            "a sliding_attention layer has a window, and only such a layer has one",
            "set sliding_window and a layer_types with 'sliding_attention', or neither",
        )
    if len(shape.layer_types) > shape.num_layers:
        yield Finding(
            "E176",
            ("model.shape.layer_types", "model.shape.num_layers"),
            f"layer_types has {len(shape.layer_types)} entries for {shape.num_layers} layers",
            "the entries are repeated to cover all layers, so some would never be used",
            f"name at most {shape.num_layers}",
        )


def family_features(model: Model) -> Iterator[Finding]:
    """What a family's Hugging Face class cannot hold."""
    shape = model.shape
    if model.family != "olmoe":
        return
    allowed = {
        "router": "softmax",
        "shared_expert_hidden_size": 0,
        "expert_weights_norm": 1.0,
        "restore_weight_scale": False,
        "original_num_experts_per_token": None,
        "dense_layers_indices": (),
        "layer_types": (),
        "attention_gate_type": None,
        "use_head_qk_norm": False,
        "use_rope": True,
        "use_peri_ln": False,
        "embed_norm": False,
        "embed_scale": 1.0,
    }
    for name, value in allowed.items():
        written = getattr(shape, name)
        if written != value and not _means_full(name, written):
            yield Finding(
                "E177",
                (f"model.shape.{name}", "model.family"),
                f"{name} = {_toml(written)} with family = 'olmoe'",
                "OLMoE's class has no such feature",
                f"remove {name}" if value in (None, ()) else f"set {name} = {_toml(value)}",
            )
    if shape.num_attention_heads * shape.head_dim != shape.hidden_size:
        yield Finding(
            "E177",
            ("model.shape.head_dim", "model.shape.hidden_size", "model.family"),
            f"head_dim = {shape.head_dim} with {shape.num_attention_heads} heads and "
            f"hidden_size = {shape.hidden_size}",
            "in OLMoE's class all heads together are as wide as the residual stream",
            f"set head_dim = {shape.hidden_size // shape.num_attention_heads}",
        )


def _means_full(name: str, written: object) -> bool:
    """A list of full_attention says what an absent one says."""
    return name == "layer_types" and "sliding_attention" not in (written or ())  # type: ignore[operator]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)


MODEL_CHECKS: tuple[ModelCheck, ...] = (
    widths,
    heads,
    experts,
    dense_layers,
    windows,
    family_features,
)
