"""The subset of vLLM's HTTP protocol that the trainer speaks, and our two additions to it.

`GET /health` is open; every other endpoint needs `Authorization: Bearer <run token>`.
Ours beside vLLM's: `GET /weight_version` and `GET /weight_checksums`.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

HEALTH = "/health"
COMPLETIONS = "/v1/completions"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
INIT_WEIGHT_TRANSFER = "/init_weight_transfer_engine"
START_WEIGHT_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_WEIGHT_UPDATE = "/finish_weight_update"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
WEIGHT_VERSION = "/weight_version"
WEIGHT_CHECKSUMS = "/weight_checksums"

TOKEN_VARIABLE = "MILES_RUN_TOKEN_FILE"
"""Environment variable that names the 0600 file holding the run's token."""


def encode_routes(routes: np.ndarray) -> str:
    """Base64 of a `.npy` file: `[prompt + generated - 1, layers, top_k]`, uint8 or uint16."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, routes, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_routes(text: str) -> np.ndarray:
    """Inverse of `encode_routes`; never unpickles.

    Raises:
        ValueError: the text is not base64 of a plain `.npy` array.
    """
    import numpy as np

    try:
        raw = base64.b64decode(text, validate=True)
        return np.load(io.BytesIO(raw), allow_pickle=False)
    except (binascii.Error, EOFError, OSError, TypeError) as error:
        raise ValueError(f"routed_experts is not base64 of a .npy array: {error}") from error
