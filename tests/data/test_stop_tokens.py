"""Tokens that end a turn, found in what the template renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebft_core.data.stop_tokens import read_stop_token_ids, stop_token_ids
from ebft_core.errors import UserError
from tests.data.builders import byte_tokenizer, data_config
from tests.data.chats import CHATML, CLOSES_WITH_EOS, NO_HEADER, RETHINKING, chat_tokenizer


def stops(tokenizer: Any, transform: str = "chat", **data: Any) -> list[str]:
    ids = stop_token_ids(tokenizer, data_config(transform=transform, **data))
    return list(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["</s>", "<|im_end|>"]),
        (RETHINKING, ["</s>", "<|im_end|>"]),
        (CLOSES_WITH_EOS, ["</s>", "<|end|>"]),
        (NO_HEADER, ["</s>"]),
        ("{% for m in messages %}{{ m.content }} \n{{ eos_token }}\n{% endfor %}", ["</s>"]),
    ],
)
def test_the_end_of_a_turn_is_found_in_the_template(template: str, expected: list[str]) -> None:
    assert stops(chat_tokenizer(template)) == expected
    assert stops(chat_tokenizer(template), "my.module:function") == expected
    assert stops(chat_tokenizer(template), "prompt_completion") == ["</s>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no token of its own"),
        ("{% for m in messages %}{{ m.content ", "not valid Jinja"),
        ("{% for m in messages %}{{ m.content + m.content }}{{ eos_token }}{% endfor %}", "does not render"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_ends_no_turn_is_refused_for_chats(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        stops(chat_tokenizer(template))
    assert caught.value.where == "model.chat_template"
    assert stops(chat_tokenizer(template), "my.module:function") == ["</s>"]


def test_a_mark_that_is_no_token_cannot_end_a_turn() -> None:
    tokenizer = byte_tokenizer()  # `<|im_end|>` is ten bytes to it
    tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match="no token of its own") as caught:
        stops(tokenizer)
    assert "<|im_end|>" in str(caught.value.value)
    assert "eos_token" in str(caught.value.hint)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ eos_token }}")  # what the hint says
    assert stops(tokenizer) == ["<|endoftext|>"]


def test_a_tokenizer_without_an_end_of_sequence() -> None:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.eos_token = None
    assert stops(tokenizer) == ["<|im_end|>"]
    with pytest.raises(UserError, match="no token ends a completion"):
        stops(tokenizer, "prompt_completion")


def test_the_recorded_ids_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"stop_token_ids": [3, 5]}))
    assert read_stop_token_ids(tmp_path) == [3, 5]
    (tmp_path / "data.json").write_text(json.dumps({"tokens": 1}))
    with pytest.raises(UserError, match="names no token"):
        read_stop_token_ids(tmp_path)
