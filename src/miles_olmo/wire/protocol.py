"""The subset of vLLM's HTTP protocol that the trainer speaks, and our additions to it.

`GET /health` is open; every other endpoint needs `Authorization: Bearer <run token>`.
Ours beside vLLM's: `GET /weight_version`, `GET /weight_checksums` and, of vLLM engines, `GET /engine`.
"""

from __future__ import annotations

import base64
import binascii
import io
from functools import lru_cache
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
ENGINE = "/engine"

TOKEN_VARIABLE = "MILES_RUN_TOKEN_FILE"
"""Environment variable that names the 0600 file holding the run's token."""

RANK_SUFFIX = "-rank-"
"""Process r > 0 of a job is called `<job>-rank-<r>`; process 0 has the job's own name."""

SUPPORTED_VLLM = ((0, 26), (0, 31))
"""vLLM releases from the first to below the second."""


def release_number(version: str) -> tuple[int, ...]:
    """Major and minor number of a version; empty when it does not start with two numbers."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(p.isdigit() for p in parts) else ()


def encode_routes(routes: np.ndarray) -> str:
    """Base64 of a `.npy` file: `[prompt + generated - 1, layers, top_k]`, uint8 or uint16."""
    header = _npy_header(routes.dtype.str, routes.shape)
    return base64.b64encode(header + routes.tobytes()).decode("ascii")  # tobytes: C order


def decode_routes(text: str) -> np.ndarray:
    """Inverse of `encode_routes`, read-only; never unpickles.

    Raises:
        ValueError: the text is not base64 of a plain `.npy` array in C order.
    """
    import numpy as np

    try:
        raw = base64.b64decode(text, validate=True)
        end = 10 + int.from_bytes(raw[8:10], "little")
        dtype, shape = _parse_npy_header(raw[:end])
        return np.frombuffer(raw, dtype, offset=end).reshape(shape)
    except (binascii.Error, EOFError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"routed_experts is not base64 of a .npy array: {error}") from error


# numpy writes a header by formatting and reads it by compiling Python, which takes ten times as
# long as the rest; the answers of one run have few different headers.
@lru_cache(maxsize=4096)
def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    from numpy.lib import format as npy

    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


@lru_cache(maxsize=4096)
def _parse_npy_header(header: bytes) -> tuple[np.dtype, tuple[int, ...]]:
    from numpy.lib import format as npy

    buffer = io.BytesIO(header)
    if npy.read_magic(buffer) != (1, 0):
        raise ValueError("not version 1.0 of the format")
    shape, fortran_order, dtype = npy.read_array_header_1_0(buffer)
    if dtype.hasobject or (fortran_order and len(shape) > 1):
        raise ValueError("an array of objects or in Fortran order")
    return dtype, shape
