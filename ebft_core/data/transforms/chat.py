"""Transform `chat`: a conversation in the tokenizer's template; the assistant's turns are supervised.

Which characters of the rendered conversation belong to the assistant is found exactly, in one of two ways:
* the template marks them with `{% generation %}`;
* otherwise by rendering prefixes: a turn is what rendering up to and including it adds to rendering up
  to it with the generation prompt. This needs a template that renders a prefix of the conversation to a
  prefix of the text; where it does not, the row is refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebft_core.data.document import IGNORE, Record, RowError, TokenizedDocument
from ebft_core.data.parts import inside
from ebft_core.data.templates import check_template, render
from ebft_core.data.thinking import SPAN, Message, prepare_messages
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

Span = tuple[int, int]
"""Characters start…stop (exclusive) of the rendered conversation."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def columns(config: DataConfig) -> dict[str, list[str]]:
    """Config key -> columns, one of which must exist."""
    return {"data.fields.messages": [config.fields.messages]}


def content(record: Record, config: DataConfig) -> list[Any]:
    """The messages as they stand. Raises RowError unless they are a conversation with an assistant's turn."""
    column = config.fields.messages
    if column not in record:
        raise RowError(f"missing field `{column}`")
    messages = record[column]
    if messages is None:
        raise RowError(f"field `{column}` is null")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RowError(f"field `{column}` has the wrong type: {type(messages).__name__}, expected a list")
    if not messages:
        raise RowError(f"field `{column}` is empty")
    checked = check_messages(messages)
    if not any(message["role"] == "assistant" for message in checked):
        raise RowError("no assistant turn")
    prepare_messages(checked, config)  # refuses what cannot be prepared, before anything is tokenized
    return checked


def check_messages(messages: Sequence[object]) -> list[Message]:
    """The messages without their null fields. Raises RowError, naming the one that is none."""
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def tokenize(
    records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
) -> list[TokenizedDocument | RowError]:
    """One document per conversation, truncated at the end to `data.sequence_length`.

    The template alone decides about special tokens: none is added to what it renders. A conversation
    whose assistant speaks only behind the truncation is all prompt, and is dropped later as too short.

    Raises:
        UserError: the tokenizer has no chat template, or the template cannot be rendered at all.
    """
    check_template(tokenizer, config)
    documents: list[TokenizedDocument | RowError] = []
    for record in records:
        try:
            messages = prepare_messages(content(record, config), config)
            documents.append(_tokenize_one(messages, tokenizer, config))
        except RowError as error:
            documents.append(error)
    return documents


def _tokenize_one(messages: list[Message], tokenizer: Tokenizer, config: DataConfig) -> TokenizedDocument:
    text = render(messages, tokenizer, config)
    spans = _assistant_spans(messages, text, tokenizer, config)
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids = np.asarray(encoded.input_ids, dtype=np.int32)[: config.sequence_length]
    offsets = np.asarray(encoded.offset_mapping, dtype=np.int64).reshape(-1, 2)[: len(ids)]
    target = inside(offsets, spans)
    supervised = target
    if not config.chat.supervise_thinking:
        supervised = target & ~inside(offsets, [match.span() for match in SPAN.finditer(text)])
    labels = np.where(supervised, ids, np.int32(IGNORE))
    prompt_length = int(target.argmax()) if target.any() else len(ids)
    return TokenizedDocument(ids, labels, target, prompt_length)


def _assistant_spans(
    messages: list[Message], text: str, tokenizer: Tokenizer, config: DataConfig
) -> list[Span]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if _GENERATION.search(tokenizer.get_chat_template()):
        spans = _marked_spans(messages, tokenizer, config)
        return spans[-1:] if config.chat.assistant_turns == "final" else spans
    wanted = turns[-1:] if config.chat.assistant_turns == "final" else turns
    return [_rendered_span(messages, turn, text, tokenizer, config) for turn in wanted]


def _rendered_span(
    messages: list[Message], turn: int, text: str, tokenizer: Tokenizer, config: DataConfig
) -> Span:
    before = render(messages[:turn], tokenizer, config, add_generation_prompt=True) if turn else ""
    upto = render(messages[: turn + 1], tokenizer, config)
    if not (upto.startswith(before) and text.startswith(upto)):
        raise RowError(
            f"the chat template renders turn {turn + 1} differently inside the whole conversation, so its "
            "span is unknown; use `assistant_turns: final` or a template with {% generation %} marks"
        )
    return len(before), len(before) + _turn_length(upto[len(before) :], messages[turn]["content"])


def _turn_length(rendered: str, said: str) -> int:
    """Length of a turn without the line break that a template puts behind its end-of-turn mark."""
    stripped = rendered.rstrip()
    return len(rendered) if stripped.endswith(said.rstrip()) else len(stripped)


def _marked_spans(messages: list[Message], tokenizer: Tokenizer, config: DataConfig) -> list[Span]:
    from transformers.utils.chat_template_utils import render_jinja_template

    _, spans = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **config.chat.template_kwargs},
    )
    return [(int(start), int(stop)) for start, stop in spans[0]]


def _message(message: object, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise RowError(f"message {number} has the wrong type: {type(message).__name__}, expected an object")
    for key in ("role", "content"):
        if key not in message:
            raise RowError(f"message {number} has no `{key}`")
        if not isinstance(message[key], str):
            raise RowError(f"`{key}` of message {number} is not a string but {type(message[key]).__name__}")
    if not message["content"].strip():
        raise RowError(f"message {number} is empty")
    return {key: value for key, value in message.items() if value is not None}
