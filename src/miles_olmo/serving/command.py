"""The command line and environment of a vLLM server, from the manifest's settings. Pure functions."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from miles_olmo.manifest.models import Engines, Manifest
from miles_olmo.serving.gate import DIRECTORY_VARIABLE, SILENCE_VARIABLE
from miles_olmo.serving.plugin import FILES_BACKEND

SERVED_NAME = "policy"
"""Model name of requests."""

PLUGIN = "miles-olmo"
"""Our entry point in `vllm.general_plugins`; others stay out of an engine."""


SILENCE_SHARE = 0.75
"""Of engines.request_seconds: a step that takes longer leaves a request no time for its other steps,
and a restart begins before the first request is given up."""

VLLM_STEP_TOKENS = 2048
"""What vLLM itself takes on a CPU."""


@dataclass(frozen=True)
class ServerCommand:
    """How one server is started."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """Added to the job's own."""


def server_command(
    manifest: Manifest, served: Path, *, host: str, port: int, device: str = "cpu"
) -> ServerCommand:
    """The command that serves the policy of a manifest from the directory `served`.

    Args:
        device: "cpu" or "cuda".
    """
    model, engines = manifest.model, manifest.engines
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(served), "--served-model-name", SERVED_NAME),
        *("--host", host, "--port", str(port)),
        *("--load-format", "dummy"),  # weights come by publication
        *("--dtype", model.dtype, "--seed", str(manifest.seed)),
        *("--tensor-parallel-size", "1", "--max-num-seqs", str(engines.max_batch_size)),
        *("--max-model-len", str(model.shape.max_position_embeddings)),
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that was sampled
        *("--generation-config", "vllm"),  # no sampling defaults from the directory
        *("--weight-transfer-config", json.dumps({"backend": FILES_BACKEND})),
        *("--worker-extension-cls", "miles_olmo.serving.worker.WorkerExtension"),
        # The last one is the outermost: nothing is looked at before the token.
        *("--middleware", "miles_olmo.serving.gate.VersionGate"),
        *("--middleware", "miles_olmo.rollout.auth.BearerAuth"),
        "--disable-log-stats",
    ]
    if manifest.train.replay.enabled:
        argv.append("--enable-return-routed-experts")
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # the control endpoints; BearerAuth stands before them
        "VLLM_API_KEY": "",  # a user's own would be asked for behind ours, and no request has it
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "0",  # a server without an engine ends, and is replaced
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        DIRECTORY_VARIABLE: str(served),
        SILENCE_VARIABLE: str(SILENCE_SHARE * engines.request_seconds),
    }
    if device == "cpu":
        argv += ["--enforce-eager", "--no-enable-chunked-prefill"]  # see `step_tokens`
        argv += ["--max-num-batched-tokens", str(step_tokens(manifest))]
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib(manifest))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # launch.threads decides, not vLLM
    else:
        argv += ["--gpu-memory-utilization", str(gpu_memory_share(engines))]
    return ServerCommand(tuple(argv), environment)


def step_tokens(manifest: Manifest) -> int:
    """Most tokens that vLLM computes in one step on a CPU: any whole prompt, and one of each sequence.

    A prompt that does not fit beside others waits for the next step. In parts it would end the
    server: vLLM turns back the random numbers of a seeded request whose prompt goes on, and no
    generator of a CPU can.
    """
    longest = manifest.model.shape.max_position_embeddings
    return max(VLLM_STEP_TOKENS, longest, manifest.engines.max_batch_size)


def gpu_memory_share(engines: Engines) -> float:
    """Share of a GPU's memory that an engine takes: weights, activations, keys and values."""
    if engines.gpu_memory_utilization is not None:
        return engines.gpu_memory_utilization
    return 0.35 if engines.colocate == "resident" else 0.9


def kv_cache_gib(manifest: Manifest) -> int:
    """Whole GiB that hold keys and values of max_batch_size sequences of the longest length.

    vLLM hands memory out in blocks of 128 tokens on a CPU; a block too many per sequence is counted.
    """
    shape = manifest.model.shape
    tokens = manifest.rollout.max_prompt_tokens + manifest.rollout.max_response_tokens
    tokens = (math.ceil(tokens / 128) + 1) * 128
    width = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim
    item = 4 if manifest.model.dtype == "float32" else 2
    num_bytes = manifest.engines.max_batch_size * tokens * width * item
    return max(1, math.ceil(num_bytes / 2**30))
