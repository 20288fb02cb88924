"""Small random checkpoints of every kind of model, in the layout of the published ones.

    from tests.model_zoo import ZOO, random_prompts, write_checkpoint

    model = ZOO["sliding window"]                  # a manifest Model
    write_checkpoint(model, directory, seed=0)     # config.json, safetensors, tokenizer, model code

The weights come from the Hugging Face classes' own initialisation with a standard deviation of 0.2, so
that greedy tokens are decided by far more than rounding; norms are random too, so that a norm in
the wrong place shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from miles_olmo.manifest.hugging_face import write_hugging_face
from miles_olmo.manifest.models import Model

VOCAB_SIZE = 128
BOS, EOS, PAD = 1, 2, 0

_OLMO3MOE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "expert_hidden_size": 64,
    "shared_expert_hidden_size": 64,
    "max_position_embeddings": 512,
    "initializer_std": 0.2,
}
_OLMOE: dict[str, Any] = {
    **_OLMO3MOE,
    "num_key_value_heads": 4,
    "shared_expert_hidden_size": 0,
    "use_head_qk_norm": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def _model(family: str, base: dict[str, Any], **changes: Any) -> Model:
    return Model.model_validate({"family": family, "shape": {**base, **changes}})


ZOO: dict[str, Model] = {
    "softmax router": _model("olmo3moe", _OLMO3MOE),
    "sigmoid router without shared expert": _model(
        "olmo3moe",
        _OLMO3MOE,
        router="sigmoid",
        normalize_expert_weights=True,
        restore_weight_scale=True,
        shared_expert_hidden_size=0,
    ),
    "sliding window": _model(
        "olmo3moe",
        _OLMO3MOE,
        num_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=16,
        embed_norm=True,
    ),
    "attention gate": _model(
        "olmo3moe", _OLMO3MOE, attention_gate_type="headwise", use_peri_ln=True, embed_scale=2.0
    ),
    "dense first layer": _model(
        "olmo3moe", _OLMO3MOE, dense_layers_indices=[0], dense_hidden_size=128, router="sigmoid"
    ),
    "olmoe": _model("olmoe", _OLMOE),
}
"""The configurations that trainer, export and vLLM are compared on."""

MORE: dict[str, Model] = {
    "elementwise gate": _model(
        "olmo3moe",
        _OLMO3MOE,
        attention_gate_type="elementwise",
        attention_gate_full_precision=False,
        original_num_experts_per_token=4,
    ),
    "no positions, norm over all heads": _model(
        "olmo3moe",
        _OLMO3MOE,
        use_rope=False,
        use_head_qk_norm=False,
        expert_weights_norm=2.0,
        normalize_expert_weights=True,
    ),
    "everything": _model(
        "olmo3moe",
        _OLMO3MOE,
        num_layers=4,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=7,
        attention_gate_type="headwise",
        dense_layers_indices=[0, 2],
        dense_hidden_size=64,
        router="sigmoid",
        normalize_expert_weights=True,
        restore_weight_scale=True,
        embed_norm=True,
        embed_scale=0.5,
        use_peri_ln=True,
    ),
    "olmoe, renormalised": _model(
        "olmoe", _OLMOE, num_key_value_heads=2, normalize_expert_weights=True
    ),
}
"""Further features, compared with Hugging Face only."""


PUBLISHED_OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}
"""config.json of OLMoE-1B-7B, as it is published."""


def hugging_face_model(model: Model, *, seed: int = 0):
    """A random model of the family's own Hugging Face class, in float32."""
    import torch

    config_class, model_class = hugging_face_classes(model.family)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    torch.manual_seed(seed)
    made = model_class(config_class(**write_hugging_face(model), **ids)).float().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        # The class leaves the padding token's row at zero, and a row of zeros has no direction.
        made.model.embed_tokens.weight[PAD].normal_(0.0, model.shape.initializer_std)
    return made


def hugging_face_classes(family: str):
    """(configuration class, model class); OLMo-core's own as exports carry them."""
    if family == "olmoe":
        from transformers import OlmoeConfig, OlmoeForCausalLM

        return OlmoeConfig, OlmoeForCausalLM
    import tempfile

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from miles_olmo.policy.export_code import CONFIG_CLASS, MODEL_CLASS, write_model_code

    with tempfile.TemporaryDirectory() as directory:
        write_model_code(Path(directory))
        config_class = get_class_from_dynamic_module(CONFIG_CLASS, directory)
        model_class = get_class_from_dynamic_module(MODEL_CLASS, directory)
    return config_class, model_class


def write_checkpoint(
    model: Model, directory: Path, *, seed: int = 0, max_shard_size: str = "5GB", dtype: str = ""
) -> Path:
    """Write a random Hugging Face checkpoint with a tokenizer of one token per character.

    Args:
        dtype: Of the files, e.g. "bfloat16"; the model's when empty.
    """
    import torch

    from miles_olmo.policy.export_code import CONFIG_CLASS, MODEL_CLASS, write_model_code

    made = hugging_face_model(model, seed=seed)
    made = made.to(getattr(torch, dtype or model.dtype))
    made.save_pretrained(directory, max_shard_size=max_shard_size)
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": model.shape.max_position_embeddings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": CONFIG_CLASS, "AutoModelForCausalLM": MODEL_CLASS}
    if model.family == "olmo3moe":
        write_model_code(directory)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return directory


def random_prompts(
    count: int, *, seed: int = 0, longest: int = 40, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    """Token ids of prompts of 1 to `longest` tokens, without special tokens.

    They have at most nine lengths, so that they can be batched without padding.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    choices = [max(1, longest * eighth // 8) for eighth in range(9)]
    picks = torch.randint(0, len(choices), (count,), generator=generator).tolist()
    lengths = [choices[pick] for pick in picks]
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def write_tokenizer(path: Path) -> Path:
    """Write the zoo's tokenizer, one token per character."""
    _tokenizer().save(str(path))
    return path


def load_exported(model: Model, directory: Path):
    """The exported policy as transformers loads it, by the code that travels with it."""
    from miles_olmo.policy.export_code import load_hugging_face

    return load_hugging_face(directory, model.family, model.dtype).eval()


def _tokenizer() -> Tokenizer:
    words = ["<pad>", "<bos>", "<eos>", *map(chr, range(32, 127))]
    words += [chr(0x100 + number) for number in range(VOCAB_SIZE - len(words))]
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<pad>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return built
