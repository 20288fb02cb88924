"""An engine process: `table_engine.py REGISTRY INDEX ATTEMPT OPTIONS`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from table_model import MAX_TOKENS, VOCAB, TableModel

from miles_olmo.base.errors import MilesError
from miles_olmo.rollout.auth import read_token
from miles_olmo.rollout.core_completions import EngineLimits
from miles_olmo.rollout.core_server import serve_engine
from miles_olmo.rollout.registry import EngineEntry, register


def main() -> int:
    directory, index, attempt = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    port = options.pop("port", 0)

    def on_bound(url: str) -> None:
        register(directory, EngineEntry(index, url, os.getpid(), attempt, f"attempt {attempt}"))

    try:
        serve_engine(
            TableModel(**options),
            token=read_token(),
            port=port,
            on_bound=on_bound,
            limits=EngineLimits(vocab_size=VOCAB, max_sequence_tokens=MAX_TOKENS),
        )
    except MilesError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
