"""Codes of rollout engines and the fleet client (E2xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
