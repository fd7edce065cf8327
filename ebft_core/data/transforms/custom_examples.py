"""Structured examples by a function of the user's own: `{prompt, ground_truth[, remaining_turns]}`.

`prompt` is plain text, or a list of messages for the chat template; `remaining_turns` are the messages
behind the first assistant turn, whose text is the ground truth. A `TokenizedDocument` is taken as it is,
and a list of any of these makes several examples of one record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebft_core.data.document import Record, RowError, TokenizedDocument, string_field
from ebft_core.data.transforms.chat import check_messages
from ebft_core.data.transforms.chat_examples import Task, task_examples
from ebft_core.data.transforms.custom import KEY, call, load_function
from ebft_core.data.transforms.prompt_completion import check_answer, plain_examples
from ebft_core.errors import UserError
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

Made = list[TokenizedDocument] | RowError

_NEEDED = frozenset({"prompt", "ground_truth"})
_KNOWN = _NEEDED | {"remaining_turns"}
_EXPECTED = "{prompt, ground_truth[, remaining_turns]}, a TokenizedDocument, or a list of these"


@dataclass(frozen=True)
class _Plain:
    prompt: str
    ground_truth: str


@dataclass(frozen=True)
class _Chat:
    task: Task


_Item = _Plain | _Chat | TokenizedDocument


def examples_for(name: str) -> Callable[[Sequence[Record], Tokenizer, DataConfig], list[Made]]:
    """The function that makes the structured examples of a `module:function` transform."""
    function = load_function(name)

    def examples(records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig) -> list[Made]:
        results = [call(function, record, tokenizer, config, name) for record in records]
        return _tokenize([_items(result, config, name) for result in results], tokenizer, config)

    return examples


def _tokenize(rows: Sequence[list[_Item] | RowError], tokenizer: Tokenizer, config: DataConfig) -> list[Made]:
    items = [item for row in rows if not isinstance(row, RowError) for item in row]
    plain = [(item.prompt, item.ground_truth) for item in items if isinstance(item, _Plain)]
    chats: list[list[Task] | RowError] = [[item.task] for item in items if isinstance(item, _Chat)]
    from_plain = iter(plain_examples(plain, tokenizer, config))
    from_chat = iter(task_examples(chats, tokenizer, config) if chats else [])
    return [row if isinstance(row, RowError) else _join(row, from_plain, from_chat) for row in rows]


def _join(row: list[_Item], from_plain: Iterator[Made], from_chat: Iterator[Made]) -> Made:
    """The examples of one record; the first that cannot be used makes the record a bad row."""
    made: list[Made] = []
    for item in row:
        if isinstance(item, TokenizedDocument):
            made.append([item])
        else:
            made.append(next(from_plain) if isinstance(item, _Plain) else next(from_chat))
    errors = [one for one in made if isinstance(one, RowError)]
    return errors[0] if errors else [document for one in made if isinstance(one, list) for document in one]


def _items(result: Any, config: DataConfig, name: str) -> list[_Item] | RowError:
    if isinstance(result, RowError):
        return result
    results = result if isinstance(result, list) else [result]
    if not results:
        return RowError("the transform made no example of it")
    try:
        return [_item(one, config, name) for one in results]
    except RowError as error:
        return error


def _item(result: Any, config: DataConfig, name: str) -> _Item:
    if isinstance(result, TokenizedDocument):
        return result
    if not isinstance(result, Mapping) or not _NEEDED <= result.keys() <= _KNOWN:
        given = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
        raise UserError(f"the transform returned {given}", where=KEY, value=name, expected=_EXPECTED)
    ground_truth = string_field(result, "ground_truth")
    prompt, remaining = result["prompt"], result.get("remaining_turns") or []
    if isinstance(prompt, list):
        return _Chat(_task(prompt, ground_truth, remaining))
    if remaining or config.thinking == "reasoning_field":
        raise UserError(
            "a plain prompt has no turns",
            where=KEY,
            value=name,
            expected="`prompt` as a list of messages, for `remaining_turns` and for reasoning fields",
        )
    check_answer(ground_truth, config)
    return _Plain(string_field(result, "prompt"), ground_truth)


def _task(prompt: list[Any], ground_truth: str, remaining: Sequence[Any]) -> Task:
    first = len(prompt)
    if not prompt:
        raise RowError("the prompt has no message")
    messages = check_messages([*prompt, {"role": "assistant", "content": ground_truth}, *remaining])
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if remaining and len(turns) == 1:
        raise RowError("`remaining_turns` hold no assistant turn")
    return messages, turns
