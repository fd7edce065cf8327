"""From documents to training rows: cut the long ones, put several short ones into one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ebft_core.data.document import Ints, TokenizedDocument

if TYPE_CHECKING:
    from ebft_core.config import EBFTConfig

OPEN_ROWS = 64
"""Rows that first-fit looks at; with more, packing gets slower and hardly tighter."""


@dataclass(frozen=True)
class Piece:
    """A document, or a stretch of a long one, with the hash of the whole document.

    Args:
        extra: columns for reward functions, as JSON (structured examples only).
    """

    document: TokenizedDocument
    document_hash: str
    extra: str | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """One training row of L tokens made of one or more documents.

    Args:
        input_ids, labels, is_target: as in `TokenizedDocument`, documents joined (L).
        document_lengths, prompt_lengths: tokens per document; the lengths sum to L.
        document_hashes: one per document.
        extra: columns for reward functions, as JSON; None in runs without own rewards.
    """

    input_ids: Ints
    labels: Ints
    is_target: NDArray[np.bool_]
    document_lengths: list[int]
    prompt_lengths: list[int]
    document_hashes: list[str]
    extra: str | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    def as_dict(self) -> dict[str, Any]:
        """The row as a dataset gives it back: column -> values."""
        columns = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "is_target": self.is_target,
            "document_lengths": self.document_lengths,
            "prompt_lengths": self.prompt_lengths,
            "document_hashes": self.document_hashes,
        }
        return columns if self.extra is None else {**columns, "extra": self.extra}


def cut(document: TokenizedDocument, sequence_length: int) -> list[TokenizedDocument]:
    """Consecutive pieces of at most `sequence_length` tokens."""
    return [
        document.cut(start, min(start + sequence_length, len(document)))
        for start in range(0, len(document), sequence_length)
    ]


def has_room(document: TokenizedDocument, ebft: EBFTConfig) -> bool:
    """Whether a whole target fits somewhere behind the shortest context, whatever the stride.

    Independent of `ebft.stride`, so that another stride needs no tokenizing; a row kept by this rule may
    still have no anchor at a coarse stride.
    """
    first = max(1, ebft.context_length, document.prompt_length + ebft.min_completion_prefix)
    targets = np.concatenate([[0], np.cumsum(document.is_target[first:])])
    span = ebft.generate_max_len
    return bool((targets[span:] - targets[:-span] == span).any())


class Packer:
    """First fit in the order given: a piece goes into the oldest open row that has room for it.

    Deterministic. A row is given out when it is full, or is the oldest of more than `OPEN_ROWS`.

    Args:
        sequence_length: tokens of a full row; None makes every piece a row of its own.
    """

    def __init__(self, sequence_length: int | None) -> None:
        self._limit = sequence_length
        self._rows: list[list[Piece]] = []
        self._sizes: list[int] = []

    def add(self, piece: Piece) -> Iterator[Row]:
        """Take one piece and give out the row that is complete now, if there is one."""
        size = len(piece.document)
        if self._limit is None or size >= self._limit:
            yield join([piece])
            return
        room = self._limit - size
        index = next((i for i, used in enumerate(self._sizes) if used <= room), None)
        if index is None:
            index = len(self._rows)
            self._rows.append([])
            self._sizes.append(0)
        self._rows[index].append(piece)
        self._sizes[index] += size
        if self._sizes[index] == self._limit:
            yield self._give_out(index)
        elif len(self._rows) > OPEN_ROWS:
            yield self._give_out(0)

    def flush(self) -> Iterator[Row]:
        """The rows that are still open, oldest first."""
        while self._rows:
            yield self._give_out(0)

    def _give_out(self, index: int) -> Row:
        del self._sizes[index]
        return join(self._rows.pop(index))


def join(pieces: Sequence[Piece]) -> Row:
    """The pieces one after the other as a row; columns for rewards exist only where a row is one piece."""
    documents = [piece.document for piece in pieces]
    return Row(
        np.concatenate([d.input_ids for d in documents]),
        np.concatenate([d.labels for d in documents]),
        np.concatenate([d.is_target for d in documents]),
        [len(d) for d in documents],
        [d.prompt_length for d in documents],
        [piece.document_hash for piece in pieces],
        pieces[0].extra if len(pieces) == 1 else None,
    )
