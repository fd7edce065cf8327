"""Structured examples by a function of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ebft_core.data.document import RowError
from ebft_core.data.transforms import get_transform
from ebft_core.errors import UserError
from tests.data.builders import data_config, word_tokenizer
from tests.data.chats import CHATML, WITH_BOS, chat_tokenizer, talk
from tests.docs_pages import blocks

MODULE = """
from ebft_core.data.document import RowError, TokenizedDocument

def give(record, tokenizer, config):
    if record.get("refuse"):
        raise RowError("refused")
    return record["give"]

def tokens(record, tokenizer, config):
    return TokenizedDocument([1, 2, 3], [-100, 2, 3], [False, True, True], 1)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_examples.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_examples", raising=False)


def made(records: list[dict], tokenizer: Any, function: str = "give", **data: Any) -> list:
    transform = get_transform(f"my_examples:{function}")
    assert transform.examples is not None
    return transform.examples(records, tokenizer, data_config(transform=f"my_examples:{function}", **data))


def one(give: Any, tokenizer: Any, **data: Any) -> Any:
    (examples,) = made([{"give": give}], tokenizer, **data)
    return examples


def test_plain_texts_are_read_as_prompt_and_completion() -> None:
    record = {"prompt": "ab", "completion": "<think>x</think>cd"}
    give = {"prompt": "ab", "ground_truth": "<think>x</think>cd"}
    builtin = get_transform("prompt_completion").examples
    assert builtin is not None
    for thinking in ("full", "answer_only"):
        tokenizer, data = chat_tokenizer(None, bos=True), {"thinking": thinking, "prompt_separator": "\n"}
        (document,), ((expected,),) = (
            one(give, tokenizer, **data),
            builtin([record], tokenizer, data_config(**data)),
        )
        assert document.input_ids.tolist() == expected.input_ids.tolist()
        assert document.prompt_length == expected.prompt_length == 4  # <s>, a, b, line break
        assert document.input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_messages_and_remaining_turns_are_read_as_the_conversation_they_are() -> None:
    tokenizer = chat_tokenizer(WITH_BOS, bos=True)
    whole = talk("a?", "A", "b?", "B", "c?", "C")
    for count, examples in ((2, "last_turn"), (6, "first_turn")):
        give = {"prompt": whole[:1], "ground_truth": "A", "remaining_turns": whole[2:count]}
        chat = data_config(transform="chat", chat={"examples": examples})
        builtin = get_transform("chat").examples
        assert builtin is not None
        (document,) = one(give, tokenizer)
        ((expected,),) = builtin([{"messages": whole[:count]}], tokenizer, chat)
        assert document.input_ids.tolist() == expected.input_ids.tolist()
        assert document.is_target.tolist() == expected.is_target.tolist()
    later = {"prompt": whole[:3], "ground_truth": "B", "remaining_turns": whole[4:]}
    (document,) = one(later, tokenizer)
    assert document.prompt_length > expected.prompt_length  # the first answer is context here


def test_one_record_may_make_several_examples_of_any_kind() -> None:
    tokenizer = chat_tokenizer(CHATML)
    plain = {"prompt": "q", "ground_truth": "A"}
    chat = {"prompt": talk("q"), "ground_truth": "B"}
    records = [{"give": [chat, plain, chat]}, {"refuse": True}, {"give": plain}]
    several, refused, single = made(records, tokenizer)
    said = [tokenizer.decode(d.input_ids[d.prompt_length :].tolist()) for d in [*several, *single]]
    assert said == ["B<|im_end|>", "A</s>", "B<|im_end|>", "A</s>"]
    assert isinstance(refused, RowError)
    ((document,),) = made([{}], tokenizer, "tokens")
    assert document.input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("give", "reason"),
    [
        ([], "made no example"),
        ({"prompt": "q", "ground_truth": ""}, "field `ground_truth` is empty"),
        ({"prompt": "q", "ground_truth": None}, "field `ground_truth` is null"),
        ({"prompt": " ", "ground_truth": "A"}, "field `prompt` is empty"),
        ({"prompt": [], "ground_truth": "A"}, "the prompt has no message"),
        ({"prompt": [{"role": "user"}], "ground_truth": "A"}, "message 1 has no `content`"),
        ({"prompt": talk("q"), "ground_truth": "A", "remaining_turns": talk("r")}, "no assistant turn"),
        ([{"prompt": "q", "ground_truth": "A"}, {"prompt": "q", "ground_truth": " "}], "is empty"),
    ],
)
def test_records_without_an_example_are_bad_rows(give: Any, reason: str) -> None:
    refused = one(give, chat_tokenizer(CHATML))
    assert isinstance(refused, RowError)
    assert reason in str(refused)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (3, "returned int"),
        ({"prompt": "q"}, r"returned \['prompt'\]"),
        ({"prompt": "q", "ground_truth": "A", "answer": 1}, "'answer'"),
        (
            {"prompt": "q", "ground_truth": "A", "remaining_turns": talk("r", "B")},
            "plain prompt has no turns",
        ),
    ],
)
def test_what_the_function_does_wrong_is_an_error(give: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        one(give, chat_tokenizer(CHATML))
    assert caught.value.where == "data.transform"


def test_messages_need_a_template() -> None:
    with pytest.raises(UserError, match="no chat template"):
        one({"prompt": talk("q"), "ground_truth": "A"}, word_tokenizer(bos=False))


def test_strided_mode_says_which_mode_takes_examples() -> None:
    transform = get_transform("my_examples:give")
    with pytest.raises(UserError, match="returned dict") as caught:
        transform.tokenize([{"give": {"prompt": "q"}}], word_tokenizer(bos=False), data_config())
    assert "structured" in str(caught.value.hint)


def test_the_example_of_the_guide_does_what_it_says(tmp_path: Path) -> None:
    (block,) = [b for b in blocks("data-formats.md") if b.argument == "my_examples.py"]
    (tmp_path / "my_examples.py").write_text(block.text, encoding="utf-8")
    tokenizer = chat_tokenizer(CHATML)
    (document,), refused = made(
        [{"talk": ["a?", "A", "b?", "B"]}, {"talk": ["a?"]}], tokenizer, function="debate"
    )
    written = tokenizer.decode(document.input_ids[document.is_target].tolist())
    assert written == "A<|im_end|>B<|im_end|>"
    assert str(refused) == "nobody answers"
