"""Codes of checks of a plan and its inputs (E1xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
