"""The adapter of each model family.

Families share the model, its forward pass and everything that is done with its tensors; what tells them
apart is a table of names and the Hugging Face class (`olmo3moe_build.model_config` reads the
placement of the norms from `model.family`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.router_losses import RouterCounts
from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import Model, Train
from miles_olmo.policy import olmo3moe_tensors
from miles_olmo.policy.export_tokenizer import TokenizerSource
from miles_olmo.policy.family import FamilyAdapter, PackOutput
from miles_olmo.policy.olmo3moe_build import build_model
from miles_olmo.policy.olmo3moe_forward import count_experts, forward_pack, reference_logits
from miles_olmo.policy.olmo3moe_model import PortableModel
from miles_olmo.policy.olmo3moe_tensors import TensorNames
from miles_olmo.policy.ranks import ALONE, Ranks


class PortableAdapter:
    """A family on the portable block over OLMo-core's MoE stack."""

    name: str
    names: TensorNames
    compares_in_float32 = False
    """Exports are checked in float32, whatever the dtype."""

    def build(
        self,
        model: Model,
        train: Train | None,
        *,
        device: torch.device,
        seed: int,
        ranks: Ranks = ALONE,
    ) -> PortableModel:
        """A policy with seeded random weights; `train` decides about recompute."""
        recompute = train is not None and train.recompute == "block"
        module = build_model(model, recompute=recompute, device=device, seed=seed, ranks=ranks)
        return module.train(train is not None)

    def forward(self, module: nn.Module, pack: Pack, *, temperature: float) -> PackOutput:
        """See `forward_pack`."""
        return forward_pack(_portable(module), pack, temperature=temperature)

    def logits(self, module: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every position `[B, T, V]`, natively routed, without gradient."""
        return reference_logits(_portable(module), ids_BT)

    def count_experts(self, module: nn.Module, packs: Iterable[Pack]) -> RouterCounts:
        """See `olmo3moe_forward.count_experts`."""
        return count_experts(_portable(module), packs)

    def publication_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """See `olmo3moe_tensors.publication_tensors`."""
        return olmo3moe_tensors.publication_tensors(module, self.names)

    def publication_layout(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """See `olmo3moe_tensors.publication_layout`."""
        return olmo3moe_tensors.publication_layout(module, self.names)

    def load_tensors(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `olmo3moe_tensors.load_tensors`."""
        olmo3moe_tensors.load_tensors(module, tensors, self.names)

    def export(
        self,
        module: nn.Module,
        model: Model,
        tokenizer: TokenizerSource,
        directory: Path,
        *,
        plan_digest: str | None,
        step: int | None,
    ) -> dict[str, Any]:
        """See `miles_olmo.policy.export.export_policy`."""
        # transformers is imported only where an export is made.
        from miles_olmo.policy.export import export_policy

        tensors = dict(self.publication_tensors(module))
        dtype = self.check_dtype(model)
        twin = dtype != model.dtype
        comparable = self.float32_twin(module, model, tensors) if twin else module
        return export_policy(
            tensors,
            model,
            tokenizer,
            directory,
            core_logits=partial(self.logits, comparable),
            plan_digest=plan_digest,
            step=step,
            check_dtype=dtype,
            device=next(module.parameters()).device,
        )

    def assist_export(self, module: nn.Module, model: Model) -> None:
        """See `FamilyAdapter.assist_export`: the same collectives in the same order as `export`."""
        from miles_olmo.policy.export import assist_logits_check

        for _ in self.publication_tensors(module):
            pass
        if self.check_dtype(model) == model.dtype:
            device = next(module.parameters()).device
            assist_logits_check(model, partial(self.logits, module), device=device)

    def check_dtype(self, model: Model) -> str:
        """Dtype in which an export is compared with the Hugging Face class."""
        return "float32" if self.compares_in_float32 else model.dtype

    def float32_twin(
        self, module: nn.Module, model: Model, tensors: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        """The policy with the same weights in float32, on this process alone.

        Args:
            tensors: What the module publishes.

        Returns:
            The module itself if float32 is its dtype.
        """
        if model.dtype == "float32":
            return module
        twin_model = model.model_copy(update={"dtype": "float32"})
        device = next(module.parameters()).device
        twin = self.build(twin_model, None, device=device, seed=0)
        self.load_tensors(twin, {name: tensor.float() for name, tensor in tensors.items()})
        return twin


class Olmo3MoeAdapter(PortableAdapter):
    """`olmo3moe`: OLMo-core's MoE stack, Hugging Face names of the same family."""

    name = "olmo3moe"
    names = olmo3moe_tensors.OLMO3MOE


class OlmoeAdapter(PortableAdapter):
    """`olmoe`: the published OLMoE-1B-7B layout, on the same stack with pre-norm blocks.

    In bfloat16 the class of transformers rounds the router's logits and every expert's share, ours
    does not: experts may differ where two are nearly tied. So the two are compared in float32, which
    holds every bfloat16 weight exactly.
    """

    name = "olmoe"
    names = olmo3moe_tensors.OLMOE
    compares_in_float32 = True


ADAPTERS: Mapping[str, type[PortableAdapter]] = {
    adapter.name: adapter for adapter in (Olmo3MoeAdapter, OlmoeAdapter)
}


def _portable(module: nn.Module) -> PortableModel:
    assert isinstance(module, PortableModel), f"not built by this adapter: {type(module)}"
    return module


def adapter_for(family: str) -> FamilyAdapter:
    """The adapter of `model.family`.

    Raises:
        TrainingError: E331, no adapter is written for the family.
    """
    if family not in ADAPTERS:
        raise TrainingError(
            "E331",
            f'model.family = "{family}"',
            why="no adapter is written for it",
            fix="set model.family to " + " or ".join(f'"{name}"' for name in ADAPTERS),
        )
    return ADAPTERS[family]()
