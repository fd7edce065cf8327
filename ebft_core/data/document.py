"""What a transform makes of one record, and the errors it may raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""Label of a token that carries no cross-entropy loss."""

Record = Mapping[str, Any]
Ints = NDArray[np.int32]


class RowError(ValueError):
    """A record cannot be used; the message says why. It is reported as a bad row, not as a crash."""


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """One document as tokens. Sequences of Python numbers are turned into arrays.

    Args:
        input_ids: token ids, int32 (L).
        labels: int32 (L); the token id where it is supervised for cross-entropy, else -100.
        is_target: bool (L); whether a token may be part of an EBFT target.
        prompt_length: tokens before the first one that may be a target; 0 for plain text.

    Raises:
        ValueError: the lengths differ, the document is empty, a label is neither its token nor -100, or
            `prompt_length` lies outside the document.
    """

    input_ids: Ints
    labels: Ints
    is_target: NDArray[np.bool_]
    prompt_length: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("input_ids", np.int32), ("labels", np.int32), ("is_target", np.bool_)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        length = len(self.input_ids)
        if length == 0 or self.input_ids.ndim != 1:
            raise ValueError("input_ids must be a non-empty list of token ids")
        if self.labels.shape != self.input_ids.shape or self.is_target.shape != self.input_ids.shape:
            raise ValueError(
                f"lengths differ: {length} input_ids, {len(self.labels)} labels, "
                f"{len(self.is_target)} is_target"
            )
        if self.input_ids.min() < 0:
            raise ValueError("token ids must not be negative")
        if bool(((self.labels != IGNORE) & (self.labels != self.input_ids)).any()):
            raise ValueError(f"labels[i] must be input_ids[i] or {IGNORE}")
        if not 0 <= self.prompt_length <= length:
            raise ValueError(f"prompt_length must be in 0…{length}, got {self.prompt_length}")

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, start: int, stop: int) -> TokenizedDocument:
        """Tokens `start:stop` as a document of their own."""
        return TokenizedDocument(
            self.input_ids[start:stop],
            self.labels[start:stop],
            self.is_target[start:stop],
            max(0, min(self.prompt_length, stop) - start),
        )


def string_field(record: Record, column: str) -> str:
    """A column's text. Raises RowError if it is missing, null, not a string or blank."""
    if column not in record:
        raise RowError(f"missing field `{column}`")
    value = record[column]
    if value is None:
        raise RowError(f"field `{column}` is null")
    if not isinstance(value, str):
        raise RowError(f"field `{column}` has the wrong type: {type(value).__name__}, expected a string")
    if not value.strip():
        raise RowError(f"field `{column}` is empty")
    if not value.isascii():
        _refuse_surrogates(value, column)
    return value


def _refuse_surrogates(value: str, column: str) -> None:
    r"""JSON can spell half a character (`\ud800`), which no tokenizer can encode."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"field `{column}` is not valid Unicode: {error.reason}") from error


def content_hash(parts: Sequence[Any]) -> str:
    """Identity of a document: 32 hex characters of sha256 over its content, whatever its place."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
