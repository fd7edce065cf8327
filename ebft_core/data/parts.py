"""A structured example as text, in parts that are written by the policy or given to it; and as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ebft_core.data.document import IGNORE, TokenizedDocument
from ebft_core.data.thinking import SPAN
from ebft_core.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """A stretch of a conversation's text.

    Args:
        text: as rendered by the chat template.
        written: by the policy (an assistant's turn with its end), or given to it (all else).
    """

    text: str
    written: bool


@dataclass(frozen=True)
class _Encoding:
    ids: list[int]
    offsets: list[tuple[int, int]]


def tokenize_parts(
    examples: Sequence[Sequence[Part]], tokenizer: Tokenizer, *, supervise_thinking: bool
) -> list[TokenizedDocument]:
    """Token ids of whole conversations, with the border of every part between two tokens.

    The tokens before a part are those that the text before it has when it stands alone, as a sampler had
    it. Where the text in one piece is encoded otherwise (a token would span the border), the parts are
    encoded one by one.

    Args:
        examples: parts of each example; the first one is the prompt.
        supervise_thinking: whether thinking spans of written parts carry labels.
    """
    whole = _encode(tokenizer, ["".join(part.text for part in parts) for parts in examples])
    heads = iter(_encode(tokenizer, [head for parts in examples for head in _heads(parts)]))
    documents = []
    for parts, encoding in zip(examples, whole, strict=True):
        before = [next(heads).ids for _ in parts[1:]]
        joined = all(encoding.ids[: len(head)] == head for head in before)
        borders = [len(head) for head in before]
        tokens = (encoding, borders) if joined else _one_by_one(parts, tokenizer)
        documents.append(_document(parts, *tokens, supervise_thinking))
    return documents


def _heads(parts: Sequence[Part]) -> Iterator[str]:
    """The text before the second part, before the third, and so on."""
    return accumulate(part.text for part in parts[:-1])


def _one_by_one(parts: Sequence[Part], tokenizer: Tokenizer) -> tuple[_Encoding, list[int]]:
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    borders, begin = [], 0
    for part, encoding in zip(parts, _encode(tokenizer, [part.text for part in parts]), strict=True):
        borders.append(len(ids))
        ids += encoding.ids
        offsets += [(start + begin, stop + begin) for start, stop in encoding.offsets]
        begin += len(part.text)
    return _Encoding(ids, offsets), borders[1:]


def _document(
    parts: Sequence[Part], encoding: _Encoding, borders: list[int], supervise_thinking: bool
) -> TokenizedDocument:
    ids = np.asarray(encoding.ids, dtype=np.int32)
    lengths = np.diff([0, *borders, len(ids)])
    target = np.repeat([part.written for part in parts], lengths)
    supervised = target
    if not supervise_thinking:
        spans = [match.span() for match in SPAN.finditer("".join(part.text for part in parts))]
        supervised = target & ~inside(np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2), spans)
    labels = np.where(supervised, ids, np.int32(IGNORE))
    return TokenizedDocument(ids, labels, target, int(lengths[0]))


def inside(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Tokens that begin inside one of the spans (an empty token is in none).

    Args:
        offsets: first character and end of every token (L, 2).
        spans: first character and end of every span.
    """
    found = np.zeros(len(offsets), dtype=bool)
    for start, stop in spans:
        found |= (offsets[:, 0] >= start) & (offsets[:, 0] < stop) & (offsets[:, 1] > offsets[:, 0])
    return found


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[_Encoding]:
    """Special tokens spelled in the texts are special (the template wrote them); none is added."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [
        _Encoding(ids, offsets)
        for ids, offsets in zip(encoded.input_ids, encoded.offset_mapping, strict=True)
    ]
