"""Plain text for people."""

import os

import pytest

from miles_olmo.cli.terminal import columns, count, size, wants_color


@pytest.fixture
def terminal():
    """A stream that is a real terminal."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def test_colour_only_on_a_terminal_and_not_against_the_users_will(terminal, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(terminal)
    with (tmp_path / "file").open("w") as stream:
        assert not wants_color(stream)
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(terminal)


def test_columns_are_aligned_without_trailing_blanks():
    assert columns([("a", "1", ""), ("long", "22", "x")]) == ["  a     1", "  long  22  x"]
    assert columns([]) == []


def test_numbers_read_well():
    assert [count(1, "step"), count(1200, "step"), count(2, "process", "processes")] == [
        "1 step",
        "1,200 steps",
        "2 processes",
    ]
    shown = [size(n) for n in (0, 999, 1000, 12_370_944, 999_960, 5 * 10**15)]
    assert shown == ["0 B", "999 B", "1.0 kB", "12.4 MB", "1.0 MB", "5000.0 TB"]
