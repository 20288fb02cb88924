"""Codes of the command line and the environment (E6xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
