"""Keys and values that look like secrets: never printed, and never accepted."""

from __future__ import annotations

import os
import re
from functools import cache

from miles_olmo.manifest.fields import all_keys

_SECRET = re.compile(
    r"(^|[_-])(token|key|secret|password|passwd|passphrase|credential|auth)s?$", re.IGNORECASE
)

_SHORTEST = 8


def looks_secret(name: str) -> bool:
    """Whether a key is named like a secret and is none of the manifest's own (`eos_token` is one)."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_SECRET.search(words) or "apikey" in name.lower()) and name not in _own_names()


def environment_secrets() -> dict[str, str]:
    """Values of this environment's variables that are named like secrets, by name.

    Short values are left out: they also occur by chance.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and _SECRET.search(name)
    }


@cache
def _own_names() -> frozenset[str]:
    return frozenset(path[-1] for path in all_keys())
