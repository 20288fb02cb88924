"""The reference pages say what the code says."""

import importlib.util
from pathlib import Path

import pytest

from miles_olmo.manifest.describe import describe_manifest
from miles_olmo.manifest.fields import all_keys
from miles_olmo.manifest.models import Manifest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_is_documented_with_type_and_default():
    described = {
        (*filter(None, section.table.split(".")), field.name): field
        for section in describe_manifest()
        for field in section.fields
    }
    assert set(described) == all_keys()
    assert all(field.text.endswith(".") and field.type for field in described.values())
    assert described["train", "steps"].default == "required"
    assert described["algorithm", "clip", "low"].default == "`0.2`"
    assert described["algorithm", "clip", "dual"].type == "number > 1"
    assert described["train", "optimizer", "betas"].type == "list of 2: number >= 0, < 1"


def test_documented_defaults_are_the_defaults(quickstart):
    import tomli

    shown = {
        (*section.table.split("."), field.name): tomli.loads(f"x = {field.default.strip('`')}")["x"]
        for section in describe_manifest()
        for field in section.fields
        if field.default.startswith("`")
    }
    document = tomli.loads(quickstart.read_text())
    manifest = Manifest.model_validate(document)
    for path, default in shown.items():
        written = document
        for part in filter(None, path):
            written = written.get(part, {}) if isinstance(written, dict) else {}
        value = manifest.model_dump(mode="json")
        for part in filter(None, path):
            value = value[part]
        if written == {}:
            assert value == default, path


@pytest.mark.parametrize("page", ["manifest.md", "errors.md", "cli.md", "metrics.md"])
def test_the_pages_in_the_repository_are_current(generator, page):
    assert (DOCS / "reference" / page).read_text() == generator.PAGES[page]()


def test_the_command_line_page_shows_each_commands_options(generator):
    page = generator.cli_page(["plan", "explain"])
    assert "## miles plan" in page
    assert "--set KEY=VALUE" in page
    assert str(Path.cwd()) not in page
