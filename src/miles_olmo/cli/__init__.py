"""The `miles` command: parse, call the API, print."""

from miles_olmo.cli.main import main

__all__ = ["main"]
