"""An engine process whose model costs nothing, to measure HTTP: `instant_engine.py REGISTRY`.

All sequences end in the step after they were queued, with fixed tokens and routes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from table_model import MAX_TOKENS, SHAPE, TableModel

from miles_olmo.rollout.auth import read_token
from miles_olmo.rollout.core_completions import EngineLimits
from miles_olmo.rollout.core_server import serve_engine
from miles_olmo.rollout.registry import EngineEntry, register
from miles_olmo.wire.generation import SampledSequence, SamplingRequest


class InstantModel(TableModel):
    """Answers any request with the answer to a first one of the same lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: dict[str, SamplingRequest] = {}
        self._known: dict[tuple[int, int], SampledSequence] = {}

    def add(self, key: str, request: SamplingRequest) -> None:
        self._queue[key] = request

    def step(self):
        finished = [(key, self._answer(request)) for key, request in self._queue.items()]
        self._queue.clear()
        return finished

    def _answer(self, request: SamplingRequest) -> SampledSequence:
        lengths = (len(request.prompt_ids), request.max_tokens)
        if lengths not in self._known:
            model = TableModel()
            model.add("", request)
            while not (finished := model.step()):
                pass
            self._known[lengths] = finished[0][1]
        return self._known[lengths]


def main() -> None:
    def on_bound(url: str) -> None:
        register(Path(sys.argv[1]), EngineEntry(0, url, os.getpid(), 1, "now"))

    limits = EngineLimits(SHAPE.vocab_size, MAX_TOKENS)
    serve_engine(InstantModel(), token=read_token(), on_bound=on_bound, limits=limits)


if __name__ == "__main__":
    main()
