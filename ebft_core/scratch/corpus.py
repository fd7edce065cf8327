"""The text a scratch model is trained on, as sequences of equal length."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_core.data.reader import BadRow, read_files
from ebft_core.data.sources import resolve_patterns
from ebft_core.errors import UserError, UserErrors
from ebft_core.tokenizer import Tokenizer

HELDOUT_SHARE = 0.05
"""Share of the documents that measures the model instead of training it (at least one document)."""
_WHERE = "model.from_scratch.sources"


@dataclass(frozen=True)
class Corpus:
    """Sequences of token ids, int64: `train_NL` and `heldout_NL` (N sequences of L tokens)."""

    train_NL: Tensor
    heldout_NL: Tensor


def read_corpus(patterns: Sequence[str]) -> list[str]:
    """The non-empty whole-file texts that the patterns match.

    Raises:
        UserError: nothing matches, a file is not text, or all files are empty. A file that is not valid
            UTF-8 is an error too: choose the patterns so that they leave it out.
    """
    files = resolve_patterns(patterns, where=_WHERE)
    wrong = [file for file in files if file.format != "text"]
    if wrong:
        raise UserError(
            "not whole-file text", where=_WHERE, value=wrong[0].name, expected=".txt .py .md .rst"
        )
    rows = list(read_files(files))
    bad = [row for row in rows if isinstance(row, BadRow)]
    if bad:
        raise UserErrors(
            [UserError("a source file is not text", where=r.origin, value=r.reason) for r in bad[:20]]
        )
    texts = [text for row in rows if not isinstance(row, BadRow) and (text := row.record["text"])]
    if not texts:
        raise UserError("the sources hold no text", where=_WHERE, value=list(patterns))
    return texts


def make_corpus(texts: Sequence[str], tokenizer: Tokenizer, sequence_length: int) -> Corpus:
    """Documents joined by the end-of-sequence token and cut into sequences; remainders are left out.

    Held-out documents are those with the smallest hash of their text. A single document keeps its end
    as held-out text.

    Raises:
        UserError: not even one sequence for training and one for measuring.
    """
    order = sorted(range(len(texts)), key=lambda i: hashlib.sha256(texts[i].encode()).digest())
    heldout = set(order[: math.ceil(HELDOUT_SHARE * len(texts))]) if len(texts) > 1 else set()
    ids = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    ).input_ids
    train_X = _join([ids[i] for i in range(len(texts)) if i not in heldout], tokenizer.eos_token_id)
    heldout_X = _join([ids[i] for i in sorted(heldout)], tokenizer.eos_token_id)
    if len(texts) == 1:
        cut = int(len(train_X) * (1 - HELDOUT_SHARE))
        train_X, heldout_X = train_X[:cut], train_X[cut:]
    corpus = Corpus(_cut(train_X, sequence_length), _cut(heldout_X, sequence_length))
    if not len(corpus.train_NL) or not len(corpus.heldout_NL):
        raise UserError(
            "too little text to train a base model on",
            where=_WHERE,
            value=f"{len(train_X)} training and {len(heldout_X)} held-out tokens",
            expected=f"at least {sequence_length} of each (model.from_scratch.sequence_length)",
        )
    return corpus


def _join(documents: Sequence[Sequence[int]], eos: int) -> Tensor:
    return torch.tensor([token for ids in documents for token in (*ids, eos)], dtype=torch.int64)


def _cut(stream_X: Tensor, length: int) -> Tensor:
    count = len(stream_X) // length
    return stream_X[: count * length].view(count, length)
