"""A small real `EngineModel`: a bigram language model whose weights are two tables.

It samples, routes, batches, aborts and loads safetensors for real; what tests script is its timing
(`step_seconds`, `gate`) and its faults (`fail_at_step`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from miles_olmo.base.errors import EngineError
from miles_olmo.base.files import write_json
from miles_olmo.rollout.answers import PolicyShape
from miles_olmo.wire.generation import SampledSequence, SamplingRequest
from miles_olmo.wire.publication import MANIFEST_NAME, Publication, PublishedTensor

VOCAB, LAYERS, EXPERTS, TOP_K, MAX_TOKENS = 32, 2, 8, 2, 64
SHAPE = PolicyShape(vocab_size=VOCAB, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS)


def table_weights(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "bigram.weight": random.normal(size=(VOCAB, VOCAB)).astype(np.float32),
        "router.weight": random.normal(size=(LAYERS, VOCAB, EXPERTS)).astype(np.float32),
    }


def checksum(tensor: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()


def write_publication(root: Path, version: int, seed: int | None = None) -> Publication:
    """Two files, one tensor each, with the manifest."""
    directory = root / f"v{version:06d}"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = []
    for number, (name, tensor) in enumerate(table_weights(seed or version).items(), 1):
        file = f"weights-{number:05d}.safetensors"
        save_file({name: tensor}, directory / file)
        tensors.append(PublishedTensor(name, "F32", tensor.shape, checksum(tensor), file))
    publication = Publication(version, str(directory), tuple(tensors))
    write_json(directory / MANIFEST_NAME, publication.as_json())
    return Publication.read(directory)


@dataclass
class _Running:
    request: SamplingRequest
    random: np.random.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def inputs(self) -> list[int]:
        return [*self.request.prompt_ids, *self.ids]


class TableModel:
    def __init__(
        self,
        *,
        max_batch_size: int = 64,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
    ) -> None:
        self._weights = table_weights(0)
        self._running: dict[str, _Running] = {}
        self._max_batch_size = max_batch_size
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self.gate = threading.Event()
        """Steps wait for it, so that a test can hold sequences half sampled."""
        self.gate.set()
        self.num_steps = 0
        self.num_cache_drops = 0
        self.threads: set[int] = set()

    def add(self, key: str, request: SamplingRequest) -> None:
        assert key not in self._running
        self._running[key] = _Running(request, np.random.default_rng(request.seed))

    def step(self) -> Sequence[tuple[str, SampledSequence]]:
        self.gate.wait(20)
        time.sleep(self._step_seconds)
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        if self.num_steps == self._fail_at_step:
            raise RuntimeError("scripted fault in the model")
        finished = []
        for key in list(self._running)[: self._max_batch_size]:
            reason = self._advance(self._running[key])
            if reason:
                finished.append((key, self._sequence(self._running.pop(key), reason)))
        return finished

    def abort(self, key: str) -> SampledSequence | None:
        running = self._running.pop(key)
        return self._sequence(running, "abort") if running.ids else None

    def drop_cache(self) -> None:
        self.num_cache_drops += 1

    def load_weights(self, paths: Sequence[str], checksums: Mapping[str, str]) -> None:
        loaded: dict[str, np.ndarray] = {}
        for path in paths:
            loaded.update(load_file(path))
        for name, tensor in loaded.items():
            if name not in self._weights or tensor.shape != self._weights[name].shape:
                raise EngineError("E209", f"{name} does not fit", why="", fix="")
            if not np.isfinite(tensor).all() or checksum(tensor) != checksums[name]:
                raise EngineError("E209", f"{name} is not what its checksum says", why="", fix="")
        if loaded.keys() != self._weights.keys():
            raise EngineError("E209", "tensors are missing", why="", fix="")
        self._weights = loaded

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self._weights.items()}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def _advance(self, running: _Running) -> str | None:
        request = running.request
        logits = self._weights["bigram.weight"][running.inputs[-1]].astype(np.float64)
        logits = logits / (request.temperature or 1.0)
        logprobs = logits - np.log(np.exp(logits).sum())
        if request.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(running.random.choice(VOCAB, p=np.exp(logprobs)))
        running.ids.append(token)
        running.logprobs.append(float(logprobs[token]))
        if not request.ignore_stop and token in request.stop_token_ids:
            return "stop"
        return "length" if len(running.ids) == request.max_tokens else None

    def _sequence(self, running: _Running, reason) -> SampledSequence:
        scores = self._weights["router.weight"][:, running.inputs[:-1]]  # [L, R, E]
        routes = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K].transpose(1, 0, 2)
        return SampledSequence(
            tuple(running.ids), tuple(running.logprobs), routes.astype(np.uint8), reason
        )


def sample_alone(request: SamplingRequest, weights_seed: int) -> SampledSequence:
    """What a request must yield, whoever serves it: no server, no batch."""
    model = TableModel()
    model._weights = table_weights(weights_seed)
    model.add("only", request)
    while True:
        for _, sequence in model.step():
            return sequence
