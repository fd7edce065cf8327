"""`module:function` transforms: loading, signature, errors, and their place in the stage's key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebft_core.data.document import RowError
from ebft_core.data.transforms import get_transform
from ebft_core.data.transforms.custom import fingerprint_transform
from ebft_core.errors import UserError
from tests.data.builders import byte_tokenizer, data_config

MODULE = """
from ebft_core.data.document import RowError, TokenizedDocument

def upper(record, tokenizer, config):
    if record["n"] < 0:
        raise RowError("negative")
    ids = tokenizer(record["name"].upper()).input_ids
    return TokenizedDocument(ids, ids, [True] * len(ids))

def two(record, tokenizer):
    return None

def extra(record, tokenizer, config, mode):
    return None

def wrong(record, tokenizer, config):
    return [1, 2]

def crash(record, tokenizer, config):
    return record["absent"]

value = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_transform.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_transform", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_transform"


def test_a_function_beside_the_run_file_is_used(module: str) -> None:
    transform = get_transform(f"{module}:upper")
    good, bad = transform.tokenize(
        [{"name": "ab", "n": 1}, {"name": "cd", "n": -1}], byte_tokenizer(), data_config()
    )
    assert good.input_ids.tolist() == list(b"AB")
    assert isinstance(bad, RowError)
    assert str(bad) == "negative"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("two", "takes other arguments"),
        ("extra", "takes other arguments"),
        ("absent", "no such function"),
        ("value", "no such function"),
    ],
)
def test_a_function_that_cannot_be_one_is_refused(module: str, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        get_transform(f"{module}:{function}")
    assert caught.value.where == "data.transform"


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such_thing:f", "no such module"), ("my_broken:f", "does not import"), ("txt", "no such transform")],
)
def test_names_that_lead_nowhere(module: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_transform(name)


@pytest.mark.parametrize(("function", "message"), [("wrong", "returned list"), ("crash", "KeyError")])
def test_what_the_function_does_wrong_is_said(module: str, function: str, message: str) -> None:
    transform = get_transform(f"{module}:{function}")
    with pytest.raises(UserError, match=message):
        transform.tokenize([{"name": "x"}], byte_tokenizer(), data_config())


def test_editing_the_function_changes_its_fingerprint(module: str, tmp_path: Path) -> None:
    before = fingerprint_transform(f"{module}:upper")
    (tmp_path / "my_transform.py").write_text(MODULE.replace("upper()", "lower()"))
    assert fingerprint_transform(f"{module}:upper") != before
    assert fingerprint_transform("text") is None
