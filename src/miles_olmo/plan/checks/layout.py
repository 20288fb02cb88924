"""Checks of what runs where."""

from __future__ import annotations

from collections.abc import Iterator

from miles_olmo.manifest.models import Manifest
from miles_olmo.plan.checks.finding import Check, Finding


def trainer_parallelism(m: Manifest) -> Iterator[Finding]:
    parallel = m.train.parallel
    for name in ("tensor", "pipeline", "context"):
        degree = getattr(parallel, name)
        if degree > 1:
            yield Finding(
                "E104",
                (f"train.parallel.{name}",),
                f"{name} = {degree} in [train.parallel]",
                "replayed routes cover whole sequences on whole layers, so the trainer "
                "is spread over data and experts only",
                f"set {name} = 1",
            )
    num_experts = m.model.shape.num_experts
    if num_experts % parallel.expert:
        divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        yield Finding(
            "E108",
            ("train.parallel.expert", "model.shape.num_experts"),
            f"expert = {parallel.expert} does not divide num_experts = {num_experts}",
            "each of these processes holds the same number of experts",
            f"set expert to one of {', '.join(map(str, divisors))}",
        )


def packs(m: Manifest) -> Iterator[Finding]:
    count = m.train.packing.packs_per_microbatch
    if count > 1:
        yield Finding(
            "E105",
            ("train.packing.packs_per_microbatch",),
            f"packs_per_microbatch = {count}",
            "a microbatch is one pack: documents are isolated inside one row",
            "set packs_per_microbatch = 1 and raise train.packing.max_tokens",
        )


def engines(m: Manifest) -> Iterator[Finding]:
    engines = m.engines
    if engines.tensor_parallel > 1:
        yield Finding(
            "E106",
            ("engines.tensor_parallel",),
            f"tensor_parallel = {engines.tensor_parallel} in [engines]",
            "an engine records the routes of the whole model in one process",
            "set tensor_parallel = 1 and raise engines.count",
        )
    if engines.colocate == "offload":
        yield Finding(
            "E107",
            ("engines.colocate",),
            "colocate = 'offload'",
            "publication and health checks need trainer and engines in memory at the same time",
            "set colocate = 'none'",
        )
    on_gpus = m.launch.device == "cuda"
    if on_gpus and engines.kind == "core":
        yield Finding(
            "E146",
            ("engines.kind", "launch.device"),
            "kind = 'core' in [engines] with device = 'cuda' in [launch]",
            "the embedded engine decodes on a CPU",
            "set kind = 'vllm'",
        )
    if engines.colocate == "resident" and not on_gpus:
        yield Finding(
            "E147",
            ("engines.colocate", "launch.device"),
            "colocate = 'resident' with device = 'cpu' in [launch]",
            "there is no GPU to share",
            "leave colocate out, or set device = 'cuda' in [launch]",
        )


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""head_dim that vLLM's attention has a CPU kernel for (vLLM 0.30)."""
CPU_EXPERT_ALIGNMENT = 32
"""vLLM's expert kernel works on a CPU in steps of this many columns."""


def vllm_kernels(m: Manifest) -> Iterator[Finding]:
    """What vLLM on a CPU can compute."""
    if m.engines.kind != "vllm" or m.launch.device != "cpu":
        return
    shape = m.model.shape
    if shape.head_dim not in CPU_HEAD_SIZES:
        yield Finding(
            "E109",
            ("engines.kind", "model.shape.head_dim"),
            f"head_dim = {shape.head_dim} with kind = 'vllm'",
            f"vLLM's attention runs on a CPU with head_dim {', '.join(map(str, CPU_HEAD_SIZES))}",
            "choose one of these, or set kind = 'core' in [engines]",
        )
    for name in ("hidden_size", "expert_hidden_size"):
        width = getattr(shape, name)
        if width % CPU_EXPERT_ALIGNMENT:
            up = -(-width // CPU_EXPERT_ALIGNMENT) * CPU_EXPERT_ALIGNMENT
            yield Finding(
                "E109",
                ("engines.kind", f"model.shape.{name}"),
                f"{name} = {width} with kind = 'vllm'",
                f"vLLM's expert kernel needs multiples of {CPU_EXPERT_ALIGNMENT} on a CPU",
                f"set {name} = {up}, or kind = 'core' in [engines]",
            )


LAYOUT_CHECKS: tuple[Check, ...] = (trainer_parallelism, packs, engines, vllm_kernels)
