"""A Hugging Face config.json in the words of [model], and back."""

from __future__ import annotations

import inspect
import json

import pytest

from miles_olmo.manifest.hugging_face import (
    FAMILIES,
    OLMO3MOE,
    OLMOE,
    read_hugging_face,
    write_hugging_face,
)
from miles_olmo.manifest.models import Model, ModelShape
from miles_olmo.plan.sizes import num_active_parameters, num_parameters
from tests.model_zoo import MORE, PUBLISHED_OLMOE, ZOO


def shape_of(config: dict) -> ModelShape:
    imported = read_hugging_face(config)
    assert imported is not None and imported.unsupported == ()
    return ModelShape.model_validate({k: v for k, v in imported.shape.items() if v is not None})


def test_the_published_olmoe_is_read():
    imported = read_hugging_face(PUBLISHED_OLMOE)
    assert imported is not None
    assert (imported.family.family, imported.dtype, imported.unsupported) == (
        "olmoe",
        "bfloat16",
        (),
    )
    shape = shape_of(PUBLISHED_OLMOE)
    assert (shape.head_dim, shape.num_experts, shape.expert_hidden_size) == (128, 64, 1024)
    assert (shape.rope_theta, shape.rms_norm_eps, shape.router) == (10000.0, 1e-5, "softmax")
    assert not shape.normalize_expert_weights and not shape.use_head_qk_norm
    assert num_parameters(shape) == 6_919_161_856
    unused = 16 * (64 - 8) * 3 * 2048 * 1024
    assert num_active_parameters(shape) == num_parameters(shape) - unused


@pytest.mark.parametrize("name", {**ZOO, **MORE})
def test_a_shape_survives_the_way_out_and_back(name):
    model: Model = {**ZOO, **MORE}[name]
    config = {**write_hugging_face(model), "model_type": model.family}
    back = shape_of(json.loads(json.dumps(config)))
    assert back.windows == model.shape.windows
    same = {"layer_types": model.shape.layer_types}
    assert back.model_copy(update=same) == model.shape


@pytest.mark.parametrize("name", ["softmax router", "everything", "olmoe"])
def test_the_class_itself_writes_what_is_read(name):
    pytest.importorskip("olmo_core", reason="the train extra is not installed")
    from miles_olmo.policy.export_code import config_class

    model = {**ZOO, **MORE}[name]
    made = config_class(model.family)(**write_hugging_face(model))
    assert shape_of(json.loads(made.to_json_string())).windows == model.shape.windows


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_left_out_have_the_values_of_the_class(family):
    pytest.importorskip("olmo_core", reason="the train extra is not installed")
    from miles_olmo.policy.export_code import config_class

    made = config_class(family)()
    for key, value in FAMILIES[family].defaults.items():
        if key == "rope_theta":
            assert made.rope_parameters["rope_theta"] == value
        elif key not in ("head_dim", "num_key_value_heads", "dense_layers_indices", "layer_types"):
            assert getattr(made, key, None) == value, key
    # The four that the class derives.
    smallest = shape_of({"model_type": family})
    assert smallest.head_dim == getattr(made, "head_dim", None) or 2048 // 16
    assert smallest.num_key_value_heads == made.num_key_value_heads
    if family == "olmo3moe":
        assert list(smallest.dense_layers_indices) == made.dense_layers_indices
        assert list(smallest.layer_types) == made.layer_types
        parameters = inspect.signature(config_class(family).__init__).parameters
        assert set(OLMO3MOE.keys.values()) <= set(parameters)


UNSUPPORTED = [
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("olmoe", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ("olmoe", {"attention_bias": True}, "biases"),
    ("olmoe", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("olmoe", {"head_dim": 64}, "head_dim = 64"),
    ("olmoe", {"sliding_window": 128}, "sliding_window = 128"),
    ("olmoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling"),
    ("olmo3moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE scaling"),
    (
        "olmo3moe",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        "a base per kind of layer",
    ),
    ("olmoe", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "a part of each head"),
    ("olmo3moe", {"scalable_softmax": True}, "scalable softmax"),
    ("olmo3moe", {"latent_moe_dim": 64}, "latent experts"),
    ("olmo3moe", {"qk_norm_per_head_gains": True}, "gains per head"),
    ("olmo3moe", {"emo_eval_document_expert_pool": 8}, "EMo"),
    (
        "olmo3moe",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        "linear attention",
    ),
    ("olmo3moe", {"quantization_config": {"bits": 4}}, "quantised"),
]


@pytest.mark.parametrize(("family", "change", "named"), UNSUPPORTED)
def test_what_the_block_cannot_compute_is_named(family, change, named):
    imported = read_hugging_face({"model_type": family, **change})
    assert imported is not None
    assert [feature for feature in imported.unsupported if named in feature], imported.unsupported


def test_rope_settings_of_every_release_are_read():
    base = {"model_type": "olmo3moe", "num_hidden_layers": 2}
    for written in (
        {"rope_theta": 5e5},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
    ):
        assert shape_of({**base, **written}).rope_theta == 5e5


def test_another_model_type_is_none_of_ours():
    assert read_hugging_face({"model_type": "olmo3"}) is None
    assert read_hugging_face({}) is None
    assert OLMOE.architecture == "OlmoeForCausalLM"
