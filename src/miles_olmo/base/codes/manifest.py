"""Codes of reading a manifest: syntax, keys, types (E0xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
