"""The policy's tensors under their Hugging Face names."""

from __future__ import annotations

import pytest
import torch

from miles_olmo.base.errors import CheckpointError, EngineError
from miles_olmo.policy.olmo3moe_tensors import load_tensors, publication_tensors

from .conftest import build_module

BIAS = "e_score_correction_bias"


def _published(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in publication_tensors(module)}


def test_every_element_of_the_state_is_published_exactly_once(module):
    names = [name for name, _ in publication_tensors(module)]
    assert len(names) == len(set(names))
    assert sum(t.numel() for _, t in publication_tensors(module)) == sum(
        t.numel() for t in module.state_dict().values()
    )
    for index, (_, view) in enumerate(publication_tensors(module)):
        view.fill_(index + 1)  # a view that overlapped another would lose its mark
    assert [t.unique().tolist() for _, t in publication_tensors(module)] == [
        [torch.tensor(i + 1, dtype=t.dtype).item()]
        for i, (_, t) in enumerate(publication_tensors(module))
    ]


def test_names_and_values_equal_those_of_olmo_cores_own_converter(module):
    from olmo_core.nn.hf.config import get_hf_config
    from olmo_core.nn.hf.convert import convert_state_to_hf

    ours = {name: t for name, t in _published(module).items() if BIAS not in name}
    state = {k: v for k, v in module.state_dict().items() if "score_bias" not in k}
    for block in module.blocks.values():  # the converter refuses the buffer; it is ours to carry
        block.routed_experts_router.score_correction_bias = False
    theirs = convert_state_to_hf(get_hf_config(module), state)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor, ours[name]), name


def test_names_are_those_of_the_hugging_face_class():
    from olmo_core.nn.hf.config import get_hf_config
    from olmo_core.nn.moe.v2.hf.modeling_olmo3moe import Olmo3MoeForCausalLM

    module = build_module()
    config = get_hf_config(module)
    config.max_position_embeddings = 32
    expected = {k: tuple(v.shape) for k, v in Olmo3MoeForCausalLM(config).state_dict().items()}
    assert {k: tuple(v.shape) for k, v in publication_tensors(module)} == expected


def test_the_router_bias_buffer_is_published():
    module = build_module(num_layers=1, router_options={"score_correction_bias": True})
    router = module.blocks["0"].routed_experts_router
    assert torch.equal(_published(module)[f"model.layers.0.mlp.router.{BIAS}"], router.score_bias)


def test_load_restores_the_published_policy_exactly(module):
    published = _published(module)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    load_tensors(module, published)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def _refusal(change) -> EngineError:
    """The error that a changed publication causes; the module must be as it was."""
    module = build_module(num_layers=1)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in publication_tensors(module)}
    change(tensors)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(EngineError) as caught:
        load_tensors(module, tensors)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    return caught.value


def test_a_missing_shared_expert_is_named():
    name = "model.layers.0.mlp.shared_expert.up_proj.weight"
    error = _refusal(lambda tensors: tensors.pop(name))
    assert error.code == "E411"
    assert error.details["missing"] == [name]


def test_an_extra_tensor_is_named():
    error = _refusal(lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(1)}))
    assert error.code == "E411"
    assert error.details["extra"] == ["model.layers.9.x"]


@pytest.mark.parametrize("wrong", [torch.zeros(40, 32, dtype=torch.bfloat16), torch.zeros(41, 32)])
def test_a_wrong_shape_or_dtype_is_named(wrong):
    error = _refusal(lambda tensors: tensors.update({"lm_head.weight": wrong}))
    assert error.code == "E412"
    assert "lm_head.weight" in str(error)


def test_a_nan_is_named():
    error = _refusal(lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    assert error.code == "E413"
    assert error.details["tensors"] == ["model.norm.weight"]


def test_a_tensor_without_a_name_is_refused():
    module = build_module(num_layers=1)
    module.register_parameter("extra_scale", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(CheckpointError, match=r"E410.*extra_scale"):
        dict(publication_tensors(module))


def test_tied_embeddings_are_refused():
    module = build_module(num_layers=1)
    module.lm_head.w_out.weight = module.embeddings.weight
    with pytest.raises(CheckpointError, match=r"E410.*shares its memory"):
        dict(publication_tensors(module))
