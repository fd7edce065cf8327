"""Chat: exactly the assistant's tokens are supervised, found in two independent ways."""

from __future__ import annotations

from typing import Any

import pytest

from ebft_core.config.data_section import ChatConfig
from ebft_core.data.document import RowError, TokenizedDocument
from ebft_core.data.transforms import get_transform
from ebft_core.errors import UserError
from tests.data.builders import byte_tokenizer, data_config

CHAT = get_transform("chat")

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THINKING = (  # like Qwen3: earlier turns lose their thoughts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hé?"},
    {"role": "assistant", "content": "<think>hmm</think>yes"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "<think>so</think>no"},
]


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def one(messages: list, template: str, length: int = 1000, **chat: Any) -> TokenizedDocument | RowError:
    config = data_config(chat=ChatConfig(**chat), sequence_length=length)
    (document,) = CHAT.tokenize([{"messages": messages}], tokenizer_with(template), config)
    return document


def said(document: TokenizedDocument, mask: Any) -> str:
    return bytes(document.input_ids[mask].tolist()).decode()


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_assistant_turns_with_their_end_mark_are_supervised(template: str) -> None:
    document = one(TALK, template)
    spoken = "<think>hmm</think>yes<|im_end|><think>so</think>no<|im_end|>"
    assert said(document, document.labels >= 0) == spoken
    assert said(document, document.is_target) == spoken
    text = bytes(document.input_ids.tolist()).decode()
    assert document.prompt_length == len(text[: text.index("<think>hmm")].encode())


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_final_turn_only(template: str) -> None:
    document = one(TALK, template, assistant_turns="final")
    assert said(document, document.labels >= 0) == "<think>so</think>no<|im_end|>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_thinking_may_go_without_labels_but_stays_a_target(template: str) -> None:
    document = one(TALK, template, supervise_thinking=False)
    assert said(document, document.labels >= 0) == "yes<|im_end|>no<|im_end|>"
    assert said(document, document.is_target).startswith("<think>hmm</think>yes")


def test_thinking_may_be_left_out_of_the_text() -> None:
    config = data_config(transform="chat", thinking="answer_only", sequence_length=1000)
    (document,) = CHAT.tokenize([{"messages": TALK}], tokenizer_with(PLAIN), config)
    assert said(document, document.is_target) == "yes<|im_end|>no<|im_end|>"
    assert "hmm" not in said(document, slice(None))


def test_a_template_that_rewrites_earlier_turns_is_refused_for_them() -> None:
    refused = one(TALK, FORGETS_THINKING)
    assert isinstance(refused, RowError)
    assert "turn 3 differently" in str(refused)
    document = one(TALK, FORGETS_THINKING, assistant_turns="final")
    assert said(document, document.is_target) == "<think>so</think>no<|im_end|>"


def test_template_arguments_reach_the_template() -> None:
    template = "{{ mood }}|" + PLAIN
    document = one(TALK, template, template_kwargs={"mood": "happy"})
    assert said(document, slice(None)).startswith("happy|<|im_start|>system")


def test_long_conversations_are_truncated_at_the_end() -> None:
    full = one(TALK, PLAIN)
    short = one(TALK, PLAIN, length=full.prompt_length + 5)
    assert short.input_ids.tolist() == full.input_ids[: full.prompt_length + 5].tolist()
    assert said(short, short.is_target) == "<thin"
    unheard = one(TALK, PLAIN, length=full.prompt_length)
    assert (unheard.is_target.any(), unheard.prompt_length) == (False, full.prompt_length)


def test_special_tokens_of_the_template_are_special() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    document = one([{"role": "assistant", "content": "ab"}], template)
    assert document.input_ids.tolist() == [*b"ab", 256]
    assert document.labels.tolist() == [*b"ab", 256]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "missing field"),
        ({"messages": None}, "null"),
        ({"messages": "hello"}, "wrong type: str"),
        ({"messages": []}, "empty"),
        ({"messages": ["hi"]}, "message 1 has the wrong type"),
        ({"messages": [{"role": "user"}]}, "no `content`"),
        ({"messages": [{"role": "user", "content": 1}]}, "not a string"),
        ({"messages": [{"role": "user", "content": " "}]}, "message 1 is empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
    ],
)
def test_bad_conversations_say_why(record: dict, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        CHAT.content(record, data_config())


def test_what_the_template_refuses_is_a_bad_row() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    assert "no system" in str(one(TALK, template))


def test_no_template_and_a_broken_template_are_errors() -> None:
    with pytest.raises(UserError, match="no chat template") as missing:
        CHAT.tokenize([{"messages": TALK}], tokenizer_with(None), data_config())
    assert missing.value.where == "model.chat_template"
    with pytest.raises(UserError, match="not valid Jinja"):
        one(TALK, "{% for m in messages %}")
