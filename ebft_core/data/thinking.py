"""What becomes of thinking, `<think>…</think>`, before anything is tokenized: the key `data.thinking`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ebft_core.data.document import RowError

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

Message = dict[str, Any]
"""One turn of a conversation: `role`, `content`, and whatever else the template reads."""

OPEN, CLOSE = "<think>", "</think>"
SPAN = re.compile(rf"{OPEN}.*?(?:{CLOSE}|\Z)", re.DOTALL)
"""A thinking span; one that is not closed reaches to the end."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which data sets keep a message's thinking; chat templates read the first one."""

_CLOSED = re.compile(rf"{OPEN}.*?{CLOSE}\s*", re.DOTALL)


def without_thinking(text: str) -> str:
    """The text without its thinking. Raises RowError if nothing is left, or a span is not closed."""
    answer = _CLOSED.sub("", _with_opening(text))
    if OPEN in answer:
        raise RowError(f"a `{OPEN}` is not closed, so the answer is unknown")
    if not answer.strip():
        raise RowError("nothing is left without its thinking")
    return answer


def split_thinking(text: str) -> tuple[str | None, str]:
    """(thinking, answer); None if there is none.

    Raises:
        RowError: the thinking is not one closed span at the beginning, or nothing stands behind it.
    """
    whole = _with_opening(text).lstrip()
    if OPEN not in whole:
        return None, text
    answer = without_thinking(whole)
    thought, _, behind = whole.removeprefix(OPEN).partition(CLOSE)
    if not whole.startswith(OPEN) or behind.lstrip() != answer:
        raise RowError("its thinking is not one span at the beginning, so no field can hold it")
    return thought.strip(), answer


def prepare_messages(messages: Sequence[Message], config: DataConfig) -> list[Message]:
    """The conversation as the template shall see it. Raises RowError, naming the message."""
    prepared = []
    for number, message in enumerate(messages, start=1):
        try:
            prepared.append(_prepare(message, config) if message["role"] == "assistant" else message)
        except RowError as error:
            raise RowError(f"message {number}: {error}") from error
    return prepared


def _prepare(message: Message, config: DataConfig) -> Message:
    if config.thinking == "answer_only":
        kept = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
        return {**kept, "content": without_thinking(message["content"])}
    if config.thinking == "reasoning_field":
        thought, answer = split_thinking(message["content"])
        if thought is None:
            return message
        if any(message.get(name) for name in REASONING_FIELDS):
            raise RowError("it has thinking both in its text and in a field of its own")
        return {**message, REASONING_FIELDS[0]: thought, "content": answer}
    return message


def _with_opening(text: str) -> str:
    """Some data sets leave the opening mark to the generation prompt: the thinking begins with the text."""
    head, close, _ = text.partition(CLOSE)
    return OPEN + text if close and OPEN not in head else text
