"""Plain text: special tokens at the ends, bad fields, and what a document must be."""

from __future__ import annotations

import numpy as np
import pytest

from ebft_core.data.document import RowError, TokenizedDocument
from ebft_core.data.transforms import get_transform
from tests.data.builders import byte_tokenizer, data_config, word_tokenizer

TEXT = get_transform("text")


def ids(texts: list[str], tokenizer: object, **fields: object) -> list[list[int]]:
    documents = TEXT.tokenize([{"text": text} for text in texts], tokenizer, data_config(**fields))
    return [document.input_ids.tolist() for document in documents]


def test_a_tokenizer_that_adds_bos_adds_it_once() -> None:
    tokenizer = word_tokenizer(bos=True)
    assert tokenizer("w0").input_ids == [0, 3]  # the tokenizer does add it
    assert ids(["w0 w1", "<s> w0 w1"], tokenizer) == [[0, 3, 4, 1], [0, 3, 4, 1]]


def test_a_tokenizer_that_adds_no_bos_gets_none() -> None:
    assert ids(["w0 w1"], word_tokenizer(bos=False)) == [[3, 4, 1]]


def test_eos_is_appended_once_and_only_if_wanted() -> None:
    tokenizer = word_tokenizer(bos=False)
    assert ids(["w0", "w0 </s>"], tokenizer) == [[3, 1], [3, 1]]
    assert ids(["w0"], tokenizer, append_eos=False) == [[3]]


def test_every_token_is_supervised_and_a_target() -> None:
    (document,) = TEXT.tokenize([{"text": "añb"}], byte_tokenizer(), data_config())
    assert document.input_ids.tolist() == [*"añb".encode(), 256]
    assert document.labels.tolist() == document.input_ids.tolist()
    assert document.is_target.all()
    assert document.prompt_length == 0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"body": "x"}, "missing field `text`"),
        ({"text": None}, "null"),
        ({"text": 3}, "wrong type: int"),
        ({"text": " \n"}, "empty"),
        ({"text": "a\ud800"}, "not valid Unicode"),
    ],
)
def test_bad_fields_say_why(record: dict, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        TEXT.content(record, data_config())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": []}, "non-empty"),
        ({"labels": [1]}, "lengths differ"),
        ({"labels": [1, 5]}, "labels"),
        ({"input_ids": [-1, 2], "labels": [-100, 2]}, "negative"),
        ({"prompt_length": 3}, "prompt_length"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(fields: dict, message: str) -> None:
    good = {"input_ids": [1, 2], "labels": [-100, 2], "is_target": [False, True], "prompt_length": 1}
    assert len(TokenizedDocument(**good)) == 2
    with pytest.raises(ValueError, match=message):
        TokenizedDocument(**{**good, **fields})


def test_cut_moves_the_prompt_along() -> None:
    ids = np.arange(6)
    document = TokenizedDocument(ids, np.where(ids >= 4, ids, -100), ids >= 4, 4)
    assert [document.cut(*piece).prompt_length for piece in ((0, 3), (3, 6), (4, 6))] == [3, 1, 0]
