"""Make the files that `[data.prepare]` asks for.

`prepare.json` is written last and says what the files are: parameters and sha256. Files that are there and
intact are not made again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.errors import InputError
from miles_olmo.base.files import write_atomic, write_json
from miles_olmo.manifest.models import Data
from miles_olmo.tasks import reversed_digits

RECORD_NAME = "prepare.json"
RECORD_SCHEMA = "miles-olmo/prepare/v1"


def prepared_files(data: Data) -> dict[str, str]:
    """File name by manifest key, for the files that the generator makes."""
    files = {"data.train": data.train, "data.tokenizer": data.tokenizer}
    if data.evaluation is not None:
        files["data.evaluation"] = data.evaluation
    return files


def prepare_data(data: Data, directory: Path) -> dict[str, str]:
    """Make the data set of `data.prepare` in a directory; equal parameters give equal bytes.

    Args:
        data: The manifest's [data]; its `prepare` says what to make, its paths are the file names.
        directory: Made if it is not there.

    Returns:
        sha256 by manifest key, e.g. `{"data.train": "9f..."}`.

    Raises:
        InputError: E137, a file of that name is there and was not made by this function.
    """
    assert data.prepare is not None, "the manifest has no [data.prepare]"
    files = prepared_files(data)
    record = _read_record(directory)
    parameters = data.prepare.model_dump(mode="json")
    if (
        record is not None
        and record["parameters"] == parameters
        and _intact(record, files, directory)
    ):
        return {key: entry["sha256"] for key, entry in record["files"].items()}

    contents = _make(data)
    if record is None:
        _refuse_to_overwrite(files, contents, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for key, name in files.items():
        write_atomic(directory / name, contents[key])
    hashes = {key: hashlib.sha256(contents[key]).hexdigest() for key in files}
    write_json(
        directory / RECORD_NAME,
        {
            "schema": RECORD_SCHEMA,
            "parameters": parameters,
            "files": {key: {"name": files[key], "sha256": hashes[key]} for key in files},
        },
    )
    return hashes


def _make(data: Data) -> dict[str, bytes]:
    assert data.prepare is not None
    train, evaluation = reversed_digits.data_files(data.prepare)
    return {
        "data.train": train,
        "data.evaluation": evaluation,
        "data.tokenizer": reversed_digits.tokenizer_json(),
    }


def _read_record(directory: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((directory / RECORD_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    usable = isinstance(record, dict) and record.get("schema") == RECORD_SCHEMA
    return record if usable else None


def _intact(record: dict[str, Any], files: dict[str, str], directory: Path) -> bool:
    if {key: entry["name"] for key, entry in record["files"].items()} != files:
        return False
    return all(
        (directory / entry["name"]).is_file()
        and file_sha256(directory / entry["name"]) == entry["sha256"]
        for entry in record["files"].values()
    )


def _refuse_to_overwrite(
    files: dict[str, str], contents: dict[str, bytes], directory: Path
) -> None:
    """A file left by an interrupted call has the very bytes that this one would write."""
    for key, name in files.items():
        path = directory / name
        if path.exists() and not (path.is_file() and path.read_bytes() == contents[key]):
            raise InputError(
                "E137",
                f"{path} is already there",
                why="it was not made by 'miles prepare' and would be overwritten",
                fix="choose another directory or move the file away",
            )
