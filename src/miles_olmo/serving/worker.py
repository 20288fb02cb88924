"""Methods that vLLM's worker gets beside its own (`--worker-extension-cls`).

The server calls them by name through `collective_rpc`; nothing here is reachable over HTTP without
the run's token.
"""

from __future__ import annotations

from typing import Any

import torch

from miles_olmo.policy.tensor_files import read_tensors, tensor_sha256
from miles_olmo.serving.held import HeldWeights
from miles_olmo.serving.weights import FileTransfer


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: Any
    model_runner: Any

    def miles_describe(self) -> dict[str, Any]:
        """What this worker runs, for the check at start."""
        model = self.model_runner.get_model()
        config = self.model_runner.vllm_config
        return {
            "architecture": type(model).__name__,
            "module": type(model).__module__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "routed_experts": bool(config.model_config.enable_return_routed_experts),
            "block_size": int(config.cache_config.block_size),
            "max_model_len": int(config.model_config.max_model_len),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }

    def miles_give_up_update(self) -> dict[str, Any] | None:
        """Forget an update that will not be finished; returns why it was refused, if it was."""
        transfer: FileTransfer = self.weight_transfer_engine
        transfer.give_up()
        self._weight_update_active = False
        refusal, transfer.refusal = transfer.refusal, None
        return None if refusal is None else {"message": str(refusal), **refusal.as_json()}

    @torch.no_grad()
    def miles_weight_checksums(self) -> dict[str, str]:
        """sha256 of every tensor that the model computes with, by Hugging Face name.

        A held tensor that equals its published one in every value has the published checksum:
        reading a packed weight cannot tell 0.0 from -0.0.
        """
        transfer: FileTransfer = self.weight_transfer_engine
        held = HeldWeights(self.model_runner.get_model(), transfer.expected)
        checksums = {name: held.read(name) for name in transfer.expected}
        published: dict[str, torch.Tensor] = {}
        for path in transfer.paths:
            if path.is_file():
                published |= read_tensors(path)
        return {
            name: tensor_sha256(
                published[name]
                if name in published and torch.equal(published[name], tensor.cpu())
                else tensor
            )
            for name, tensor in checksums.items()
        }
