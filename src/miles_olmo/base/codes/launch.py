"""Codes of launching and supervising a run (E5xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
