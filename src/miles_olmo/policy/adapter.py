"""The adapter of each model family."""

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
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.family import FamilyAdapter, PackOutput
from miles_olmo.policy.olmo3moe_forward import count_experts, forward_pack, reference_logits
from miles_olmo.policy.olmo3moe_model import PortableModel, build_model


class Olmo3MoeAdapter:
    """`olmo3moe`: OLMo-core's MoE stack, Hugging Face names of the same family."""

    name = "olmo3moe"

    def build(
        self, model: Model, train: Train | None, *, device: torch.device, seed: int
    ) -> PortableModel:
        """A policy with seeded random weights; `train` decides about recompute."""
        recompute = train is not None and train.recompute == "block"
        module = build_model(model, recompute=recompute, device=device, seed=seed)
        return module.train(train is not None)

    def forward(self, module: nn.Module, pack: Pack, *, temperature: float) -> PackOutput:
        """See `forward_pack`."""
        return forward_pack(_portable(module), pack, temperature=temperature)

    def count_experts(self, module: nn.Module, packs: Iterable[Pack]) -> RouterCounts:
        """See `olmo3moe_forward.count_experts`."""
        return count_experts(_portable(module), packs)

    def publication_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """See `olmo3moe_tensors.publication_tensors`."""
        return olmo3moe_tensors.publication_tensors(module)

    def load_tensors(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `olmo3moe_tensors.load_tensors`."""
        olmo3moe_tensors.load_tensors(module, tensors)

    def export(
        self,
        module: nn.Module,
        model: Model,
        tokenizer: ExportTokenizer,
        directory: Path,
        *,
        plan_digest: str,
        step: int,
    ) -> dict[str, Any]:
        """See `miles_olmo.policy.export.export_policy`."""
        # transformers is imported only where an export is made.
        from miles_olmo.policy.export import export_policy

        return export_policy(
            module,
            model,
            tokenizer,
            directory,
            core_logits=partial(reference_logits, _portable(module)),
            plan_digest=plan_digest,
            step=step,
        )


def _portable(module: nn.Module) -> PortableModel:
    assert isinstance(module, PortableModel), f"not built by this adapter: {type(module)}"
    return module


def adapter_for(family: str) -> FamilyAdapter:
    """The adapter of `model.family`.

    Raises:
        TrainingError: E331, no adapter is written for the family.
    """
    if family == Olmo3MoeAdapter.name:
        return Olmo3MoeAdapter()
    raise TrainingError(
        "E331",
        f'model.family = "{family}"',
        why="no adapter is written for it",
        fix='set model.family = "olmo3moe"',
    )
