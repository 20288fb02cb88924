"""The catalogue of error codes and the code that raises them stay in step."""

from __future__ import annotations

import re
from pathlib import Path

import miles_olmo
from miles_olmo.base.codes import CODES

SOURCE = Path(miles_olmo.__file__).parent


def raised_codes() -> set[str]:
    files = [path for path in SOURCE.rglob("*.py") if "codes" not in path.relative_to(SOURCE).parts]
    return {code for path in files for code in re.findall(r'"(E\d{3})"', path.read_text())}


def test_every_code_that_is_raised_is_explained():
    assert raised_codes() <= set(CODES)


def test_every_code_that_is_explained_is_raised():
    assert set(CODES) <= raised_codes()


def test_every_explanation_is_complete():
    for code in CODES.values():
        assert re.fullmatch(r"E\d{3}", code.code)
        assert all((code.title, code.cause, code.example, code.fix))
        assert code.exit_code in (2, 3, 4, 5, 6, 7)
