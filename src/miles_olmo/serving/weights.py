"""vLLM's side of a publication by files: check every byte, then replace all weights at once.

An update is read and checked completely before the first parameter changes, so a refused one leaves
the version before in place. Loading goes through vLLM's own layerwise reload, which keeps the
addresses that CUDA graphs hold, and mends what that misses on a CPU (`repack_cpu_experts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from miles_olmo.base.errors import EngineError
from miles_olmo.policy.tensor_files import dtype_name
from miles_olmo.policy.weight_files import read_checked
from miles_olmo.wire.publication import EXPECTED_NAME, ExpectedTensor, read_expected


@dataclass
class FileInit(WeightTransferInitInfo):
    """Files need no connection."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """`Publication.update_info`."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)
    weight_version: int = -1


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Takes safetensors files that trainer and engine both see."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.expected = read_expected(Path(vllm_config.model_config.model) / EXPECTED_NAME)
        self.refusal: EngineError | None = None
        """Why the last update was refused, for the server's answer."""
        self.paths: list[Path] = []
        """Files of the version that is in place."""
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_paths: list[Path] = []

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        self.give_up()
        self.refusal = None

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Read and check tensors; parameters stay as they are.

        Raises:
            EngineError: E271, E272 unreadable files or other bytes; E411, E412, E413 tensors that
                are not the policy's, have another shape or dtype, or are not finite.
        """
        try:
            paths = [Path(path) for path in update_info.paths]
            tensors = read_checked(paths, update_info.checksums)
            check_tensors(tensors, self.expected)
        except EngineError as error:
            self.refusal = error
            self.give_up()
            raise
        self._pending |= tensors
        self._pending_paths += paths

    def finish_weight_update(self) -> None:
        """Replace every parameter by what was received."""
        tensors, paths = self._pending, self._pending_paths
        self.give_up()
        load_into(self.model, self.model_config, tensors)
        self.paths = paths

    def give_up(self) -> None:
        """Forget what was received."""
        self._pending, self._pending_paths = {}, []

    def shutdown(self) -> None:
        self.give_up()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:  # abstract in vLLM 0.26
        raise NotImplementedError("the trainer writes files: miles_olmo.policy.publication")


def check_tensors(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, ExpectedTensor]
) -> None:
    """Every tensor is one of the policy's, of its shape and dtype, and finite.

    Raises:
        EngineError: E411 unknown names; E412 other shapes or dtypes; E413 NaN or infinity.
    """
    unknown = sorted(tensors.keys() - expected.keys())
    if unknown:
        raise _refused("E411", unknown, "the policy has no such tensor")
    wrong = [
        f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)} instead of "
        f"{expected[name].dtype}{list(expected[name].shape)}"
        for name, tensor in tensors.items()
        if (dtype_name(tensor.dtype), tuple(tensor.shape))
        != (expected[name].dtype, expected[name].shape)
    ]
    if wrong:
        raise _refused("E412", wrong, "the tensor does not fit the policy")
    infinite = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if infinite:
        raise _refused("E413", infinite, "it holds NaN or infinity")


def _refused(code: str, names: Sequence[str], why: str) -> EngineError:
    return EngineError(
        code,
        f"weight update refused: {len(names)} tensors, first {names[0]}",
        why=why,
        fix="publish the version again from the policy that this engine was started for",
        tensors=list(names),
    )


def load_into(model: Any, model_config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace all parameters of a served model; sorted, so that a layer's tensors come together."""
    initialize_layerwise_reload(model)
    model.load_weights((name, tensors[name]) for name in sorted(tensors))
    finalize_layerwise_reload(model, model_config)
    repack_cpu_experts(model)


def repack_cpu_experts(model: nn.Module) -> None:
    """Pack expert weights for the CPU kernel again.

    vLLM (0.30) packs them when the kernel is made and not when weights are replaced, so that even
    the same weights, loaded again, compute something else.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
