"""Codes of training: loss, packing, replay, warm-up (E3xx)."""

from miles_olmo.base.codes.entry import Code

ENTRIES: tuple[Code, ...] = ()
