"""Reading back, under Hugging Face names, the weights that a vLLM model computes with.

An audit must look at what is used, not at what was sent. vLLM fuses projections and stacks experts;
on a CPU it also packs both and drops the originals. Packed experts are a fixed permutation, which is
found by packing numbers 0, 1, 2, ...; a packed projection is read through its own kernel as its
product with the identity, which is exact: each sum has one term that is not zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.platforms import current_platform

from miles_olmo.wire.publication import ExpectedTensor

_QKV = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_GATE_UP = {"gate_proj": 0, "up_proj": 1}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_LARGEST_EXACT_INTEGER = 2**24
"""Of float32."""


class HeldWeights:
    """The tensors of one served model.

    Args:
        model: The module that vLLM runs, tensor parallel 1, not quantized.
        expected: Shape and dtype of every tensor, by Hugging Face name.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, ExpectedTensor]) -> None:
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._parameters = dict(model.named_parameters())
        self._expected = expected
        self._permutations: dict[tuple[int, ...], torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the layout and dtype of its publication.

        Raises:
            KeyError: the model holds nothing of this name.
        """
        expected = self._expected[name]
        match = _EXPERT.fullmatch(name)
        tensor = self._expert(match) if match else self._plain(name)
        # A float32 router may serve a bfloat16 tensor: going back to its dtype is exact.
        return tensor.to(dtype=_DTYPES[expected.dtype]).reshape(expected.shape)

    def _plain(self, name: str) -> torch.Tensor:
        module_name, _, attribute = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        for shards, fused in ((_QKV, "qkv_proj"), (_GATE_UP, "gate_up_proj")):
            module = self._modules.get(f"{parent}.{fused}")
            if leaf in shards and module is not None:
                rows = self._linear(module, attribute)
                return rows.split(list(module.output_sizes), dim=0)[shards[leaf]]
        module = self._modules.get(module_name)
        if module is None:
            return self._parameters[name]
        return self._linear(module, attribute)

    def _linear(self, module: Any, attribute: str) -> torch.Tensor:
        held = getattr(module, attribute)
        if held.numel() or attribute != "weight":
            return held[: getattr(module, "org_vocab_size", None)]  # vLLM pads vocabularies
        width = int(module.input_size)
        dtype = getattr(module, "params_dtype", torch.float32)
        identity = torch.eye(width, dtype=dtype, device=held.device)
        return module.cpu_linear(identity, module.weight, None).T.contiguous()

    def _expert(self, match: re.Match[str]) -> torch.Tensor:
        prefix, index, projection = match[1], int(match[2]), match[3]
        layer = self._expert_layer(prefix)
        inner = self._expected[f"{prefix}.{index}.gate_proj.weight"].shape[0]
        if projection == "down_proj":
            return self._unpacked(layer, layer.w2_weight, index)[:, :inner].contiguous()
        rows = self._unpacked(layer, layer.w13_weight, index)
        padded = rows.shape[0] // 2  # a CPU kernel may pad the inner width
        start = padded * _GATE_UP[projection]
        return rows[start : start + inner].contiguous()

    def _expert_layer(self, prefix: str) -> Any:
        for name, module in self._modules.items():
            if (name == prefix or name.startswith(f"{prefix}.")) and hasattr(module, "w13_weight"):
                return module
        raise KeyError(prefix)

    def _unpacked(self, layer: Any, weight: torch.Tensor, index: int) -> torch.Tensor:
        """One expert's matrix `[N, K]` as it was before it was packed."""
        if not current_platform.is_cpu():
            return weight[index]
        packed = weight[index]
        positions = self._positions(layer, tuple(packed.shape), packed.dtype)
        plain = torch.empty_like(packed).reshape(-1)
        plain[positions] = packed.reshape(-1)
        return plain.reshape(packed.shape)

    def _positions(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Where each packed element came from, int64 `[N * K]`."""
        if shape not in self._permutations:
            size = shape[0] * shape[1]
            isa = layer.quant_method.moe_kernel.fused_experts.isa
            # Digits that the dtype holds exactly: bfloat16 counts to 256, float32 to 2^24.
            base = 256 if dtype == torch.bfloat16 else _LARGEST_EXACT_INTEGER
            found, power = torch.zeros(size, dtype=torch.int64), 1
            while power < size:
                digits = (torch.arange(size) // power % base).to(dtype)
                packed = _pack(digits.reshape(1, *shape), isa)
                found += packed.reshape(-1).to(torch.int64) * power
                power *= base
            self._permutations[shape] = found
        return self._permutations[shape]


def _pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight.contiguous(), isa)


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
