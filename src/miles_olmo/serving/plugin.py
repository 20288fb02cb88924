"""What vLLM loads through the `vllm.general_plugins` entry point, in every one of its processes."""

from __future__ import annotations

from miles_olmo.base.lifeline import watch_starter

FILES_BACKEND = "miles-files"
"""Name of the weight-transfer backend of `miles_olmo.serving.weights`."""


def register() -> None:
    """Make olmo3moe and the file transfer known to vLLM, and tie each process to the engine job.

    vLLM calls this once in each of its processes; a second call does no harm.
    """
    watch_starter()
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from miles_olmo.serving.config import Olmo3MoeConfig

    AutoConfig.register(Olmo3MoeConfig.model_type, Olmo3MoeConfig, exist_ok=True)
    # By name: the class imports CUDA-touching modules that a registry query must not.
    ModelRegistry.register_model(
        "Olmo3MoeForCausalLM", "miles_olmo.serving.olmo3moe:Olmo3MoeForCausalLM"
    )
    if FILES_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            FILES_BACKEND, "miles_olmo.serving.weights", "FileTransfer"
        )
