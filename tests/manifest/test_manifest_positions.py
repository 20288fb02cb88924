"""Every key path that tomli reads has the place where it was written."""

import re

import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.manifest.positions import find_positions

SCALARS = [
    "1",
    "-3.5e-4",
    "true",
    "inf",
    "0x1F",
    "1979-05-27 07:32:00",
    '"a#b=]},"',
    "'x}[ '",
    '"quote \\" and \\\\"',
    '"""several\nlines "" # not a comment\n[not.a.table]"""',
    '"""ends in quotes"""""',
    "'''it's\n[raw]'''",
    '""',
]
KEYS = ["a", "b", "c-1", "D_2", "3", '"quo ted"', "'lit.eral'", '"a"', '"é\\t"']


def arrays(values):
    separators = st.sampled_from([", ", ",", ",\n  # comment ] }\n  ", " , "])
    return st.builds(
        lambda items, separator, last: "[" + separator.join(items) + (last if items else "") + "]",
        st.lists(values, max_size=3),
        separators,
        st.sampled_from(["", ",", "\n", " , # end\n"]),
    )


def inline_tables(values):
    pairs = st.lists(
        st.tuples(st.sampled_from(KEYS), values), max_size=3, unique_by=lambda pair: pair[0]
    )
    return pairs.map(lambda items: "{" + ", ".join(f"{k} = {v}" for k, v in items) + "}")


values = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(arrays(inner), inline_tables(inner)),
    max_leaves=6,
)
dotted_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).flatmap(
    lambda parts: st.sampled_from([".", " . ", ". "]).map(lambda dot: dot.join(parts))
)
pieces = st.one_of(
    st.builds("{}{} = {}\n".format, st.sampled_from(["", "  ", "\t"]), dotted_keys, values),
    st.builds("[{}]\n".format, dotted_keys),
    st.builds("[ {} ]  # [c]\n".format, dotted_keys),
    st.builds("[[{}]]\n".format, dotted_keys),
    st.sampled_from(["\n", "# comment = [\n", "   \n"]),
)


def valid_document(parts):
    """The longest document that adds each part which leaves it valid."""
    text = ""
    for part in parts:
        try:
            tomli.loads(text + part)
        except tomli.TOMLDecodeError:
            continue
        text += part
    return text


documents = st.lists(pieces, max_size=14).map(valid_document)


def paths(value, path=()):
    if path:
        yield path
    children = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    for key, inner in children:
        yield from paths(inner, (*path, key))


@settings(max_examples=400, deadline=None)
@given(text=documents, windows=st.booleans())
def test_every_key_path_has_the_place_of_its_key(text, windows):
    if windows:
        text = text.replace("\n", "\r\n")
    document = tomli.loads(text)
    positions = find_positions(text, "f.toml")
    lines = text.replace("\r\n", "\n").split("\n")
    expected = set(paths(document))
    assert set(positions._places) == expected
    for path in expected:
        place = positions.where(path)
        rest = lines[place.line - 1][place.column - 1 :]
        if isinstance(path[-1], str):
            key = re.match(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*'""", rest)
            assert key is not None
            assert tomli.loads(f"{key[0]} = 0") == {path[-1]: 0}
        else:
            assert rest[:1] not in ("", " ", ",", "\t", "#", "]")


def test_the_nearest_table_stands_in_for_a_key_that_is_not_there():
    positions = find_positions("x = 1\n\n  [train.optimizer]\nbetas = [0.9,\n  0.5]\n", "f.toml")
    assert positions.where(("train", "optimizer", "eps")).line == 3
    assert positions.where(("train", "optimizer")).column == 10
    assert positions.where(("train", "optimizer", "betas", 1)).line == 5
    assert (positions.where(("y",)).line, positions.where(("y",)).column) == (1, 1)
