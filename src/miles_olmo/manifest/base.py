"""The base of every manifest section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the manifest: frozen, unknown keys refused, values never echoed in errors.

    The docstring under each field is its documentation: `docs/reference/manifest.md` is generated
    from these.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, defer_build=True
    )
