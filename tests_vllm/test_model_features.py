"""Features of the Hugging Face configuration that the trainer cannot express, served all the same."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from miles_olmo.policy.publication import MAX_FILE_BYTES
from miles_olmo.policy.tensor_files import dtype_name, write_tensors
from miles_olmo.serving.config import DEFAULTS
from miles_olmo.wire.publication import (
    EXPECTED_NAME,
    ExpectedTensor,
    Publication,
    PublishedTensor,
    write_expected,
)
from tests.model_zoo import ZOO, hugging_face_classes, random_prompts, write_tokenizer
from tests_vllm.engines import Engine, engine

BASE = {
    **{"vocab_size": 128, "hidden_size": 128, "attention_hidden_size": 128, "head_dim": 32},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"dense_mlp_intermediate_size": 128, "max_position_embeddings": 512},
    **{"sliding_window": 16, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FEATURES = {
    "latent experts, scalable softmax, gains per head, biases": {
        **{"latent_moe_dim": 64, "latent_moe_bias": True, "latent_moe_up_proj_input_norm": True},
        **{"scalable_softmax": True, "use_head_qk_norm": True, "qk_norm_per_head_gains": True},
        **{"attention_bias": True, "attention_gate_type": "elementwise"},
        **{"attention_gate_full_precision": False, "shared_expert_intermediate_size": None},
        **{"gating_function": "softmax", "normalize_expert_weights": None},
        **{"restore_weight_scale": False, "original_num_experts_per_tok": 4},
        **{"dense_layers_indices": [0, 2], "embed_scale": 2.0, "use_rope": False},
    },
    "another norm of the weights, default layer types": {
        **{"gating_function": "sigmoid", "normalize_expert_weights": 2.0},
        **{"shared_expert_intermediate_size": 96, "dense_layers_indices": []},
        **{"sliding_window": 8, "embed_norm": True, "use_peri_ln": True},
    },
}


def random_model(features):
    config_class, model_class = hugging_face_classes("olmo3moe")
    config = config_class(**{**BASE, **features})
    config.architectures = ["Olmo3MoeForCausalLM"]
    torch.manual_seed(1)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("norm", "bias", "ssmax")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def published(tensors, directory) -> Publication:
    directory.mkdir(parents=True)
    assert sum(tensor.nbytes for tensor in tensors.values()) < MAX_FILE_BYTES
    file = write_tensors(directory / "weights-00001.safetensors", tensors)
    listed = tuple(
        PublishedTensor(
            name, dtype_name(tensor.dtype), tuple(tensor.shape), file.tensors[name], file.name
        )
        for name, tensor in tensors.items()
    )
    return Publication(1, str(directory), listed)


@pytest.mark.parametrize("name", FEATURES)
def test_vllm_computes_what_the_reference_class_does(name, tmp_path):
    model = random_model(FEATURES[name])
    tensors = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    served = tmp_path / "served"
    served.mkdir()
    (served / "config.json").write_text(model.config.to_json_string(use_diff=False))
    write_tokenizer(served / "tokenizer.json")
    (served / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    write_expected(
        served / EXPECTED_NAME,
        {
            key: ExpectedTensor(dtype_name(tensor.dtype), tuple(tensor.shape))
            for key, tensor in tensors.items()
        },
    )
    # The zoo's model only lends its lengths and vocabulary: the directory is there already.
    with engine(ZOO["softmax router"], tmp_path) as subject:
        publish(subject, published(tensors, tmp_path / "publish" / "v000001"))
        for prompt in random_prompts(16, seed=3):
            tokens, logprobs = subject.greedy(prompt, 8)
            ids = torch.tensor([[*prompt, *tokens]])
            with torch.no_grad():
                rows = model(ids, use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            assert rows.argmax(-1).tolist() == tokens
            expected = rows.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
            assert logprobs == pytest.approx(expected, abs=1e-4)


def publish(subject: Engine, publication: Publication) -> None:
    async def once():
        # Without routes: the client knows the zoo's layers, not these.
        async with subject.client(routes=False) as client:
            await client.publish(publication)
            await client.audit(publication)

    asyncio.run(once())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"emo_eval_document_expert_pool": 4}, "emo_eval_document_expert_pool = 4"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_what_the_class_does_not_compute_is_refused_by_name(change, named, monkeypatch):
    from miles_olmo.serving import olmo3moe

    monkeypatch.setattr(olmo3moe, "get_tensor_model_parallel_world_size", lambda: 1)
    settings = {**DEFAULTS, "layer_types": ["full_attention"], "tie_word_embeddings": False}
    olmo3moe.refuse_unsupported(SimpleNamespace(**settings))
    with pytest.raises(ValueError, match=named):
        olmo3moe.refuse_unsupported(SimpleNamespace(**{**settings, **change}))
