"""Names and layouts: OLMo-core's `OLMoDDPModel` on one side, Hugging Face's classes on the other.

Every tensor of the module's state is cut into VIEWS in the Hugging Face layout, so publication reads
and loading writes through the same table, and the two cannot disagree.

Dimension legend: D hidden size, E experts, H expert hidden size, V vocabulary.

    OLMo-core (blocks.N.)                  Hugging Face (model.layers.N.)
    attention.w_{q,k,v,out,g}.weight       self_attn.{q,k,v,o,g}_proj.weight
    attention.{q,k}_norm.weight            self_attn.{q,k}_norm.weight
    attention_norm.weight                  post_attention_layernorm.weight
    feed_forward_norm.weight               post_feedforward_layernorm.weight
    attention_input_norm.weight            pre_attention_layernorm.weight
    feed_forward_input_norm.weight         pre_feedforward_layernorm.weight
    routed_experts_router.weight [E*D]     mlp.router.gate.weight [E, D]
    routed_experts_router.score_bias [E]   mlp.router.e_score_correction_bias [E]  (our name)
    routed_experts.w_up_gate [E, 2H, D]    mlp.experts.e.{up,gate}_proj.weight [H, D]
    routed_experts.w_down [E, H, D]        mlp.experts.e.down_proj.weight [D, H]
    shared_experts.w_up_gate [D, 2H]       mlp.shared_expert.{up,gate}_proj.weight [H, D]
    shared_experts.w_down [1, H, D]        mlp.shared_expert.down_proj.weight [D, H]

In a block without a router the shared expert is the dense MLP, `mlp.{up,gate,down}_proj.weight`.

That is `olmo3moe`. In `olmoe` the norms stand before attention and MLP and are called by that
(input_layernorm, post_attention_layernorm), and the router is mlp.gate.weight.

Source: `olmo_core.nn.hf.convert.convert_olmo3moe_state_to_hf` (ai2-olmo-core 3.0), which the tests
compare with tensor by tensor; `OlmoeForCausalLM` (transformers), as public checkpoints are saved.
`score_bias` is a buffer that Hugging Face's class does not have; the name is DeepSeek's. Left out,
and refused by name: linear attention, latent experts, biases, several shared experts, tied embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from miles_olmo.base.errors import CheckpointError, EngineError
from miles_olmo.policy.expert_shards import ExpertShards, shards_of
from miles_olmo.policy.tensor_files import is_finite

_Views = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorNames:
    """What a family calls its tensors."""

    family: str
    top: Mapping[str, str]
    """Outside the layers: Hugging Face name by OLMo-core name."""
    same_layout: Mapping[str, str]
    """In a layer, with the same layout on both sides."""
    router: str
    """The router's matrix in a layer."""


_TOP = {
    "embeddings.weight": "model.embed_tokens.weight",
    "lm_head.norm.weight": "model.norm.weight",
    "lm_head.w_out.weight": "lm_head.weight",
}
_ATTENTION = {
    "attention.w_q.weight": "self_attn.q_proj.weight",
    "attention.w_k.weight": "self_attn.k_proj.weight",
    "attention.w_v.weight": "self_attn.v_proj.weight",
    "attention.w_out.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
OLMO3MOE = TensorNames(
    family="olmo3moe",
    top={**_TOP, "embedding_norm.weight": "model.embed_norm.weight"},
    same_layout={
        **_ATTENTION,
        "attention.w_g.weight": "self_attn.g_proj.weight",
        "attention_norm.weight": "post_attention_layernorm.weight",
        "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
        "attention_input_norm.weight": "pre_attention_layernorm.weight",
        "feed_forward_input_norm.weight": "pre_feedforward_layernorm.weight",
        "routed_experts_router.score_bias": "mlp.router.e_score_correction_bias",
    },
    router="mlp.router.gate.weight",
)
OLMOE = TensorNames(
    family="olmoe",
    top=_TOP,
    same_layout={
        **_ATTENTION,
        "attention_norm.weight": "input_layernorm.weight",
        "feed_forward_norm.weight": "post_attention_layernorm.weight",
    },
    router="mlp.gate.weight",
)
_ROUTER = "routed_experts_router.weight"
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def publication_tensors(module: nn.Module, names: TensorNames = OLMO3MOE) -> _Views:
    """Every tensor of the policy once, parameters and buffers, under its Hugging Face name.

    Experts that are spread over ranks are gathered tensor by tensor: all ranks iterate to the end,
    the leader gets everything and the others nothing.

    Yields:
        (name, tensor): detached views of the module's own storage, mostly not contiguous, in the
        module's dtypes. They change when the module does.

    Raises:
        CheckpointError: E410, the module holds a tensor that has no Hugging Face name.
    """
    state = module.state_dict()
    _refuse_shared_storage(state)
    shards = shards_of(module)
    for name, tensor in state.items():
        whole = tensor.detach() if shards is None else shards.whole(name, tensor.detach())
        if whole is not None:
            yield from _views(name, whole, state, names)


def publication_layout(module: nn.Module, names: TensorNames = OLMO3MOE) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of `publication_tensors`, as tensors on the meta device.

    Raises:
        CheckpointError: E410, the module holds a tensor that has no Hugging Face name.
    """
    state, shards = module.state_dict(), shards_of(module)
    layout = {}
    for name, tensor in state.items():
        whole = tensor.to("meta") if shards is None else shards.whole_layout(name, tensor)
        layout.update(_views(name, whole, state, names))
    return layout


def load_tensors(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], names: TensorNames = OLMO3MOE
) -> None:
    """Copy `tensors` into the module; inverse of `publication_tensors`.

    All or nothing: names, shapes, dtypes and finiteness are checked before the first copy.

    Raises:
        EngineError: E411 missing or extra names, E412 wrong shapes or dtypes, E413 NaN or infinity.
        CheckpointError: E410, the module holds a tensor that has no Hugging Face name.
    """
    shards = shards_of(module)
    layout = publication_layout if shards else publication_tensors
    views = dict(layout(module, names))
    _check_names(views, tensors)
    _check_layouts(views, tensors)
    _check_finite(tensors)
    with torch.no_grad():
        if shards:
            _load_shards(module, tensors, shards, names)
            return
        for name, view in views.items():
            view.copy_(tensors[name])


def _load_shards(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    shards: ExpertShards,
    names: TensorNames,
) -> None:
    """Join each cut tensor in memory of its own and keep this rank's part."""
    state = module.state_dict()
    for name, tensor in state.items():
        layout = shards.whole_layout(name, tensor)
        whole = torch.empty_like(layout, device="cpu") if shards.is_cut(name) else tensor
        for hf_name, view in _views(name, whole, state, names):
            view.copy_(tensors[hf_name])
        if shards.is_cut(name):
            tensor.copy_(shards.own(name, whole))


def _views(
    name: str, tensor: torch.Tensor, state: Mapping[str, torch.Tensor], names: TensorNames
) -> _Views:
    """Cut one tensor of the module's state into views in the Hugging Face layout."""
    if name in names.top:
        yield names.top[name], tensor
        return
    match = _BLOCK.fullmatch(name)
    prefix, suffix = (f"model.layers.{match[1]}.", match[2]) if match else ("", name)
    if match and suffix in names.same_layout:
        yield prefix + names.same_layout[suffix], tensor
    elif match and suffix == _ROUTER:
        width = state["embeddings.weight"].shape[1]
        yield prefix + names.router, tensor.view(-1, width)
    elif match and suffix in _CUTS:
        router = state.get(f"blocks.{match[1]}.{_ROUTER}")
        width = state["embeddings.weight"].shape[1]
        num_experts = 0 if router is None else router.numel() // width
        for hf_suffix, view in _CUTS[suffix](tensor, width, num_experts):
            yield prefix + hf_suffix, view
    else:
        raise _unmapped(name, tensor, f"the layout of {names.family} has no place for it")


def _cut_routed_up_gate(weight_EHD: torch.Tensor, width: int, num_experts: int) -> _Views:
    _expect(weight_EHD, (num_experts, None, width), "routed_experts.w_up_gate")
    for index, weight_HD in enumerate(weight_EHD):
        up, gate = weight_HD.chunk(2)
        yield f"mlp.experts.{index}.up_proj.weight", up
        yield f"mlp.experts.{index}.gate_proj.weight", gate


def _cut_routed_down(weight_EHD: torch.Tensor, width: int, num_experts: int) -> _Views:
    _expect(weight_EHD, (num_experts, None, width), "routed_experts.w_down")
    for index, weight_HD in enumerate(weight_EHD):
        yield f"mlp.experts.{index}.down_proj.weight", weight_HD.T


def _cut_shared_up_gate(weight_DH: torch.Tensor, width: int, num_experts: int) -> _Views:
    _expect(weight_DH, (width, None), "shared_experts.w_up_gate")
    up, gate = weight_DH.chunk(2, dim=1)
    yield _mlp(num_experts) + "up_proj.weight", up.T
    yield _mlp(num_experts) + "gate_proj.weight", gate.T


def _cut_shared_down(weight_1HD: torch.Tensor, width: int, num_experts: int) -> _Views:
    _expect(weight_1HD, (1, None, width), "shared_experts.w_down")
    yield _mlp(num_experts) + "down_proj.weight", weight_1HD[0].T


def _mlp(num_experts: int) -> str:
    """What stands for a shared expert: in a layer without experts it is the whole MLP."""
    return "mlp.shared_expert." if num_experts else "mlp."


_CUTS: dict[str, Callable[[torch.Tensor, int, int], _Views]] = {
    "routed_experts.w_up_gate": _cut_routed_up_gate,
    "routed_experts.w_down": _cut_routed_down,
    "shared_experts.w_up_gate": _cut_shared_up_gate,
    "shared_experts.w_down": _cut_shared_down,
}


def _expect(tensor: torch.Tensor, shape: tuple[int | None, ...], name: str) -> None:
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise _unmapped(name, tensor, f"the layout needs the shape [{wanted}]")


def _unmapped(name: str, tensor: torch.Tensor, why: str) -> CheckpointError:
    return CheckpointError(
        "E410",
        f"tensor '{name}' {list(tensor.shape)} of the policy has no Hugging Face name",
        why=why,
        fix="use a model shape that the family can express",
        tensor=name,
    )


def _refuse_shared_storage(state: Mapping[str, torch.Tensor]) -> None:
    """Two names for one storage would be published twice and could be loaded with two values."""
    owners: dict[int, str] = {}
    for name, tensor in state.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        first = owners.setdefault(tensor.data_ptr(), name)
        if first != name:
            raise _unmapped(name, tensor, f"it shares its memory with '{first}'")


def _check_names(views: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in views if name not in tensors]
    extra = [name for name in tensors if name not in views]
    if not missing and not extra:
        return
    parts = [
        f"{len(names)} {kind} ({_first(names)})"
        for kind, names in (("missing", missing), ("extra", extra))
        if names
    ]
    raise EngineError(
        "E411",
        "the weights do not name every tensor of the policy once: " + ", ".join(parts),
        why="a partly updated policy would sample from weights that nobody trained",
        fix="publish from the same model shape that the engine was started with",
        missing=missing,
        extra=extra,
    )


def _check_layouts(views: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    wrong = [
        f"{name}: {_layout(tensors[name])}, needs {_layout(view)}"
        for name, view in views.items()
        if tensors[name].shape != view.shape or tensors[name].dtype != view.dtype
    ]
    if wrong:
        raise EngineError(
            "E412",
            f"{len(wrong)} tensors have another shape or dtype: {_first(wrong)}",
            why="a cast or a reshape would change the policy silently",
            fix="publish from the same model shape and dtype that the engine was started with",
            wrong=wrong,
        )


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if bad:
        raise EngineError(
            "E413",
            f"{len(bad)} tensors hold NaN or infinity: {_first(bad)}",
            why="the policy would sample garbage",
            fix="look for the step whose loss or gradient diverged",
            tensors=bad,
        )


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _first(names: list[str], limit: int = 4) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
