from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.auth import BearerAuth
from miles_olmo.rollout.registry import EngineEntry, clear_registry, read_registry, register

ENTRY = EngineEntry(3, "http://127.0.0.1:4000", 77, 1, "2026-01-01T00:00:00Z")


def test_an_entry_comes_back_as_written_and_a_restart_replaces_it(tmp_path: Path):
    assert read_registry(tmp_path / "engines") == {}
    assert register(tmp_path / "engines", ENTRY).name == "engine-3.json"
    other = EngineEntry(0, "http://[::1]:1", 78, 1, "t")
    register(tmp_path / "engines", other)
    assert list(read_registry(tmp_path / "engines").items()) == [(0, other), (3, ENTRY)]
    again = EngineEntry(3, "http://127.0.0.1:4001", 79, 2, "t")
    register(tmp_path / "engines", again)
    assert read_registry(tmp_path / "engines")[3] == again


def test_a_half_written_temporary_file_is_not_an_entry(tmp_path: Path):
    register(tmp_path, ENTRY)
    (tmp_path / ".engine-4.json.99.tmp").write_text("{")
    assert list(read_registry(tmp_path)) == [3]


def test_clearing_forgets_engines_of_an_earlier_attempt(tmp_path: Path):
    clear_registry(tmp_path / "absent")
    register(tmp_path, ENTRY)
    (tmp_path / "notes.txt").write_text("kept")
    clear_registry(tmp_path)
    assert read_registry(tmp_path) == {} and (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"index": 3, "url": "ftp://x", "pid": 1, "attempt": 1, "started_at": "t"}),
        json.dumps({"index": 4, "url": "http://x", "pid": 1, "attempt": 1, "started_at": "t"}),
        json.dumps({"index": 3, "url": "http://x", "pid": "1", "attempt": 1, "started_at": "t"}),
    ],
)
def test_a_broken_entry_is_named(tmp_path: Path, content: str):
    (tmp_path / "engine-3.json").write_text(content)
    with pytest.raises(EngineError, match=r"E227.*engine-3\.json"):
        read_registry(tmp_path)


async def _inner(scope, receive, send):
    scope["reached"] = True


def _reached(auth: BearerAuth, scope: dict) -> tuple[bool, list[dict]]:
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    asyncio.run(auth(scope, receive, send))
    return bool(scope.get("reached")), sent


def test_the_middleware_reads_the_token_from_its_file(tmp_path: Path, monkeypatch):
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    token_file.chmod(0o600)
    monkeypatch.setenv("MILES_RUN_TOKEN_FILE", str(token_file))
    auth = BearerAuth(_inner)  # as vLLM makes it
    scope = {"type": "http", "method": "POST", "path": "/collective_rpc"}
    good = [(b"authorization", b"Bearer secret")]
    assert _reached(auth, {**scope, "headers": good})[0]
    reached, sent = _reached(auth, {**scope, "headers": []})
    assert not reached and sent[0]["status"] == 401
    assert _reached(auth, {"type": "lifespan"})[0]


def test_a_websocket_without_the_token_is_closed():
    auth = BearerAuth(_inner, "secret")
    scope = {"type": "websocket", "path": "/health", "headers": []}
    reached, sent = _reached(auth, scope)
    assert not reached and sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize(
    ("content", "mode"), [(None, 0), ("", 0o600), ("  \n", 0o600), ("secret", 0o640), ("s", 0o604)]
)
def test_an_unusable_token_file_stops_the_engine(tmp_path: Path, monkeypatch, content, mode):
    token_file = tmp_path / "token"
    if content is not None:
        token_file.write_text(content)
        token_file.chmod(mode)
    monkeypatch.setenv("MILES_RUN_TOKEN_FILE", str(token_file))
    with pytest.raises(EngineError, match="E202") as caught:
        BearerAuth(_inner)
    assert "secret" not in str(caught.value)


def test_without_the_variable_there_is_no_token(monkeypatch):
    monkeypatch.delenv("MILES_RUN_TOKEN_FILE", raising=False)
    with pytest.raises(EngineError, match="E202"):
        BearerAuth(_inner)
