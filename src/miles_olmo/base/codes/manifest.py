"""Codes of reading a manifest: syntax, keys, types (E0xx)."""

from miles_olmo.base.codes.entry import EXIT_MANIFEST, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E001",
        title="not valid TOML",
        cause="The text does not follow TOML's grammar, or defines a key twice.",
        example="[rollout]\ntemperature =",
        fix="Correct the text at the line and column named; https://toml.io describes the format.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E002",
        title="manifest cannot be read",
        cause="The file is not there, is a directory, may not be read, or is not UTF-8.",
        example="miles plan manifests/quickstat.toml",
        fix="Name a readable TOML file.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E003",
        title="unknown key",
        cause="A table has a key that the manifest format does not know. A typo would otherwise "
        "silently leave the default in place.",
        example="[rollout]\ntempreature = 0.7",
        fix="Use the suggested key, move the key to the table it belongs to, or remove it.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E004",
        title="missing key",
        cause="A key or section without a default is not there.",
        example="[train]                      # no steps",
        fix="Add it; docs/reference/manifest.md lists every key.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E005",
        title="wrong type",
        cause="A value has another type than its key takes. Nothing is converted: "
        'true is not 1, and "8" is not 8.',
        example='[train]\nsteps = "300"',
        fix="Write the value in the type that the message names.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E006",
        title="not one of the choices",
        cause="A key accepts a few values, and this is none of them.",
        example='[engines]\nkind = "vlm"',
        fix="Choose one of the values that the message lists.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E007",
        title="value out of range",
        cause="The value has the right type but lies outside of what its key accepts.",
        example="[rollout]\nprompts_per_step = 0",
        fix="Set a value within the range that the message names.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E008",
        title="secret in the manifest",
        cause="A key is named like a secret. Manifests are copied into plans and receipts, which "
        "others may read, so secrets are refused; the value is never printed.",
        example='[engines]\napi_key = "..."',
        fix="Remove the key, pass the secret through the environment, and replace it if the file "
        "was shared.",
        exit_code=EXIT_MANIFEST,
    ),
)
