"""vLLM's model class for `Olmo3MoeForCausalLM`, OLMo-core's mixture of experts in Hugging Face form.

Follows the reference implementation in OLMo-core (`olmo_core.nn.moe.v2.hf.modeling_olmo3moe`) feature
by feature: sigmoid or softmax router in float32, shared expert, dense layers, latent experts, sliding
and full attention, QK norm over the projection or per head (with gains per head), attention gate,
scalable softmax, peri-LN, embedding scale and norm. Tensor parallel 1.

Left out, and refused by name: linear attention (Kimi delta attention), EMo document pools that span
fewer than all experts, activations other than SiLU, tied embeddings.

Suffixes: T tokens of the batch, D model width, E experts, K experts per token, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from miles_olmo.serving.olmo3moe_attention import Norm, SelfAttention

try:  # vLLM 0.28 and newer
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory as FusedExperts
except ImportError:
    from vllm.model_executor.layers.fused_moe import FusedMoE as FusedExperts

STACKED = (
    (".self_attn.q_proj.", ".self_attn.qkv_proj.", "q"),
    (".self_attn.k_proj.", ".self_attn.qkv_proj.", "k"),
    (".self_attn.v_proj.", ".self_attn.qkv_proj.", "v"),
    (".mlp.gate_proj.", ".mlp.gate_up_proj.", 0),
    (".mlp.up_proj.", ".mlp.gate_up_proj.", 1),
    (".shared_expert.gate_proj.", ".shared_expert.gate_up_proj.", 0),
    (".shared_expert.up_proj.", ".shared_expert.gate_up_proj.", 1),
)
"""Hugging Face tensors that share one kernel parameter: part of the name, replacement, shard."""


def refuse_unsupported(config: Any) -> None:
    """Refuse a configuration that this class would compute wrongly.

    Raises:
        ValueError: names every unsupported setting.
    """
    found = []
    if "linear_attention" in config.layer_types:
        found.append('layer_types contains "linear_attention"')
    pool, experts = config.emo_eval_document_expert_pool, config.n_routed_experts
    if pool is not None and pool != experts:
        found.append(f"emo_eval_document_expert_pool = {pool} of {experts} experts")
    if config.hidden_act != "silu":
        found.append(f"hidden_act = {config.hidden_act!r}")
    if config.tie_word_embeddings:
        found.append("tie_word_embeddings = true")
    if get_tensor_model_parallel_world_size() != 1:
        found.append(f"tensor parallel size {get_tensor_model_parallel_world_size()}")
    if found:
        raise ValueError(f"olmo3moe: not supported by this engine: {'; '.join(found)}")


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): a dense layer or a shared expert."""

    def __init__(self, hidden: int, inner: int, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=False, prefix=f"{prefix}.down_proj")
        self.activate = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_up_proj(x)[0]))[0]


class Router(nn.Module):
    """Float32 logits whatever the model's dtype: rounding them changes which experts are chosen."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(
            config.hidden_size,
            config.n_routed_experts,
            bias=False,
            params_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x.float())[0]


def expert_choice(config: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The function from router logits `[T, E]` to weights float32 and experts int32, both `[T, K]`."""
    softmax = config.gating_function == "softmax"
    norm, top_k = config.normalize_expert_weights, config.num_experts_per_tok
    scale = float(top_k) if config.restore_weight_scale else 1.0
    trained_top_k = config.original_num_experts_per_tok
    if trained_top_k not in (None, top_k):
        scale *= (trained_top_k / top_k) ** 0.5

    def choose(
        hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = gating_output.float()
        scores = logits.softmax(-1) if softmax else torch.sigmoid(logits) + 1e-7
        weights, experts = torch.topk(scores, topk, dim=-1)
        if norm is not None:
            weights = weights / torch.linalg.vector_norm(weights, ord=norm, dim=-1, keepdim=True)
        if scale != 1.0:
            weights = weights * scale
        return weights, experts.to(torch.int32)

    return choose


class SparseMLP(nn.Module):
    """Routed experts, at the model's width or a narrower one, plus a shared expert."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.latent_moe_dim
        self.router = Router(config, f"{prefix}.router")
        self.latent_down_proj = self.latent_up_proj = self.latent_up_proj_input_norm = None
        if latent is not None:
            bias = config.latent_moe_bias
            self.latent_down_proj = ReplicatedLinear(
                hidden, latent, bias=bias, prefix=f"{prefix}.latent_down_proj"
            )
            self.latent_up_proj = ReplicatedLinear(
                latent, hidden, bias=bias, prefix=f"{prefix}.latent_up_proj"
            )
            if config.latent_moe_up_proj_input_norm:
                self.latent_up_proj_input_norm = Norm(latent, config.rms_norm_eps)
        self.experts = FusedExperts(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=latent or hidden,
            intermediate_size=config.moe_intermediate_size,
            renormalize=False,
            custom_routing_function=expert_choice(config),
            router_logits_dtype=torch.float32,
            prefix=f"{prefix}.experts",
        )
        shared = config.shared_expert_intermediate_size
        self.shared_expert = (
            None if shared is None else GatedMLP(hidden, shared, f"{prefix}.shared_expert")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        # The fused kernel may write into its input, which the shared expert still reads.
        routed = x if self.shared_expert is None else x.clone()
        if self.latent_down_proj is not None:
            routed = self.latent_down_proj(x)[0]
        out = self.experts(hidden_states=routed, router_logits=logits)
        if self.latent_up_proj is not None:
            if self.latent_up_proj_input_norm is not None:
                out = self.latent_up_proj_input_norm(out)
            out = self.latent_up_proj(out)[0]
        return out if self.shared_expert is None else out + self.shared_expert(x)


class DecoderLayer(nn.Module):
    """Norms after attention and feed-forward (reordered norm), with peri-LN before them too."""

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = SelfAttention(vllm_config, f"{prefix}.self_attn")
        if extract_layer_index(prefix) in config.dense_layers_indices:
            self.mlp = GatedMLP(hidden, config.dense_mlp_intermediate_size, f"{prefix}.mlp")
        else:
            self.mlp = SparseMLP(config, f"{prefix}.mlp")
        self.post_attention_layernorm = Norm(hidden, eps)
        self.post_feedforward_layernorm = Norm(hidden, eps)
        self.pre_attention_layernorm = Norm(hidden, eps) if config.use_peri_ln else None
        self.pre_feedforward_layernorm = Norm(hidden, eps) if config.use_peri_ln else None

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = x if self.pre_attention_layernorm is None else self.pre_attention_layernorm(x)
        x = x + self.post_attention_layernorm(self.self_attn(positions, before))
        before = x if self.pre_feedforward_layernorm is None else self.pre_feedforward_layernorm(x)
        return x + self.post_feedforward_layernorm(self.mlp(before))


@support_torch_compile(
    dynamic_arg_dims=dict.fromkeys(
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"), 0
    )
)
class Olmo3MoeModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.embed_norm = (
            Norm(config.hidden_size, config.rms_norm_eps) if config.embed_norm else None
        )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: DecoderLayer(vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids) * self.config.embed_scale
        return x if self.embed_norm is None else self.embed_norm(x)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            x = intermediate_tensors["hidden_states"]
        elif inputs_embeds is not None:
            x = inputs_embeds
        else:
            assert input_ids is not None
            x = self.embed_input_ids(input_ids)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            x = layer(positions, x)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": x})
        return self.norm(x)


class Olmo3MoeForCausalLM(nn.Module, SupportsPP):
    """The class vLLM builds for `architectures = ["Olmo3MoeForCausalLM"]`.

    Raises:
        ValueError: the configuration holds something this class does not compute.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        refuse_unsupported(config)
        self.model = Olmo3MoeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take Hugging Face tensors; returns the names of the parameters that were filled."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        filled: set[str] = set()

        def unstacked() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                target, shard = _stacked_target(name)
                if target is None:
                    yield name, tensor
                    continue
                parameter = parameters[target]
                parameter.weight_loader(parameter, tensor, shard)
                filled.add(target)

        return AutoWeightsLoader(self).load_weights(unstacked()) | filled


def _stacked_target(name: str) -> tuple[str | None, str | int | None]:
    for part, replacement, shard in STACKED:
        if part in name:
            return name.replace(part, replacement), shard
    return None, None
