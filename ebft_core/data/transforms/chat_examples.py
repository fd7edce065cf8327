"""Structured examples of conversations: which turns the policy writes, and what is given to it between them.

A turn is read where the policy would write it: the prompt is the conversation before it, rendered with the
generation prompt, and the turn is what rendering adds when it is there. So a template that rewrites earlier
turns (drops their thinking, say) does no harm: every turn stands as it was said, and what follows a turn
is what the template writes behind it at the time of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ebft_core.data.document import Record, RowError, TokenizedDocument
from ebft_core.data.parts import Part, tokenize_parts
from ebft_core.data.templates import EndOfTurn, end_of_turn, render, text_behind
from ebft_core.data.thinking import CLOSE, Message, prepare_messages
from ebft_core.data.transforms.chat import content
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

Task = tuple[list[Message], list[int]]
"""A conversation, and the turns in it that the policy writes (indices, increasing)."""


def examples(
    records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
) -> list[list[TokenizedDocument] | RowError]:
    """The examples of each conversation, as `data.chat.examples` says, whole whatever their length.

    Raises:
        UserError: the tokenizer has no usable chat template.
    """
    tasks: list[list[Task] | RowError] = []
    for record in records:
        try:
            tasks.append(_tasks(content(record, config), config))
        except RowError as error:
            tasks.append(error)
    return task_examples(tasks, tokenizer, config)


def task_examples(
    tasks: Sequence[list[Task] | RowError], tokenizer: Tokenizer, config: DataConfig
) -> list[list[TokenizedDocument] | RowError]:
    """The examples of each record's tasks; a record with a task that cannot be read is bad as a whole.

    Raises:
        UserError: the tokenizer has no usable chat template.
    """
    end = end_of_turn(tokenizer, config)
    told = [_told(several, tokenizer, config, end) for several in tasks]
    flat = [parts for one in told if not isinstance(one, RowError) for parts in one]
    documents = iter(tokenize_parts(flat, tokenizer, supervise_thinking=config.chat.supervise_thinking))
    return [one if isinstance(one, RowError) else [next(documents) for _ in one] for one in told]


def conversation_parts(
    messages: Sequence[Message],
    turns: Sequence[int],
    tokenizer: Tokenizer,
    config: DataConfig,
    end: EndOfTurn,
) -> list[Part]:
    """The conversation through the last of `turns`: prompt, turn, what lies between, turn, …

    Raises:
        RowError: the template refuses the conversation, or its text cannot be taken apart.
    """
    prompt, said = _turn(messages, turns[0], tokenizer, config, end)
    parts = [Part(prompt, written=False), Part(said, written=True)]
    for last, turn in pairwise(turns):
        prompt, said = _turn(messages, turn, tokenizer, config, end)
        behind = text_behind(messages[:turn], last, tokenizer, config, add_generation_prompt=True)
        given = behind.removeprefix(end.text)
        if not behind.startswith(end.text) or not prompt.endswith(given):
            raise RowError(f"the chat template does not end turn {last + 1} as it ends a last turn")
        if not given:
            raise RowError(f"the chat template writes nothing between turn {last + 1} and turn {turn + 1}")
        parts += [Part(given, written=False), Part(said, written=True)]
    return parts


def _tasks(messages: list[Message], config: DataConfig) -> list[Task]:
    """What the policy writes. An assistant's turn with nothing before it is context: it has no prompt."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    if not turns:
        raise RowError("the conversation begins with its only assistant turn, so there is no prompt")
    if config.chat.examples == "every_turn":
        return [(messages, [turn]) for turn in turns]
    return [(messages, turns if config.chat.examples == "first_turn" else turns[-1:])]


def _told(
    tasks: list[Task] | RowError, tokenizer: Tokenizer, config: DataConfig, end: EndOfTurn
) -> list[list[Part]] | RowError:
    if isinstance(tasks, RowError):
        return tasks
    try:
        return [
            conversation_parts(prepare_messages(messages, config), turns, tokenizer, config, end)
            for messages, turns in tasks
        ]
    except RowError as error:
        return error


def _turn(
    messages: Sequence[Message], turn: int, tokenizer: Tokenizer, config: DataConfig, end: EndOfTurn
) -> tuple[str, str]:
    """(text before the turn, the turn with the token that ends it)."""
    prompt = render(messages[:turn], tokenizer, config, add_generation_prompt=True)
    upto = render(messages[: turn + 1], tokenizer, config)
    tail = text_behind(messages[: turn + 1], turn, tokenizer, config)
    if not upto.startswith(prompt):
        raise RowError(
            f"turn {turn + 1} does not begin as the chat template's generation prompt says; where that "
            "closes the thinking (`enable_thinking: false`), use `data.thinking: answer_only`, else another "
            "`model.chat_template`"
        )
    if not tail.startswith(end.text) or not upto.endswith(tail):
        raise RowError(f"the chat template does not end turn {turn + 1} with {end.text!r}")
    said = upto[len(prompt) : len(upto) - len(tail)]
    if CLOSE in messages[turn]["content"] and CLOSE not in said:
        raise RowError(
            f"the chat template leaves out the thinking of turn {turn + 1}; use `data.thinking: answer_only` "
            "to do without it, or another `model.chat_template`"
        )
    return prompt, said + end.text
