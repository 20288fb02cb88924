"""Codes of checkpoints, publication and export (E4xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
