"""Structured mode: each example is a row of its own, a prompt with the ground truth that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebft_core.config import RunConfig
from ebft_core.data.document import Record, RowError, TokenizedDocument
from ebft_core.data.extra import extra_json
from ebft_core.data.stop_tokens import stop_token_ids
from ebft_core.data.transforms import Transform
from ebft_core.errors import UserError
from ebft_core.tokenizer import Tokenizer

_PROMPT_KEYS = {"prompt_completion": "data.fields.prompt", "chat": "data.fields.messages"}
"""Built-in transform -> the key that names the column of the prompt."""


@dataclass(frozen=True)
class Example:
    """A prompt and its ground truth.

    Args:
        document: at most `data.sequence_length` tokens; the ground truth begins at `prompt_length`.
        truncated: whether the end of the ground truth was cut off.
        extra: columns for reward functions as JSON; None without `rewards`.
    """

    document: TokenizedDocument
    truncated: bool
    extra: str | None


class ExampleMaker:
    """Makes the structured examples of records.

    Attributes:
        stop_ids: tokens at which a sampler ends a turn.

    Raises:
        UserError: the transform knows no prompts, or nothing ends a turn.
    """

    def __init__(self, config: RunConfig, transform: Transform, tokenizer: Tokenizer) -> None:
        if transform.examples is None:
            raise UserError(
                "a plain text has no prompt whose completion could be written",
                where="data.transform",
                value=config.data.transform,
                expected="prompt_completion, chat, or `package.module:function`",
            )
        self._examples = transform.examples
        self._columns = transform.columns
        self._config = config
        self._tokenizer = tokenizer
        self.stop_ids = stop_token_ids(tokenizer, config.data)

    def make(self, records: Sequence[Record]) -> list[list[Example] | RowError]:
        """The examples of each record; a record with one that cannot be used is bad as a whole."""
        documents = self._examples(records, self._tokenizer, self._config.data)
        return [self._fit_all(*pair) for pair in zip(records, documents, strict=True)]

    def _fit_all(
        self, record: Record, documents: list[TokenizedDocument] | RowError
    ) -> list[Example] | RowError:
        if isinstance(documents, RowError):
            return documents
        try:
            extra = self._extra(record)
            return [self._fit(document, extra) for document in documents]
        except RowError as error:
            return error

    def _fit(self, document: TokenizedDocument, extra: str | None) -> Example:
        check_example(document, self.stop_ids)
        fitted = truncate(document, self._config.data.sequence_length)
        return Example(fitted, bool(document.is_target[len(fitted) :].any()), extra)

    def _extra(self, record: Record) -> str | None:
        if not self._config.rewards:
            return None
        return extra_json(record, self._prompt_columns(record), self._config.data)

    def _prompt_columns(self, record: Record) -> set[str]:
        """The column that the prompt stands in; rewards get the prompt as it was tokenized."""
        key = _PROMPT_KEYS.get(self._config.data.transform)
        names = [] if key is None else self._columns(self._config.data)[key]
        return set([name for name in names if name in record][:1])


def check_example(document: TokenizedDocument, stop_ids: Sequence[int]) -> None:
    """Refuse what cannot be an example, whichever transform made it.

    Raises:
        RowError: no prompt, no ground truth right behind it, or a turn that goes on behind its end.
    """
    prompt, target = document.prompt_length, document.is_target
    if prompt == 0:
        raise RowError("the prompt has no tokens")
    if not target.any():
        raise RowError("the ground truth has no tokens")
    if target[:prompt].any() or not target[prompt]:
        raise RowError("the ground truth does not begin where the prompt ends")
    stops = np.isin(document.input_ids[:-1], stop_ids)
    if bool((stops & target[:-1] & target[1:]).any()):
        raise RowError("a turn of the ground truth goes on behind a token that ends turns")


def truncate(document: TokenizedDocument, length: int) -> TokenizedDocument:
    """The first `length` tokens, without given tokens at the end behind which nothing is written any more.

    Raises:
        RowError: the prompt leaves no room for a token of the ground truth.
    """
    if document.prompt_length >= length:
        raise RowError(
            f"the prompt has {document.prompt_length} tokens, which leaves no room for the ground truth in "
            f"`data.sequence_length: {length}`"
        )
    written: NDArray[np.int64] = np.flatnonzero(document.is_target[:length])
    return document.cut(0, int(written[-1]) + 1)
