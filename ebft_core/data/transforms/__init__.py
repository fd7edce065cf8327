"""From a record to tokens. One file per format; `get_transform` looks a name up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebft_core.data.document import Record, RowError, TokenizedDocument
from ebft_core.data.transforms import (
    chat,
    chat_examples,
    custom,
    custom_examples,
    prompt_completion,
    text,
)
from ebft_core.errors import UserError
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig


@dataclass(frozen=True)
class Transform:
    """How one format becomes tokens.

    Args:
        columns: config key -> columns, one of which a source must have.
        content: the parts of a record that identify the document; raises RowError for a bad row.
        tokenize: a batch of checked records -> one document or RowError each.
        examples: a batch of checked records -> the structured examples of each, untruncated, or RowError;
            None where a record has no prompt.
    """

    columns: Callable[[DataConfig], dict[str, list[str]]]
    content: Callable[[Record, DataConfig], list[Any]]
    tokenize: Callable[[Sequence[Record], Tokenizer, DataConfig], list[TokenizedDocument | RowError]]
    examples: (
        Callable[[Sequence[Record], Tokenizer, DataConfig], list[list[TokenizedDocument] | RowError]] | None
    ) = None


TRANSFORMS: dict[str, Transform] = {
    "text": Transform(text.columns, text.content, text.tokenize),
    "prompt_completion": Transform(
        prompt_completion.columns,
        prompt_completion.content,
        prompt_completion.tokenize,
        prompt_completion.examples,
    ),
    "chat": Transform(chat.columns, chat.content, chat.tokenize, chat_examples.examples),
}


def get_transform(name: str) -> Transform:
    """The transform called `name`, or the user's own for `module:function`.

    Raises:
        UserError: no transform of this name, or the module does not provide one.
    """
    if ":" in name:
        return Transform(
            lambda config: {},
            custom.content,
            custom.tokenizer_for(name),
            custom_examples.examples_for(name),
        )
    if name not in TRANSFORMS:
        raise UserError(
            "no such transform",
            where="data.transform",
            value=name,
            expected=", ".join([*TRANSFORMS, "module:function"]),
        )
    return TRANSFORMS[name]
