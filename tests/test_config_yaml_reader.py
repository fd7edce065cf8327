"""The strict YAML reader: YAML 1.2 scalars, duplicate keys, lines, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.config.yaml_reader import read_document, read_value, write_document
from ebft_core.errors import UserError

# The examples of the YAML 1.2.2 specification, section 10.3.2 (core schema), and the traps of YAML 1.1.
SCALARS = {
    "1e-5": 1e-5,
    "1.0e-6": 1e-6,
    "1E+3": 1000.0,
    "-2.e1": -20.0,
    ".5": 0.5,
    "0.": 0.0,
    "-0.0": -0.0,
    "12e03": 12000.0,
    "+.inf": math.inf,
    "-.INF": -math.inf,
    "0": 0,
    "-19": -19,
    "010": 10,
    "0o7": 7,
    "0x3A": 58,
    "true": True,
    "FALSE": False,
    "null": None,
    "~": None,
    "": None,
    "yes": "yes",
    "no": "no",
    "on": "on",
    "12:30:45": "12:30:45",
    "2026-11-20": "2026-11-20",
    "1_000": "1_000",
    "'8'": "8",
    '"1e-5"': "1e-5",
    "e5": "e5",
    ".": ".",
    "[0.25, 1]": [0.25, 1],
    "{a: b}": {"a": "b"},
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    result = read_value(text, "--set x")
    assert result == value
    assert type(result) is type(value)


def test_nan_is_read_as_a_number() -> None:
    assert math.isnan(read_value(".nan", "x"))


def test_lines_point_at_keys_and_items() -> None:
    text = (
        "# note\nmodel:\n  name_or_path: x\ndata:\n  sources:\n  - path: a\n  - {path: b,\n     split: c}\n"
    )
    lines = read_document(text, "f.yaml").lines
    assert lines == {
        ("model",): 2,
        ("model", "name_or_path"): 3,
        ("data",): 4,
        ("data", "sources"): 5,
        ("data", "sources", 0): 6,
        ("data", "sources", 0, "path"): 6,
        ("data", "sources", 1): 7,
        ("data", "sources", 1, "path"): 7,
        ("data", "sources", 1, "split"): 8,
    }


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3", "the key `a` stands twice"),
        ("e:\n  s: 1\n  s: 2\n", "f.yaml:3", "the key `s` stands twice"),
        ("l:\n- {x: 1, y: 2, x: 3}\n", "f.yaml:2", "the key `x` stands twice"),
        ("'a': 1\na: 2\n", "f.yaml:2", "the key `a` stands twice"),
        ("a: 1\n  b: 2\n", "f.yaml:2", "not valid YAML"),
        ("a:\n\tb: 1\n", "f.yaml:2", "not valid YAML"),
        ("a: [1, 2\n", "f.yaml:2", "not valid YAML"),
        ("a: *missing\n", "f.yaml:1", "undefined alias"),
        ("path: *.py\n", "f.yaml:1", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2", "several YAML documents"),
        ("a: !!python/object/apply:os.system [ls]\n", "f.yaml:1", "tags"),
        ("a: !!binary aGk=\n", "f.yaml:1", "tags"),
        ("a: !!set {x}\n", "f.yaml:1", "tags"),
        ("base: &b {x: 1}\nc:\n  <<: *b\n", "f.yaml:3", "merge keys"),
        ("1: x\n", "f.yaml:1", "not text"),
        ("? [a]\n: x\n", "f.yaml:1", "not text"),
        ("a: &a [*a]\n", "f.yaml:1", "too deep"),
        ("a: " + "[" * 3000 + "\n", "f.yaml", "nested too deeply"),
        (f"a: {'9' * 5000}\n", "f.yaml:1", "too many digits"),
        ("", "f.yaml", "empty"),
        ("# nothing\n", "f.yaml", "empty"),
        ("- a\n", "f.yaml", "not a mapping"),
        ("text\n", "f.yaml", "not a mapping"),
        ("a: \x00\n", "f.yaml (character 3)", "character"),
    ],
)
def test_bad_yaml_is_an_error_with_its_line(text: str, where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        read_document(text, "f.yaml")
    assert caught.value.where == where
    assert what in caught.value.what


def test_a_duplicate_key_names_both_lines() -> None:
    with pytest.raises(UserError, match="the other is on line 2"):
        read_document("a:\n  b: 1\n  c: 2\n  b: 3\n", "f.yaml")


def test_exponential_aliases_are_refused() -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    with pytest.raises(UserError, match="too large"):
        read_document(laughs, "f.yaml")


def test_aliases_repeat_a_value() -> None:
    assert read_document("a: &x [1, 2]\nb: *x\n", "f").data == {"a": [1, 2], "b": [1, 2]}


def test_syntax_errors_do_not_show_the_text() -> None:
    with pytest.raises(UserError) as caught:
        read_document("password: hunter2: oops\n", "f.yaml")
    assert "hunter2" not in caught.value.render()


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
)
_tricky = st.sampled_from(
    ["1e-5", "yes", "on", "0o7", "010", "~", "", "1:30", "2026-01-01", "<<", "=", "a: b", "#"]
)
_trees = st.recursive(
    _scalars | _tricky,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1) | _tricky, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1), _trees, min_size=1, max_size=5))
def test_what_is_written_reads_back_equal(data: dict[str, object]) -> None:
    text = write_document(data)
    assert json.dumps(read_document(text, "f").data) == json.dumps(data)


@given(st.dictionaries(st.sampled_from("abc"), _tricky, min_size=1))
def test_a_yaml_1_1_reader_sees_the_same_text(data: dict[str, str]) -> None:
    assert yaml.safe_load(write_document(data)) == data
