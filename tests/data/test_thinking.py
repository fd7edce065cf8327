"""Thinking removed from a text, or moved into a message's field."""

from __future__ import annotations

import pytest

from ebft_core.data.document import RowError
from ebft_core.data.thinking import prepare_messages, split_thinking, without_thinking
from tests.data.builders import data_config


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm</think>\n\nyes", "yes"),
        ("yes", "yes"),
        (" yes ", " yes "),
        ("<think>\n\n</think>yes <think>two\nlines</think> no", "yes no"),
        ("opened by the prompt</think>\nyes", "yes"),
    ],
)
def test_only_the_answer_is_left(text: str, answer: str) -> None:
    assert without_thinking(text) == answer


@pytest.mark.parametrize("text", ["<think>hm", "a<think>b</think>c<think>d"])
def test_thinking_without_an_end_has_no_answer(text: str) -> None:
    with pytest.raises(RowError, match="not closed"):
        without_thinking(text)


def test_thinking_alone_is_no_answer() -> None:
    with pytest.raises(RowError, match="nothing is left"):
        without_thinking("<think>hm</think> \n")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        ("hm</think>yes", ("hm", "yes")),
        ("  yes", (None, "  yes")),
        ("<think></think>yes", ("", "yes")),
    ],
)
def test_thinking_and_answer_apart(text: str, parts: tuple[str | None, str]) -> None:
    assert split_thinking(text) == parts


@pytest.mark.parametrize("text", ["yes <think>hm</think> no", "<think>a</think>b<think>c</think>d"])
def test_a_field_holds_one_span_at_the_beginning(text: str) -> None:
    with pytest.raises(RowError, match="not one span at the beginning"):
        split_thinking(text)


def test_only_assistant_turns_are_touched() -> None:
    talk = [
        {"role": "user", "content": "<think>of me</think>?"},
        {"role": "assistant", "content": "<think>hm</think>yes", "name": "x"},
    ]
    reasoning = {"role": "assistant", "content": "yes", "reasoning_content": "hm", "name": "x"}
    field = data_config(transform="chat", thinking="reasoning_field")
    answer = data_config(transform="chat", thinking="answer_only")
    assert prepare_messages(talk, field) == [talk[0], reasoning]
    assert prepare_messages([reasoning], answer) == [{"role": "assistant", "content": "yes", "name": "x"}]
    assert prepare_messages(talk, data_config()) == talk
    with pytest.raises(RowError, match="message 1: it has thinking both"):
        prepare_messages([{**talk[1], "reasoning": "hm"}], field)
