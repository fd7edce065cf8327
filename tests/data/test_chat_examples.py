"""Chat examples: what is written and what is given, against the rendering of the whole conversation."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.config.data_section import ChatConfig
from ebft_core.data.document import IGNORE, RowError, TokenizedDocument
from ebft_core.data.transforms import get_transform
from ebft_core.errors import UserError
from tests.data.builders import data_config
from tests.data.chats import (
    APPENDING,
    BOS,
    CHATML,
    CLOSES_WITH_EOS,
    NO_HEADER,
    RETHINKING,
    TALKS,
    WITH_BOS,
    chat_tokenizer,
    talk,
)

CHAT = get_transform("chat")
NAMES = st.sampled_from(sorted(APPENDING))
HEAD, END = "<|im_start|>assistant\n", "<|im_end|>"


def made(messages: list, tokenizer: Any, *, thinking: str = "full", **chat: Any) -> list | RowError:
    config = data_config(transform="chat", chat=ChatConfig(**chat), thinking=thinking)
    assert CHAT.examples is not None
    (examples,) = CHAT.examples([{"messages": messages}], tokenizer, config)
    return examples


def one(messages: list, template: str, **options: Any) -> list[tuple[str, bool]]:
    """The only example as (text, written by the policy), stretch by stretch."""
    tokenizer = chat_tokenizer(template)
    (document,) = made(messages, tokenizer, **options)
    return stretches(document, tokenizer)


def stretches(document: TokenizedDocument, tokenizer: Any) -> list[tuple[str, bool]]:
    pairs = zip(document.input_ids.tolist(), document.is_target.tolist(), strict=True)
    return [
        (tokenizer.decode([token for token, _ in group]), written)
        for written, group in groupby(pairs, key=lambda pair: pair[1])
    ]


def rendered(tokenizer: Any, messages: list, **kwargs: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def said(messages: list, name: str, turn: int) -> str:
    """What the assistant writes at its turn in one of the appending templates."""
    content = messages[turn]["content"]
    return {"eos": f"{content}<|end|>", "no header": f" {content}</s>"}.get(name, f"{content}{END}")


@given(messages=TALKS, name=NAMES)
def test_first_turn_is_the_rendering_of_the_whole_conversation(messages: list, name: str) -> None:
    tokenizer = chat_tokenizer(APPENDING[name])
    (document,) = made(messages, tokenizer, examples="first_turn")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = rendered(tokenizer, messages[: turns[-1] + 1])
    last = said(messages, name, turns[-1])
    text = whole[: whole.rindex(last) + len(last)]
    assert document.input_ids.tolist() == encoded(tokenizer, text)
    prompt = rendered(tokenizer, messages[: turns[0]], add_generation_prompt=True)
    assert document.input_ids[: document.prompt_length].tolist() == encoded(tokenizer, prompt)
    written = [stretch for stretch, is_written in stretches(document, tokenizer) if is_written]
    assert written == [said(messages, name, turn) for turn in turns]
    assert document.labels.tolist() == [
        token if target else IGNORE
        for token, target in zip(document.input_ids, document.is_target, strict=True)
    ]


@given(messages=TALKS, name=NAMES, merges=st.booleans())
def test_every_turn_is_the_conversation_up_to_it(messages: list, name: str, merges: bool) -> None:
    tokenizer = chat_tokenizer(APPENDING[name], merges=merges)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    documents = made(messages, tokenizer, examples="every_turn")
    for turn, document in zip(turns, documents, strict=True):
        prompt = rendered(tokenizer, messages[:turn], add_generation_prompt=True)
        at = document.prompt_length
        assert document.input_ids[:at].tolist() == encoded(tokenizer, prompt)
        assert tokenizer.decode(document.input_ids[at:].tolist()) == said(messages, name, turn)
        assert document.is_target.tolist() == [i >= at for i in range(len(document))]
    (last,) = made(messages, tokenizer, examples="last_turn")
    assert last.input_ids.tolist() == documents[-1].input_ids.tolist()


@given(messages=TALKS, name=NAMES)
def test_no_token_spans_a_border_between_given_and_written(messages: list, name: str) -> None:
    tokenizer = chat_tokenizer(APPENDING[name], merges=True)
    bytewise = chat_tokenizer(APPENDING[name])
    (merged,), (plain,) = (made(messages, t, examples="first_turn") for t in (tokenizer, bytewise))
    assert stretches(merged, tokenizer) == stretches(plain, bytewise)


def test_a_token_across_the_border_is_taken_apart() -> None:
    tokenizer = chat_tokenizer(CHATML, merges=True)
    messages = talk("q", "x", "q", "x")
    assert tokenizer.convert_tokens_to_ids("Ċx") in encoded(tokenizer, rendered(tokenizer, messages))
    (document,) = made(messages, tokenizer, examples="first_turn")
    assert tokenizer.convert_tokens_to_ids("Ċx") not in document.input_ids
    assert [text for text, written in stretches(document, tokenizer) if written] == [f"x{END}"] * 2


def test_a_template_that_rewrites_earlier_turns_loses_nothing() -> None:
    messages = talk("a?", "<think>\none\n</think>\n\nA", "b?", "<think>\ntwo\n</think>\n\nB")
    asked = f"<|im_start|>user\na?{END}\n{HEAD}"
    assert one(messages, RETHINKING, examples="first_turn") == [
        (asked, False),
        (f"<think>\none\n</think>\n\nA{END}", True),
        (f"\n<|im_start|>user\nb?{END}\n{HEAD}", False),
        (f"<think>\ntwo\n</think>\n\nB{END}", True),
    ]
    assert one(messages, RETHINKING, examples="last_turn") == [  # as at inference: no earlier thoughts
        (f"{asked}A{END}\n<|im_start|>user\nb?{END}\n{HEAD}", False),
        (f"<think>\ntwo\n</think>\n\nB{END}", True),
    ]


def test_enable_thinking_false_puts_the_empty_thought_into_the_prompt() -> None:
    options = {"template_kwargs": {"enable_thinking": False}, "examples": "first_turn"}
    empty = "<think>\n\n</think>\n\n"
    expected = [
        (f"<|im_start|>user\na?{END}\n{HEAD}{empty}", False),
        (f"A{END}", True),
        (f"\n<|im_start|>user\nb?{END}\n{HEAD}{empty}", False),
        (f"B{END}", True),
    ]
    assert one(talk("a?", "A", "b?", "B"), RETHINKING, **options) == expected
    thinking = talk("a?", "<think>one</think>A", "b?", "<think>two</think>B")
    refused = made(thinking, chat_tokenizer(RETHINKING), **options)
    assert "use `data.thinking: answer_only`" in str(refused)
    assert one(thinking, RETHINKING, thinking="answer_only", **options) == expected


def test_thinking_in_the_field_of_its_own_is_rendered_by_the_template() -> None:
    messages = talk("a?", "<think> one </think>\nA")
    expected = [
        (f"<|im_start|>user\na?{END}\n{HEAD}", False),
        (f"<think>\none\n</think>\n\nA{END}", True),
    ]
    assert one(messages, RETHINKING, thinking="reasoning_field") == expected
    separate = [messages[0], {"role": "assistant", "content": "A", "reasoning": "one"}]
    assert one(separate, RETHINKING, thinking="full") == expected
    without = one(separate, RETHINKING, thinking="answer_only")
    assert without[1] == (f"<think>\n\n</think>\n\nA{END}", True)


def test_a_template_without_a_place_for_reasoning_is_refused() -> None:
    with pytest.raises(UserError, match="leaves out the reasoning") as caught:
        made(talk("a?", "A"), chat_tokenizer(CHATML), thinking="reasoning_field")
    assert caught.value.where == "data.thinking"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("template", [WITH_BOS, NO_HEADER])
def test_bos_of_the_template_stands_once(template: str, adds: bool) -> None:
    tokenizer = chat_tokenizer(template, bos=adds)
    for examples in ("last_turn", "first_turn", "every_turn"):
        for document in made(talk("a?", "A", "b?", "B"), tokenizer, examples=examples):
            ids = document.input_ids.tolist()
            assert (ids[0], ids.count(tokenizer.bos_token_id)) == (tokenizer.bos_token_id, 1)
            assert tokenizer.bos_token_id not in ids[document.prompt_length :]
    assert tokenizer("a").input_ids[:1] == ([tokenizer.bos_token_id] if adds else encoded(tokenizer, "a"))
    assert tokenizer.bos_token == BOS


def test_what_stands_behind_a_finished_conversation_is_no_part_of_the_turn() -> None:
    assert one(talk("a", "A", "b", "B"), CLOSES_WITH_EOS, examples="first_turn") == [
        ("user\na<|end|>\nassistant\n", False),
        ("A<|end|>", True),
        ("\nuser\nb<|end|>\nassistant\n", False),
        ("B<|end|>", True),
    ]


def test_turns_behind_the_last_answer_are_left_out_and_a_greeting_is_context() -> None:
    messages = [{"role": "assistant", "content": "Hi"}, *talk("a?", "A", "b?")]
    expected = [
        (f"{HEAD}Hi{END}\n<|im_start|>user\na?{END}\n{HEAD}", False),
        (f"A{END}", True),
    ]
    for examples in ("last_turn", "first_turn", "every_turn"):
        assert one(messages, CHATML, examples=examples) == expected


def test_thinking_may_go_without_labels() -> None:
    for tokenizer in (chat_tokenizer(CHATML), chat_tokenizer(CHATML, merges=True)):
        messages = talk("a?", "x<think>one</think>A")  # `\nx` is one token of the second tokenizer
        (document,) = made(messages, tokenizer, supervise_thinking=False)
        labelled = document.input_ids[document.labels != IGNORE].tolist()
        assert tokenizer.decode(labelled) == f"xA{END}"
        assert document.is_target[document.prompt_length :].all()


@pytest.mark.parametrize(
    ("messages", "template", "options", "reason"),
    [
        ([{"role": "assistant", "content": "A"}], CHATML, {}, "there is no prompt"),
        (talk("a"), CHATML, {}, "no assistant turn"),
        (talk("a", " "), CHATML, {}, "message 2 is empty"),
        (talk("a", "<think>x"), CHATML, {"thinking": "answer_only"}, "message 2: a `<think>` is not closed"),
        (
            talk("a", "<think>x</think>A"),
            "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}",
            {},
            "leaves out the thinking of turn 2",
        ),
        (
            talk("a", "A"),
            "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            {},
            "turn 2 does not begin as",
        ),
        (
            [*talk("a", "A"), {"role": "assistant", "content": "B"}],
            "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
            {"examples": "first_turn"},
            "writes nothing between turn 2 and turn 3",
        ),
        (
            talk("a", "A", "b", "B"),
            "{% for m in messages %}{{ m.content }}"
            "{{ eos_token if loop.last and m.role == 'assistant' else '!' }}{% endfor %}",
            {"examples": "first_turn"},
            "does not end turn 2 as it ends a last turn",
        ),
    ],
)
def test_conversations_without_an_example_say_why(
    messages: list, template: str, options: dict, reason: str
) -> None:
    refused = made(messages, chat_tokenizer(template), **options)
    assert isinstance(refused, RowError)
    assert reason in str(refused)
