"""Did-you-mean."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, or None when none is near."""
    import difflib  # slow to import, and needed only when something is already wrong

    by_folded = {option.casefold(): option for option in options}
    near = difflib.get_close_matches(word.casefold(), list(by_folded), n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A fix clause: the nearest option if one is near, else all of them."""
    options = list(options)
    near = closest(word, options)
    if near is not None:
        return f"did you mean '{near}'?"
    return "use one of " + ", ".join(f"'{option}'" for option in options)
