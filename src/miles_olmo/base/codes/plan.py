"""Codes of checks of a plan and its inputs (E1xx)."""

from miles_olmo.base.codes import inputs

ENTRIES = (*inputs.ENTRIES,)
